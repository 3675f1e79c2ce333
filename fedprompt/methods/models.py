"""Models of the gallery, and the settings that make them from frozen transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.backbones.freezing import Trainable, own_copy
from fedprompt.interfaces import PromptInjector, TrainableTrunk, Trunk
from fedprompt.methods.setting import Setting

_Clip = TypeVar("_Clip", bound="ClipSetting")

Tune = Callable[[nn.Module], tuple[nn.Module, list[nn.Parameter]]]
"""Function from a model to a copy, and the parameters that the copy trains or has been given."""


class Complete(nn.Module):
    """Module whose state has all of its tensors: a tensor that is assigned becomes a buffer.

    Frozen networks are plain objects, so they are not in the state.

    Example:
        >>> module = Complete()
        >>> module.prototypes = torch.zeros(2, 3)
        >>> [*module.state_dict()]
        ['prototypes']
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self.register_buffer(name, value)
        else:
            super().__setattr__(name, value)


class Personal(nn.Module):
    """A client's own model, and the shared model for a client that has not trained yet.

    The state has both models, so every client can load that of every other one. Of the model that
    does not predict it has a frozen copy.

    Args:
        own: Model of the client.
        shared: Model of all clients.
        trained: Whether the client has trained. If not, `shared` predicts.
    """

    def __init__(self, own: nn.Module, shared: nn.Module, *, trained: bool) -> None:
        super().__init__()
        unused = deepcopy(shared if trained else own).requires_grad_(False)
        self.own, self.shared = (own, unused) if trained else (unused, shared)
        self.register_buffer("trained", torch.tensor(trained))

    @property
    def model(self) -> nn.Module:
        """The model that predicts."""
        return self.own if self.trained else self.shared

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict with one of the models."""
        return cast(Tensor, self.model(inputs))


class PromptedModel(Complete):
    """Prompts and a linear head on a frozen trunk, which is shared and has no part in messages.

    Args:
        trunk: Frozen vision transformer.
        num_classes: Number of classes.
        num_features: Width of the features, by a learned projection. If None, features are those
            of the trunk.

    Attributes:
        prompts: Module that returns a prompt stream, or None, as in a new model.
    """

    def __init__(self, trunk: Trunk, num_classes: int, *, num_features: int | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.prompts: nn.Module | None = None
        self.projection = (
            nn.Identity() if num_features is None else nn.Linear(trunk.num_features, num_features)
        )
        self.head = nn.Linear(num_features or trunk.num_features, num_classes)

    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Encode images with `prompts`, if there are any."""
        streams = () if self.prompts is None else (self.prompts(),)
        encoded = fp.encode_prompted(self.trunk, images, *streams)
        return cast(Tensor, self.projection(encoded.pooled))

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images."""
        return cast(Tensor, self.head(self.features(images)))


class _OneTrunk(Setting):
    """Setting with one trunk or several."""

    trunks: Sequence[Trunk]

    @property
    def trunk(self) -> Trunk:
        """The trunk of all clients."""
        rule = "have one trunk, for a model that all clients share"
        check.require(len(self.trunks) <= 1, "trunks", rule, len(self.trunks))
        return self.trunks[0]


@dataclass(kw_only=True)
class VitSetting(_OneTrunk):
    """Setting of images and frozen vision transformers.

    Attributes:
        trunk: Frozen trunk of all clients. It takes the place of `trunks`.
        trunks: Frozen trunks, given to clients in turn. With one trunk, all clients share it.
        num_prompts: Number of prompts at a layer.
        num_features: Width of the features that clients with different trunks have in common. If
            None, they are the features of the trunk.
        tune: What clients train in place of deep prompts, such as
            ``partial(fedprompt.tuning.lora, rank=2)``. Methods that name prompts or choose parts,
            such as FedPer and FedVPT, need None.
        prompts: Function from a trunk to a module that returns a prompt stream, such as
            ``partial(fedprompt.ShallowPrompts, 4)``. If None, deep prompts. Methods that make
            prompts themselves do not use it.

    Example:
        >>> from fedprompt import samples, vit_trunk
        >>> setting = VitSetting(
        ...     trunks=[vit_trunk(samples.vit("S")), vit_trunk(samples.vit("B"))],
        ...     num_features=32, num_classes=10, rounds=2,
        ... )
        >>> [setting.new_model(client).trunk.dim for client in range(4)]
        [48, 64, 48, 64]
    """

    trunks: Sequence[Trunk] = ()
    num_prompts: int = 8
    num_features: int | None = None
    tune: Tune | None = None
    prompts: Callable[[Trunk], PromptInjector] | None = None
    trunk: InitVar[Trunk | None] = None

    def __post_init__(self, trunk: Trunk | None = None) -> None:  # noqa: RUF033
        super().__post_init__()
        check.sequence("trunks", self.trunks, "trunks")
        if trunk is not None:
            if self.trunks:
                raise check.wrong("trunk", "be None if `trunks` is given", check.kind(trunk))
            self.trunks = [trunk]
        check.some("trunks", self.trunks, "have at least one trunk")
        check.optional(check.function, "tune", self.tune)
        check.optional(check.function, "prompts", self.prompts)
        if isinstance(self.prompts, nn.Module):
            raise check.wrong_type("prompts", "make a module from a trunk", "a module")
        check.optional(check.count, "num_features", self.num_features)
        trunks = [trunk for trunk in self.trunks if isinstance(trunk, TrainableTrunk)]
        if any([*trunk.trainable.parameters()] for trunk in trunks):
            rule = "be frozen, because `tune` says what clients train"
            raise check.wrong("trunks", rule, "a trunk with trained parameters")

    @property
    def frozen_networks(self) -> Sequence[Any]:
        """The trunks."""
        return self.trunks

    @property
    def num_backbones(self) -> int:
        """Number of trunks."""
        return len(self.trunks)

    def trunk_of(self, client: int | None = None) -> Trunk:
        """Return the trunk of a client, or that of all clients."""
        return self.trunk if client is None else self.trunks[self.backbone_of(client)]

    def width_of(self, client: int) -> int:
        """Return the width of the features of a client's trunk."""
        return self.trunk_of(client).num_features

    def model_class(self, trunk: Trunk) -> type[PromptedModel]:
        """Return the class of models with this trunk."""
        return PromptedModel

    def new_model(
        self,
        client: int | None = None,
        *,
        prompts: Callable[[Trunk], nn.Module | None] | None = None,
        tune: Tune | None = None,
    ) -> PromptedModel:
        """Make a model; the initial values depend on the seed, the trunk and `prompts` alone.

        Args:
            client: Id of the client that owns the model; it decides the trunk. If None, all
                clients share the model.
            prompts: Function from the trunk to a module of prompts. For a model without prompts,
                ``lambda trunk: None``. If None, deep prompts, and with `tune` no prompts.
            tune: Function from the model of the trunk to a copy and its trained parameters, such as
                :func:`fedprompt.tuning.norms`. They are the part "tuned" of the model. If None,
                that of the setting; without one, the trunk is frozen and shared.

        Raises:
            ValueError: If no client is named, and there are several trunks.
        """
        trunk = self.trunk_of(client)
        prompts = prompts or cast(Any, self.prompts)
        if self.tune is not None:
            if prompts is not None or tune is not None:
                raise check.wrong("tune", "be None for a method with parts of its own", self.tune)
            tune = self.tune
        make = prompts or (self.deep_prompts if tune is None else lambda trunk: None)

        def drawn() -> PromptedModel:
            kind = self.model_class(trunk)
            model = kind(trunk, self.num_classes, num_features=self.num_features)
            if model.prompts is None:
                check.optional(check.module, "prompts(trunk)", made := make(trunk))
                model.prompts = made
            if tune is not None:
                model.trunk = tuned = tuned_trunk(trunk, tune)
                model.tuned = tuned.trainable
            return model

        return self.seeded(drawn)

    def bare_model(self) -> PromptedModel:
        """Make a model of all clients without prompts."""
        return self.new_model(prompts=lambda trunk: None)

    def deep_prompts(self, trunk: Trunk) -> fp.DeepPrompts:
        """Make prompts for all blocks of a trunk, for methods that need prompts."""
        return fp.DeepPrompts(self.num_prompts, trunk)


# `trunk` is an argument and a property, and `dataclasses.replace` passes `trunks` alone.
del VitSetting.trunk, VitSetting.__dataclass_fields__["trunk"]


def tuned_trunk(trunk: Any, tune: Tune) -> Any:
    """Make a trunk of a copy of a trunk's model, with trained parameters.

    A trunk with a function `tuned`, from `tune` to such a trunk, makes it itself.
    """

    def copied(model: nn.Module) -> tuple[nn.Module, list[nn.Parameter]]:
        tuned, parameters = tune(model)
        check.require(tuned is not model, "tune", "return a copy of the model", "the model itself")
        return tuned, parameters

    if hasattr(trunk, "tuned"):
        return trunk.tuned(copied)
    if hasattr(trunk, "mask"):
        model, parameters = copied(trunk.model)
        return fp.vit_trunk(model, attention_mask=trunk.mask, trainable=parameters)
    modules = [name for name, part in vars(trunk).items() if isinstance(part, nn.Module)]
    rule = "have their network as `model`, and no other module, to be tuned"
    check.typed(modules == ["model"], "trunks", rule, trunk)
    return _around(trunk, *copied(trunk.model))


def _around(trunk: Any, model: nn.Module, parameters: list[nn.Parameter]) -> Any:
    """Make a trunk of the same class around another model; copies have their trained parameters."""

    def own_parameters(self: Any, memo: dict[int, Any]) -> Any:
        return own_copy(self, self.model, self.trainable, memo)

    kind = type(type(trunk).__name__, (type(trunk),), {"__deepcopy__": own_parameters})
    made: Any = object.__new__(kind)
    trainable = Trainable(fp.freeze(model), parameters).requires_grad_()
    vars(made).update(vars(trunk), model=model, trainable=trainable)
    return made


class ClipModel(Complete):
    """Text tower of a frozen CLIP and its class names, for models with prompts.

    Args:
        setting: Setting with the frozen CLIP.
    """

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__()
        self.tower = setting.tower
        self.names = setting.names
        self.scale = setting.scale

    def encode_names(
        self, contexts: Float[Tensor, ...], **axes: bool
    ) -> Float[Tensor, "*contexts classes dim"]:
        """Encode all class names behind each context of :func:`fedprompt.prompted_text`."""
        return self.tower(fp.prompted_text(contexts, self.names, **axes))


class PromptedClassifier(ClipModel):
    """Learnable context before the class names, which classifies the image features of a CLIP.

    Args:
        setting: Setting with the frozen CLIP.
        context: Module that returns contexts, such as :class:`fedprompt.ContextPrompts`.
    """

    def __init__(self, setting: ClipSetting, context: nn.Module) -> None:
        super().__init__(setting)
        self.context = context

    def text(self) -> Float[Tensor, "contexts classes dim"]:
        """Encode all class names behind each context."""
        return self.encode_names(self.context())

    def forward(self, tokens: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch classes"]:
        """Classify images by their pooled token, which is first."""
        return fp.cosine_logits(tokens[:, 0], self.text()[0], scale=self.scale)


@dataclass(kw_only=True)
class ClipSetting(Setting):
    """Setting of a frozen CLIP. Inputs are image tokens, the pooled one first, or images.

    Attributes:
        tower: Text tower of a CLIP, which takes contexts.
        class_names: Names of the classes.
        num_classes: Number of classes. If 0, that of their names.
        clip: Frozen model of open_clip. If None, that of the tower.
        scale: Factor of the cosines in logits. If None, that of the model (``logit_scale``).
        template: Sentence around a class name.
        length: Number of learnable tokens of a context.
        attributes: Sentences that describe each class, one or more for each, for methods such as
            FedMVP. If None, a class has one sentence, its name in `template`.

    Example:
        >>> from fedprompt import TextTower, samples
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> setting = ClipSetting(tower=tower, class_names=samples.CLASS_NAMES, rounds=10)
        >>> setting.new_model().text().shape == (1, 24, setting.handwritten_text().shape[1])
        True
    """

    tower: fp.TextTower
    class_names: Sequence[str] = ()
    clip: Any = None
    scale: float = cast(float, None)
    template: str = "a photo of a {}."
    length: int = 8
    attributes: Sequence[Sequence[str]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is None:
            self.clip = self.tower.model
        if cast(Any, self.scale) is None:
            self.scale = _scale(self.clip)
        self.names = self.tower.class_names(self.class_names)

    def _check_classes(self) -> None:
        check.instance("tower", self.tower, fp.TextTower, "be a TextTower")
        check.sequence("class_names", self.class_names, "names")
        check.some("class_names", self.class_names, "name the classes")
        holds = isinstance(self.template, str) and "{}" in self.template
        rule = "be a sentence with {} in place of the name"
        check.require(holds, "template", rule, repr(self.template))
        count = self.num_classes = self.num_classes or len(self.class_names)
        given, rule = len(self.class_names), f"have a name for each of {count} classes"
        check.require(given == count, "class_names", rule, given)
        self._check_attributes()

    def _check_attributes(self) -> None:
        if self.attributes is None:
            return
        check.sequence("attributes", self.attributes, "sequences of sentences")
        given, rule = len(self.attributes), f"have sentences for each of {self.num_classes} classes"
        check.require(given == self.num_classes, "attributes", rule, given)
        for label, texts in enumerate(self.attributes):
            check.texts(f"attributes[{label}]", texts)

    @property
    def frozen_networks(self) -> Sequence[Any]:
        """The text tower, and the model that it is part of."""
        return [self.tower, *([self.clip] if isinstance(self.clip, nn.Module) else [])]

    def renamed(self: _Clip, class_names: Sequence[str]) -> _Clip:
        """Return the same setting of other classes, which have no attributes."""
        rule = "be those of the setting, whose `attributes` describe them"
        check.require(self.attributes is None, "class_names", rule, check.kind(class_names))
        return replace(self, class_names=class_names, num_classes=len(class_names))

    def new_context(self, length: int | None = None) -> fp.ContextPrompts:
        """Make a context, by default as long as others, whose values depend on the seed alone."""
        size = self.length if length is None else length
        return self.seeded(lambda: fp.ContextPrompts(self.tower.dim, length=size))

    def drawn_contexts(self, purpose: str, count: int = 1) -> fp.ContextPrompts:
        """Make contexts from a stream of their own, which `purpose` names."""
        size = dict[str, Any](num_contexts=count, length=self.length)
        draw = self.generator(0, purpose=purpose)
        return fp.ContextPrompts(self.tower.dim, **size, generator=draw)

    def new_model(self, client: int = 0) -> PromptedClassifier:
        """Make a model with a new context, the same for every client."""
        return PromptedClassifier(self, self.new_context())

    def handwritten_text(self) -> Float[Tensor, "classes dim"]:
        """Encode the class names in the handwritten template, normalized."""
        return fp.zero_shot_classifier(self.tower, self.class_names, [self.template])

    def attribute_text(self) -> list[Float[Tensor, "sentences dim"]]:
        """Encode the sentences of each class, normalized; without attributes, the template."""
        if self.attributes is None:
            return list(torch.split(self.handwritten_text(), 1))
        texts = [text for each in self.attributes for text in each]
        features = fp.zero_shot_classifier(self.tower, texts, ["{}"])
        return list(torch.split(features, [len(each) for each in self.attributes]))


def _scale(clip: Any) -> float:
    """Return the factor of the cosines that a CLIP learned."""
    logarithm = getattr(clip, "logit_scale", None)
    if not isinstance(logarithm, Tensor):
        rule = "be given for a model without `logit_scale`"
        raise check.wrong("scale", rule, check.kind(clip))
    return logarithm.exp().item()


def check_sequences(**values: Any) -> None:
    """Require sequences, such as layers or names of parts."""
    for name, value in values.items():
        check.sequence(name, value, "values")


def check_logits(argument: str, logits: Any, batch: int, classes: int) -> None:
    """Require that a function of the caller returned logits (batch, classes)."""
    check.instance(argument, logits, Tensor, "return logits")
    check.shape(argument, logits, (batch, classes), "logits (batch, classes) =")


def replace_contexts(model: nn.Module, **learners: Any) -> None:
    """Put copies of learners in place of contexts of a model; all have equal lengths.

    Args:
        model: Model with context learners as parts.
        learners: New learners by part. If None, the part stays.
    """
    for name, learner in learners.items():
        if learner is not None:
            check.module(name, learner)
            setattr(model, name, deepcopy(learner))
    first, *others = learners
    shape, of = model.get_submodule(first)()[0].shape, f"`{first}()`, each context"
    for name in others:
        check.shape(f"{name}()", model.get_submodule(name)()[0], shape, of)
