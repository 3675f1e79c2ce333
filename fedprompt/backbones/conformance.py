"""Checks of a trunk or a text encoder of your own: the promises of their protocols, one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Float, Num
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.backbones._models import classifier, listed
from fedprompt.backbones._probe import HALF, apart, unreached
from fedprompt.backbones.attributes import PREFIX, Attributes, find_module, tensors
from fedprompt.backbones.freezing import Trainable
from fedprompt.interfaces import ClassNames, TextEncoder, Trunk
from fedprompt.prompts.context import prompted_text
from fedprompt.prompts.forward import pooled_features

# Relative to the largest number, for two computations of the same numbers in another order.
_BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
_MEMBERS = (
    *("prefix", "dim", "depth", "num_features", "patch_size"),
    *("embed", "block", "normalize", "pool"),
)


def trunk(
    trunk: object,
    images: Num[Tensor, "batch ..."],
    forward: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Require that a trunk of your own keeps the promises of :class:`Trunk`.

    - It has the attributes and methods of a trunk. `dim`, `depth`, `num_features` and `patch_size`
      are true, and `prefix` counts all tokens that are not patches.
    - Without prompts, the features equal those of `forward`.
    - Masks and tables fit any number of prompts, and features do not depend on earlier calls, such
      as a mask that was cached for another number of prompts.
    - Prompts have no positions: two prompts can change places.
    - Samples of a batch do not affect one another.
    - Tokens of streams pass the last norm. `normalize` must not return tokens unchanged if `pool`
      ignores their scale, because `pool` then has a norm.
    - Gradients reach each prompt of every layer.
    - All modules are in eval mode, no parameter is trainable, and a deep copy of the trunk is the
      trunk, so that clients share it.
    - None of this changes a weight, a buffer or an image.

    Args:
        trunk: Trunk of your own.
        images: At least two different inputs of the trunk, such as images, on its device.
        forward: Function from images to the features of the model, without the trunk. If None,
            the features are not compared.

    Raises:
        TypeError: If an attribute or method is missing, or no modules and tensors are found.
        ValueError: If a promise is broken. The text says which one and how to keep it. An error of
            the trunk itself is not caught.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2, num_classes=0)
        >>> trunk, images = vit_trunk(model), torch.rand(2, 3, 16, 16)
        >>> check.trunk(trunk, images, model)
        >>> trunk.depth = 1
        >>> check.trunk(trunk, images)
        Traceback (most recent call last):
        ...
        ValueError: `trunk.depth` must be the number of blocks, and block 1 exists; got 1.
    """
    check.require(len(images) >= 2, "images", "contain at least two images", len(images))
    if forward is not None:
        check.function("forward", forward, "be a function of images or None")
    missing = [name for name in _MEMBERS if not hasattr(trunk, name)]
    rule = "have the attributes and methods of the protocol Trunk"
    if missing or not isinstance(trunk, Trunk):
        raise check.wrong_type("trunk", rule, f"one without {', '.join(missing)}")
    with _kept("trunk", trunk, images) as model:
        _judge_sizes(trunk, images)
        if forward is not None:
            with torch.no_grad():
                found, expected = pooled_features(trunk, *trunk.embed(images), ()), forward(images)
            rule = "equal `forward`; compare embed, block, normalize and pool with it step by step"
            _compare("trunk", rule, found, expected)
        _judge_prompts(trunk, images, model)


@contextmanager
def _kept(argument: str, backbone: Any, *inputs: Tensor) -> Iterator[nn.Module]:
    """Return the modules of a frozen backbone, which must not change, nor may `inputs`."""
    model = find_module(backbone, argument)
    ours = getattr(backbone, "trainable", None)
    free = set(ours.parameters()) if isinstance(ours, Trainable) else set()
    if not free:  # else a copy has parameters of its own
        rule = "be shared by clients: let __deepcopy__ return the object itself"
        check.require(copy.deepcopy(backbone) is backbone, argument, rule, "another object")
    heads, made = classifier(model), (Attributes, nn.ModuleList)  # find_module makes these
    free.update(each for part in heads for each in part.parameters())
    parts = [(name, part) for name, part in model.named_modules() if part not in heads]
    wrong = [name for name, part in parts if part.training and not isinstance(part, made)]
    named = model.named_parameters()
    wrong += [name for name, each in named if each.requires_grad and each not in free]
    got = f"in train mode or trainable: {listed(wrong)}".replace(PREFIX, "")
    check.require(not wrong, argument, "be frozen; call freeze(model) first", got)
    before = {name: each.detach().clone() for name, each in tensors(model).items()}
    copies = [each.clone() for each in inputs]
    yield model
    after = tensors(model)
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    changed += ["inputs"] * (not all(map(torch.equal, copies, inputs)))
    got = f"changes of {listed(changed)}".replace(PREFIX, "")
    rule = "not write in place into weights, buffers and inputs; make new tensors"
    check.require(not changed, argument, rule, got)


def _compare(
    argument: str, rule: str, found: Tensor, expected: Tensor, bound: float | None = None
) -> None:
    if got := apart(found, expected, bound or _BOUNDS.get(found.dtype, HALF)):
        raise check.wrong(argument, rule, got)


@torch.no_grad()
def _judge_sizes(trunk: Trunk, images: Tensor) -> None:
    tokens, context = trunk.embed(images)
    width, patches = tokens.shape[2], tokens.shape[1] - trunk.prefix
    check.require(width == trunk.dim, "trunk.dim", f"be the width of tokens, {width}", trunk.dim)
    if images.ndim == 4:  # other inputs have no grid of patches
        rows, columns = (side / trunk.patch_size for side in images.shape[2:])
        grids = {math.floor(rows) * math.floor(columns), math.ceil(rows) * math.ceil(columns)}
        rule = f"be such that patches of {trunk.patch_size} pixels make {min(grids)} tokens behind"
        check.require(patches in grids, "trunk.prefix", rule, f"{patches} behind {trunk.prefix}")
    same = torch.equal(trunk.normalize(tokens), tokens)
    once, twice = (trunk.pool(factor * tokens) for factor in (1, 2))
    rule = "apply the norm that `pool` applies"
    check.require(not (same and not apart(twice, once, HALF)), "trunk.normalize", rule, "no norm")
    previous = tokens
    for layer in range(trunk.depth):
        previous, tokens = tokens, trunk.block(layer, tokens, context, 0)
    rule, pooled = "be the width of pooled features", trunk.pool(tokens)
    fits = pooled.shape == (len(images), trunk.num_features)
    got = f"{trunk.num_features} for features of shape {tuple(pooled.shape)}"
    check.require(fits, "trunk.num_features", rule, got)
    try:
        another = not torch.equal(trunk.block(trunk.depth, previous, context, 0), tokens)
    except Exception:  # any error says that there is no such block
        another = False
    rule = f"be the number of blocks, and block {trunk.depth} exists"
    check.require(not another, "trunk.depth", rule, trunk.depth)


def _judge_prompts(trunk: Trunk, images: Tensor, model: nn.Module) -> None:
    def run(images: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        return pooled_features(trunk, *trunk.embed(images), prompts)

    with torch.no_grad():
        tokens, _ = trunk.embed(images)
    size, generator = (trunk.depth, 3, trunk.dim), torch.Generator().manual_seed(0)
    drawn = torch.randn(size, generator=generator, device="cpu").to(tokens) * tokens.std()
    prompts, swapped = list(drawn), list(drawn.flip(1))
    broken, _ = unreached(lambda prompts: run(images, prompts), prompts, model)
    rule = "pass gradients to each prompt; compute without no_grad, detach and .data"
    check.require(not broken, "trunk", rule, broken)
    with torch.no_grad():
        others = images.flip(0)
        others[0] = images[0]
        plain, expected = run(images, ()), run(images, prompts)
        run(images[:1], list(drawn[:, :1]))
        again = "not depend on earlier calls; compute masks and tables anew in each call of block"
        _compare("trunk", again, run(images, prompts), expected)
        _compare("trunk", again, run(images, ()), plain)
        rule = "give prompts no positions and mask none: they can change places"
        _compare("trunk", rule, run(images, swapped), expected)
        rule = "keep samples apart, and be in eval mode"
        for batch in (others, images[:1]):
            _compare("trunk", rule, run(batch, prompts)[:1], expected[:1])


def text_encoder(
    encoder: object,
    names: ClassNames,
    *,
    words: Float[Tensor, "length dim"] | None = None,
    expected: Float[Tensor, "classes features"] | None = None,
) -> None:
    """Require that a text encoder of your own keeps the promises of :class:`TextEncoder`.

    Contexts are random.

    - `dim` is the width of a token. Features are finite and have shape
      (contexts, classes, features).
    - The same sentences have the same features, so there is no dropout.
    - Features have the order of the classes, and no class and no context affects another one.
    - Tokens after the end change nothing, unless the names have ``causal=False``.
    - Class-specific contexts with equal rows give the same features as one context for all classes.
    - Contexts of samples equal a loop over the samples, and there may be none.
    - Gradients reach each token of each context.
    - All modules are in eval mode, no parameter is trainable, and a deep copy of the encoder is the
      encoder, so that clients share it.
    - None of this changes a weight or a buffer.
    - The features of `words` before each name are `expected`.

    Args:
        encoder: Text encoder of your own.
        names: At least two different names, from the encoder. Names of different lengths find
            more mistakes.
        words: Embedded words, such as ``tower.words("a photo of a")``.
        expected: Features of the same sentences, from the model's own forward pass. If None,
            features are not compared.

    Raises:
        TypeError: If `encoder` is not a text encoder, or no modules and tensors are found.
        ValueError: If a promise is broken. The text says which one and how to keep it. An error of
            the encoder itself is not caught. Also if there are fewer than two names, or only one of
            `words` and `expected`.

    Example:
        >>> from fedprompt import samples
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> names = tower.class_names(["bird", "tool"])
        >>> check.text_encoder(tower, names)
        >>> tower.dim = 7
        >>> check.text_encoder(tower, names)
        Traceback (most recent call last):
        ...
        ValueError: `encoder.dim` must be the width of tokens, ...; got 7.
    """
    nouns.class_names(names)
    check.require(len(names.names) >= 2, "names", "contain at least two names", len(names.names))
    rule = "be given together with `words`"
    check.require((words is None) == (expected is None), "expected", rule, "only one of them")
    if not isinstance(encoder, TextEncoder):
        rule = "have the attribute `dim` and the method __call__ of the protocol TextEncoder"
        raise check.wrong_type("encoder", rule, check.kind(encoder))
    with _kept("encoder", encoder) as model:
        own = _Encoder(encoder, names)
        own.judge_shape()
        own.judge_laws()
        own.judge_gradients(model)
        if words is not None and expected is not None:
            rule = "equal `expected`; check positions, mask, last norm, pooling and projection"
            own.compare(rule, own.encode(words[None])[0], expected)


class _Encoder:
    """A text encoder with two random contexts of three tokens."""

    def __init__(self, encoder: TextEncoder, names: ClassNames) -> None:
        self.encoder, self.names = encoder, names
        dtype = torch.promote_types(names.tokens.dtype, torch.float32)
        size = (2, 3, names.tokens.shape[-1])
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0), device="cpu")
        self.context = (noise * names.tokens.float().std().cpu()).to(names.tokens.device, dtype)

    @torch.no_grad()
    def encode(self, context: Tensor, names: ClassNames | None = None, **kind: bool) -> Tensor:
        return self.encoder(prompted_text(context, names or self.names, **kind))

    def compare(self, rule: str, found: Tensor, expected: Tensor) -> None:
        _compare("encoder", rule, found, expected, torch.finfo(found.dtype).eps ** (2 / 3))

    def judge_shape(self) -> None:
        dim, width = self.encoder.dim, self.names.tokens.shape[-1]
        check.require(dim == width, "encoder.dim", f"be the width of tokens, {width}", dim)
        for context in (self.context, self.context[:1]):
            features = self.encode(context)
            axes = (len(context), len(self.names.names))
            rule = f"return features of shape {axes} and a width, also for a single context"
            fits = features.ndim == 3 and features.shape[:2] == axes
            check.require(fits, "encoder", rule, tuple(features.shape))
            fits = bool(features.isfinite().all())
            check.require(fits, "encoder", "return finite features", "NaN or infinity")

    def judge_laws(self) -> None:
        """Require that features of the same sentences are the same, however they are given."""
        context, count = self.context, len(self.names.names)
        features, samples = self.encode(context), torch.stack([context, -context, 2 * context])
        reverse, single = range(count)[::-1], [self.names.select([each]) for each in range(count)]
        loop = torch.stack([self.encode(each) for each in samples])
        rule = "return the same features again; call freeze(model)"
        self.compare(rule, self.encode(context), features)
        rule = "read at `text.end` under a causal mask, or have names with causal=False"
        self.compare(rule, self._with_noise_behind_the_end(), features)
        rule = "keep the order of classes, and let no class read another one"
        alone = [self.encode(context, each) for each in single]
        self.compare(rule, torch.cat(alone, 1), features)
        self.compare(rule, self.encode(context, self.names.select(reverse)).flip(1), features)
        rule = "encode each context with sentences that no other context reads"
        alone = [self.encode(each[None]) for each in context]
        self.compare(rule, torch.cat(alone), features)
        rule = "read a class-specific context from `text.suffix`"
        by_class = context[:, None].expand(-1, count, -1, -1)
        self.compare(rule, self.encode(by_class, class_specific=True), features)
        rule = "keep all axes in front of the contexts"
        self.compare(rule, self.encode(samples, per_sample=True), loop)
        self.compare(rule, self.encode(samples[:0], per_sample=True), loop[:0])

    @torch.no_grad()
    def _with_noise_behind_the_end(self) -> Tensor:
        text = prompted_text(self.context, self.names)
        if not self.names.causal:  # the tokens may be read
            return self.encoder(text)
        position = torch.arange(text.suffix.shape[-2], device=text.suffix.device)
        last = torch.tensor(text.end, device=position.device) - text.prefix.shape[-2]
        after = (position > last[:, None])[..., None]
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(text.suffix.shape, generator=generator, device="cpu")
        return self.encoder(text._replace(suffix=text.suffix + after * noise.to(text.suffix)))

    def judge_gradients(self, model: nn.Module) -> None:
        def run(contexts: Sequence[Tensor]) -> Tensor:
            return self.encoder(prompted_text(torch.stack(list(contexts)), self.names))

        broken, _ = unreached(run, list(self.context), model)
        rule = "pass gradients to each token; compute without no_grad, detach and .data"
        check.require(not broken, "encoder", rule, broken.replace("prompts at layer", "context"))
