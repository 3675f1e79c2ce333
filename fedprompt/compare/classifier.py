"""Trained classifiers in folders: a state, how the module is made, and the preparation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn as nn
from jaxtyping import Float
from PIL import Image
from torch import Tensor

import fedprompt._refusals as check
import fedprompt.samples  # noqa: F401  (its networks have names)
from fedprompt._files import path_of
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.pretrained import Network, check_source, network
from fedprompt.compare import rows
from fedprompt.data.opening import MAX_PIXELS
from fedprompt.interfaces import Method, Round
from fedprompt.methods import METHODS, ClientData, ClipSetting, Setting, VitSetting
from fedprompt.saved import saved_folder as saved
from fedprompt.saved.network import rebuilt
from fedprompt.saved.saved_folder import Description

TRAINING = {"rounds", "steps", "seed", "public", "device", "batch_size", "cohort_size", "schedule"}
TRAINING |= {"epochs", "drop_last", "augment", "make_optimizer", "autocast"}
NETWORK = {"tower", "clip", "trunks"}
"""Fields of a setting that a prediction does not need, or that the network has."""
BATCH = 32
"""Number of images that are classified at a time."""

Picture = str | os.PathLike[str] | Image.Image


class Predicted(NamedTuple):
    """Predictions for some images.

    Attributes:
        names: Class with the largest probability, for each image.
        probabilities: Probability of each class, on the CPU.
    """

    names: list[str]
    probabilities: Float[Tensor, "images classes"]


class Classifier(nn.Module):
    """Trained classifier of images, with the preparation and the class names of its run.

    :func:`load` has an example.

    Args:
        module: Prediction of a method, or a network with prompts.
        network: Its frozen network, and the preparation of images.
        description: Contents of ``config.json``.

    Attributes:
        class_names: Names of the classes, in the order of logits.
        preparation: Steps from an image to an input.
    """

    def __init__(self, module: nn.Module, network: Network, description: Description) -> None:
        super().__init__()
        self.module, self.network, self.description = module, network.model, description
        self.class_names, self.preparation = list(description.class_names), network.preparation
        self._tokens = network.tokens if description.inputs == "tokens" else None

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return the logits of prepared images, which are moved to the network."""
        like = next(self.network.parameters())
        images, half = images.to(like), like.dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(like.device.type, like.dtype) if half else nullcontext():
            inputs = images if self._tokens is None else self._tokens(images)
            logits: Tensor = self.module(inputs)
        return logits.float()

    @torch.no_grad()
    def predict(
        self, images: Picture | Sequence[Picture], *, max_pixels: int = MAX_PIXELS
    ) -> Predicted:
        """Classify images, prepared as in the run.

        Args:
            images: Paths or images of Pillow, or one of them.
            max_pixels: Largest number of pixels of an image in a file.

        Raises:
            OSError: If a file cannot be read as an image. The text has its path.
        """
        one = isinstance(images, str | os.PathLike | Image.Image)
        listed: Any = [images] if one else images
        found = [torch.zeros(0, len(self.class_names))]
        for start in range(0, len(listed), BATCH):
            part = listed[start : start + BATCH]
            prepared = [self.preparation(image, max_pixels=max_pixels) for image in part]
            inputs = torch.stack(prepared)
            found.append(self(inputs).softmax(1).cpu())
        probabilities = torch.cat(found)
        return Predicted([self.class_names[k] for k in probabilities.argmax(1)], probabilities)


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    network: Network,
    setting: Setting,
    method: str,
    make: Callable[..., Method],
    values: Mapping[str, Any],
    class_names: Sequence[str],
    client: int | None,
    inputs: str,
    tests: tuple[Tensor, Tensor],
    about: Mapping[str, str] | None = None,
) -> None:
    """Save the prediction of a client, or of all clients, so that :func:`load` makes it again.

    The module is made from the description, and its logits on `tests` are compared before
    anything is written. Then the folder is written at once, and read back.

    Args:
        folder: Folder, such as ``OUT/models/fedprox-seed0``.
        model: Prediction, whose state has all that it learned.
        network: Frozen network of the run.
        setting: Setting of the method.
        method: Name of the method, or FILE:NAME. Training alone is "local", or "coop" with a CLIP.
        make: Function of the method.
        values: Hyperparameters.
        class_names: Names of the classes, in the order of labels.
        client: Client of the model, or None for a model of all clients.
        inputs: "images", or "tokens" of a CLIP.
        tests: Some test inputs of `model`, and the same images as :attr:`Network.preparation`
            prepares them.
        about: Texts for the card, such as ``{"data": "photos"}``.

    Raises:
        ValueError: If the setting has functions or tensors, so that it cannot be written, or the
            module that is made again has other logits.
    """
    rule = "be a VitSetting or a ClipSetting"
    check.typed(type(setting) in (VitSetting, ClipSetting), "setting", rule, setting)
    described = replace(
        of_network(network, "clip" if isinstance(setting, ClipSetting) else "vit"),
        class_names=tuple(class_names),
        method=method,
        values={name: plain(f"values[{name!r}]", value) for name, value in values.items()},
        setting=plain_fields(setting),
        client=client,
        inputs=inputs,  # type: ignore[arg-type]
        about=dict(about or {}),
    )
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    again = Classifier(made(described, state, network, make, setting.device), network, described)
    with torch.no_grad():
        expected, found = model.eval()(tests[0]).float(), again(tests[1])
    apart = float((expected - found.to(expected)).abs().max())
    rule = "have a state from which it is made again with the same logits"
    fits = apart <= 1e-5 * max(1.0, float(expected.abs().max()))
    check.require(fits, "model", rule, f"a difference of {apart:.2g} for {method}")
    write(path_of("folder", folder, of="folder"), described, state)


def of_network(network: Network, kind: Literal["vit", "clip"]) -> Description:
    """Describe a frozen network and its preparation."""
    return Description(
        kind=kind,
        model=network.source,
        arguments=dict(network.arguments),
        fingerprint=network.fingerprint,
        preparation=network.preparation,
    )


def write(path: Path, described: Description, state: Mapping[str, Tensor]) -> None:
    """Write a folder with its card, and read it back."""
    name = path.resolve().name
    call = f'model = compare.load("{name}")\nprint(model.predict(["image.png"]))'
    card = saved.card(described, name, f"from fedprompt import compare\n\n{call}")
    saved.write(path, described, state, card)
    _, back = saved.read(path)
    same = all(torch.equal(back[key], value.cpu()) for key, value in state.items())
    check.require(same and back.keys() == state.keys(), "folder", "be read as it was written", path)


def plain_fields(setting: Setting) -> dict[str, Any]:
    """Return the fields of a setting on which its predictions depend, and that are not defaults."""
    found = {}
    for one in fields(setting):
        value = getattr(setting, one.name)
        usual = one.default_factory() if one.default_factory is not MISSING else one.default
        if one.init and one.name not in TRAINING | NETWORK and value is not usual:
            found[one.name] = plain(f"setting.{one.name}", value)
    return found


def plain(name: str, value: Any) -> Any:
    """Return a value of numbers, texts, and lists and dicts of these; keys of dicts are texts.

    Raises:
        ValueError: If it has other parts, such as a function or a tensor.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(name, part) for part in value]
    if isinstance(value, Mapping):
        return {str(key): plain(name, part) for key, part in value.items()}
    fits = isinstance(value, bool | int | float | str | None)
    check.require(fits, name, "be plain, so that a classifier can be written", check.kind(value))
    return value


def made(
    described: Description,
    state: Mapping[str, Tensor] | None,
    network: Network,
    make: Callable[..., Method],
    device: torch.device | str,
) -> nn.Module:
    """Make the prediction of a method for a client without data, and load its state."""
    given: dict[str, Any] = {
        "rounds": 1,
        "steps": 1,
        "device": device,
        "public": network.inputs.to(device),
    }
    given |= described.setting
    if described.kind == "clip":
        setting: Setting = ClipSetting(tower=network.tower, **given)  # type: ignore[arg-type]
    else:
        setting = VitSetting(trunk=network.trunk, **given)
    images = network.inputs.to(device)
    inputs = network.tokens(images) if described.inputs == "tokens" else images
    with torch.device(device), torch.enable_grad():
        method = make(setting, **{name: _tuple(value) for name, value in described.values.items()})
        client = described.client or 0
        data = ClientData(
            setting, client, 0, torch.zeros(1, dtype=torch.int64), lambda at: inputs[at]
        )
        model: nn.Module = Round(-1, method.server.state, {}).model(method, data)
    if state is not None:
        model.load_state_dict({name: value.to(device) for name, value in state.items()})
    return model.eval()


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def load(
    folder: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    network: Network | None = None,
    class_names: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Classifier:
    """Load a classifier from its folder, without data and without training.

    Args:
        folder: Folder of :func:`save`, or of :func:`fedprompt.save_prompts`.
        weights: File or folder of the network's weights. If None, its library loads them.
        network: Network, for one that has no name.
        class_names: Other class names, for a CLIP whose method learned nothing for each class.
        device: Device of the network.
        dtype: Dtype of the network, such as torch.bfloat16. If None, float32.

    Raises:
        ValueError: If a file is damaged, or weights are of another network.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fedprompt import DeepPrompts, save_prompts
        >>> frozen = network("digits-B")
        >>> parts = {"prompts": DeepPrompts(2, frozen.trunk), "head": nn.Linear(64, 2)}
        >>> about = {"class_names": ["even", "odd"], "model": "digits-B"}
        >>> with TemporaryDirectory() as folder:
        ...     save_prompts(nn.ModuleDict(parts), folder, trunk=frozen.trunk, **about,
        ...                  preparation=frozen.preparation)
        ...     model = load(folder)
        >>> names, probabilities = model.predict(Image.new("L", (200, 160)))
        >>> names[0] in model.class_names, tuple(probabilities.shape)
        (True, (1, 2))
    """
    described, state = saved.read(path_of("folder", folder, of="folder"))
    frozen = network or _network(described, weights)
    saved.check_fingerprint(described, _fingerprint(described, frozen))
    frozen = replace(frozen, preparation=described.preparation or frozen.preparation)
    frozen.model.to(device)
    if not described.method:
        module: nn.Module = rebuilt(described, state, frozen).to(device).eval()
    else:
        make = function_of(described.method)
        if class_names is not None:
            described, state = _renamed(described, state, frozen, make, class_names)
        module = made(described, state, frozen, make, device)
    classifier = Classifier(module, frozen, described)
    return classifier if dtype is None else classifier.to(dtype)


def _network(described: Description, weights: Any) -> Network:
    rule = "name the network, or `network` be given, because the folder does not name it"
    check.require(described.model or weights is not None, "weights", rule, None)
    if described.model:
        check_source(described.model, described.arguments)
        return network(
            described.model, described.kind, weights=weights, arguments=described.arguments
        )
    return network(os.fspath(weights), described.kind)


def _fingerprint(described: Description, frozen: Network) -> Mapping[str, str]:
    if described.method:
        return frozen.fingerprint
    return fingerprint(frozen.model if described.kind == "clip" else frozen.trunk)


def function_of(method: str) -> Callable[..., Method]:
    """Return the function of a method of the gallery, or of FILE:NAME."""
    if method in METHODS:
        return METHODS[method].make
    path, _, name = method.rpartition(":")
    found = rows.read_methods(Path(path))
    check.require(name in found, "folder", f"be of a function of {path}", repr(name))
    return found[name]


def _renamed(
    described: Description,
    state: Mapping[str, Tensor],
    frozen: Network,
    make: Callable[..., Method],
    class_names: Sequence[str],
) -> tuple[Description, dict[str, Tensor]]:
    """Return the description and the state for other classes.

    What differs between new modules of the old and of the new names is made from names, so it is
    that of the new module. It must not have been trained.
    """
    rule = "be those of the folder, because it is not of a CLIP"
    check.require(described.kind == "clip", "class_names", rule, check.kind(class_names))
    names = {"class_names": list(class_names), "num_classes": len(class_names)}
    other = replace(described, class_names=tuple(class_names), setting=described.setting | names)
    old, new = (made(each, None, frozen, make, "cpu").state_dict() for each in (described, other))
    found = dict(state)
    for name, value in new.items():
        if value.shape != old[name].shape or not torch.equal(value, old[name]):
            rule = f"be those of the folder, because {described.method} learned {name!r} for each"
            check.require(
                torch.equal(state[name], old[name]), "class_names", rule, len(class_names)
            )
            found[name] = value
    return other, found
