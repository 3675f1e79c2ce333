"""Judgment of a custom trunk: the promises of the protocol ``Trunk``, one line each."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones._models import listed
from fedprompt.backbones._probe import HALF, watched
from fedprompt.backbones.checks import _report
from fedprompt.backbones.checks._report import Judge, Line, Report, fail_if, judged, near
from fedprompt.interfaces import Trunk
from fedprompt.prompts.forward import pooled_features

# Relative to the largest entry, for two computations of the same numbers in another order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_MEMBERS = (
    *("prefix", "dim", "depth", "num_features", "patch_size"),
    *("embed", "block", "normalize", "pool"),
)
_PROMPTS = 3


def trunk(
    trunk: object,
    images: Float[Tensor, "batch channels height width"],
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Report:
    """Judge a custom trunk line by line.

    The lines of the report are:

    - *members*: the trunk has the attributes and methods of :class:`Trunk`.
    - *sizes*: `dim`, `depth`, `num_features` and `patch_size` are true, and `prefix` counts all
      tokens that are not patches.
    - *same as the model*: without prompts, the features equal those of `forward`.
    - *repeatable*: masks and tables fit any number of prompts, and features do not depend on
      earlier calls, such as a mask that was cached for another number of prompts.
    - *normalize*: the tokens of streams pass the last norm. `normalize` must not return tokens
      unchanged if `pool` ignores their scale, because `pool` then has a norm.
    - *positions*: prompts have no positions. If two prompts change places, their tokens change
      places after each block, and no other token changes.
    - *samples*: samples of a batch do not affect one another.
    - *gradients*: gradients reach the prompts of every layer.
    - *frozen*: all modules are in eval mode, and no parameter is trainable.
    - *unchanged*: the checks above changed no weight, no buffer and no image.
    - *shared*: a deep copy of the trunk is the trunk, so that clients share it.

    An exception of the trunk fails the line in which it was raised. It is shown and not raised.

    Args:
        trunk: Trunk of your own.
        images: At least two different images, in the dtype and on the device of the trunk.
        forward: Function from images to the features of the model, without the trunk. If None,
            the features are not compared.

    Returns:
        Report that prints as a table. ``report.passed`` is whether no line failed, and
        ``report.failed`` has the names of the lines that did.

    Raises:
        ValueError: If there are fewer than two images.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> images = torch.rand(2, 3, 16, 16)
        >>> report = check.trunk(trunk, images, lambda images: model.forward_head(
        ...     model.forward_features(images), pre_logits=True))
        >>> report.passed
        True
        >>> trunk.depth = 1
        >>> check.trunk(trunk, images).failed
        ('sizes',)
    """
    check.images(images)
    check.require(len(images) >= 2, "images", "contain at least two images", len(images))
    if forward is not None and not callable(forward):
        raise check.wrong_type("forward", "be a function of images or None", type(forward).__name__)
    title = type(trunk).__name__
    missing = [name for name in _MEMBERS if not hasattr(trunk, name)]
    lacks = f"lacks {', '.join(missing)}" if missing else ""
    members = Line("members", not missing, lacks, "add them, as the protocol Trunk describes")
    if not isinstance(trunk, Trunk):
        return Report(title, (members,))
    return Report(title, (members, *_Judge(trunk, images, forward).lines()))


class _Judge(Judge):
    """The checks of one trunk. Each returns whether the claim holds, and what was measured."""

    def __init__(
        self, trunk: Trunk, images: Tensor, forward: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.trunk = trunk
        self.images = images.clone()
        self.forward = forward
        super().__init__(trunk)

    def features(self, num_prompts: int = 0, *, images: Tensor | None = None) -> Tensor:
        """Return the features of images, with `num_prompts` prompts before each block."""
        images = self.images if images is None else images
        return self.run(images, self.prompts(num_prompts) if num_prompts else [])

    def run(self, images: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """Run the trunk with the prompts of each layer in place of those before, or without any."""
        tokens, context = self.trunk.embed(images)
        return pooled_features(self.trunk, tokens, context, prompts)

    def prompts(self, count: int, tokens: Tensor | None = None) -> list[Tensor]:
        """Draw the same prompts in every call, as large as the tokens of the images."""
        if tokens is None:
            with torch.no_grad():
                tokens, _ = self.trunk.embed(self.images)
        generator = torch.Generator().manual_seed(0)
        size = self.trunk.depth, count, self.trunk.dim
        drawn = torch.randn(size, generator=generator, device="cpu")
        return list((drawn.to(tokens) * tokens.std()).detach())

    def lines(self) -> list[Line]:
        """Run all checks; the last ones compare with the state before."""
        sizes = judged("sizes", "correct the attributes that are named", self.sizes)
        same = judged("same as the model", _REMEDIES["same"], self.same_as_the_model)
        repeatable = judged("repeatable", _REMEDIES["repeatable"], self.repeatable)
        norm = judged("normalize", "apply the norm that `pool` applies", self.normalizes)
        checks = {"positions": self.positions, "samples": self.samples, "gradients": self.gradients}
        if repeatable.passed:
            prompted = [judged(name, _REMEDIES[name], judge) for name, judge in checks.items()]
        else:
            prompted = [Line(name, None, "needs a trunk that is repeatable") for name in checks]
        frozen = judged("frozen", "call freeze(model) before the trunk is made", self.frozen)
        unchanged = judged("unchanged", "make new tensors, do not write in place", self.unchanged)
        shared = judged("shared", "let __deepcopy__ return the trunk", self.shared)
        return [sizes, same, repeatable, norm, *prompted, frozen, unchanged, shared]

    @torch.no_grad()
    def sizes(self) -> None:
        trunk = self.trunk
        tokens, context = trunk.embed(self.images)
        patches = tokens.shape[1] - trunk.prefix
        height, width = (side / trunk.patch_size for side in self.images.shape[2:])
        grids = {math.floor(height) * math.floor(width), math.ceil(height) * math.ceil(width)}
        wrong = []
        if tokens.shape[2] != trunk.dim:
            wrong.append(f"dim is {trunk.dim}, but tokens have width {tokens.shape[2]}")
        if patches not in grids:
            wrong.append(
                f"patch_size {trunk.patch_size} gives {min(grids)} patches, but {patches} tokens "
                f"follow the prefix of {trunk.prefix}"
            )
        for layer in range(trunk.depth):
            previous, tokens = tokens, trunk.block(layer, tokens, context, 0)
        pooled = trunk.pool(tokens)
        if pooled.shape != (len(self.images), trunk.num_features):
            shape = tuple(pooled.shape)
            wrong.append(f"num_features is {trunk.num_features}, but pool returns {shape}")
        if self._is_another_block(trunk.depth, previous, context, tokens):
            wrong.append(f"depth is {trunk.depth}, but block {trunk.depth} exists")
        fail_if(wrong, "; ".join(wrong))

    @torch.no_grad()
    def same_as_the_model(self) -> str:
        if self.forward is None:
            raise _report.ClaimError(None, "no `forward` was given")
        expected = self.forward(self.images)
        return _near(self.features(), expected)

    @torch.no_grad()
    def repeatable(self) -> None:
        plain, first = self.features(), self.features(_PROMPTS)
        self.features(1)
        self.features(_PROMPTS, images=self.images[:1])
        pairs = {"with": (self.features(_PROMPTS), first), "without": (self.features(), plain)}
        for which, (again, before) in pairs.items():
            _near(again, before, f"{which} prompts, ")

    @torch.no_grad()
    def normalizes(self) -> None:
        tokens, _ = self.trunk.embed(self.images)
        if torch.equal(self.trunk.normalize(tokens), tokens):
            once, twice = (self.trunk.pool(factor * tokens) for factor in (1, 2))
            same = (twice - once).abs().max() <= HALF * once.abs().max()
            fail_if(same, "it returns tokens unchanged, but `pool` has a norm")

    @torch.no_grad()
    def positions(self) -> None:
        trunk = self.trunk
        tokens, context = trunk.embed(self.images)
        order = torch.arange(tokens.shape[1] + _PROMPTS, device=tokens.device)
        first, last = trunk.prefix, trunk.prefix + _PROMPTS - 1
        order[first], order[last] = last, first
        for layer, prompts in enumerate(self.prompts(_PROMPTS, tokens)):
            rest = tokens[:, trunk.prefix + (_PROMPTS if layer else 0) :]
            new = prompts.expand(len(tokens), -1, -1)
            tokens = torch.cat([tokens[:, : trunk.prefix], new, rest], 1)
            swapped = trunk.block(layer, tokens[:, order], context, _PROMPTS)
            tokens = trunk.block(layer, tokens, context, _PROMPTS)
            _near(swapped, tokens[:, order], f"block {layer}: ")

    @torch.no_grad()
    def samples(self) -> None:
        together = self.features(_PROMPTS)[:1]
        others = self.images.flip(0) * 0.5 + 0.25
        others[0] = self.images[0]
        for images in (others, self.images[:1]):
            features = self.features(_PROMPTS, images=images)
            _near(features[:1], together, "in another batch, ")

    def gradients(self) -> None:
        with torch.enable_grad():
            prompts = [tokens.requires_grad_() for tokens in self.prompts(_PROMPTS)]
            with watched(self.model or nn.Module()) as lost:
                pooled = self.run(self.images, prompts)
            fail_if(lost, f"no backward pass in {listed(lost)}")
            fail_if(not pooled.requires_grad, "features have no graph")
            weights = torch.linspace(0.5, 1.5, pooled.shape[1], device=pooled.device)
            loss = (pooled.float() * weights).square().sum()
            gradients = torch.autograd.grad(loss, prompts, materialize_grads=True)
        reached = [bool(each.isfinite().all() and each.any(1).all()) for each in gradients]
        missing = [layer for layer, fits in enumerate(reached) if not fits]
        fail_if(missing, f"none at layers {listed(missing)}")

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"images": self.images.clone()}

    def _is_another_block(self, layer: int, tokens: Tensor, context: Any, output: Tensor) -> bool:
        """Whether a block exists and is not the block before it."""
        try:
            return not torch.equal(self.trunk.block(layer, tokens, context, 0), output)
        except Exception:  # any error says that there is no such block
            return False


_REMEDIES = {
    "same": "compare embed, block, normalize and pool with the model's forward, step by step",
    "repeatable": "compute masks and tables anew from `num_prompts` in each call of block",
    "positions": "leave prompts where they are, give them no position, and mask none of them",
    "samples": "put the model into eval mode with freeze(model), and mix no samples",
    "gradients": "compute blocks and pool without no_grad, detach and .data; weights may be 0",
}


def _near(actual: Tensor, expected: Tensor, where: str = "") -> str:
    tolerance = _TOLERANCE.get(actual.dtype, HALF)
    return near(actual, expected, tolerance, smallest=1.0, where=where)
