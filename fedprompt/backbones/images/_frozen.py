"""Common part of all trunks: the model stays frozen, and prompts fit its masks and positions."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt._refusals as check
from fedprompt.backbones._probe import Probe, without_traces
from fedprompt.backbones.freezing import Trainable, own_copy
from fedprompt.interfaces import Trunk
from fedprompt.prompts.forward import pooled_features


class Context(NamedTuple):
    """Rotary table of the patches, and mask over all tokens except prompts, for each block."""

    rotary: Tensor | None
    mask: Tensor | None

    def mask_with(self, num_prompts: int, prefix: int) -> Tensor | None:
        """Add rows and columns for prompts after the prefix, without masking."""
        if self.mask is None or not num_prompts:
            return self.mask
        size = len(self.mask) + num_prompts
        others = torch.cat([torch.arange(prefix), torch.arange(prefix + num_prompts, size)])
        others = others.to(self.mask.device)
        return self.mask.new_zeros(size, size).index_put((others[:, None], others), self.mask)

    def first(self, patches: int) -> "Context":
        """Return the context of the first patches, without a mask."""
        return Context(None if self.rotary is None else _first(self.rotary, patches), None)


_ROTARY = {"rope", "position_embeddings"}
"""Arguments of blocks of timm and transformers."""


def _first(rotary: Any, patches: int) -> Any:
    if isinstance(rotary, Tensor):
        return rotary[..., :patches, :]
    return None if rotary is None else tuple(_first(table, patches) for table in rotary)


class Sizes(NamedTuple):
    """Sizes (height, width) of the images that a model takes, in pixels.

    Attributes:
        image: Size of the model's images, or None if it has none.
        patch: Other sizes are multiples of this one. If None, there are no other sizes.
    """

    image: tuple[int, int] | None
    patch: tuple[int, int] | None


_FEW, _SOME = 4, 16
"""Number of patches in the pass of the probe that has gradients, and most in the other passes."""

ANY_SIZE = Sizes(None, (1, 1))


class FrozenTrunk(Trunk):
    """Base of the trunks of all libraries.

    A trunk first sets `blocks`, `prefix`, `dim`, `patch_size` and all that its methods read.

    Args:
        model: Frozen model in eval mode.
        attention_mask: Mask (seq, seq) over all tokens except prompts, or None.
        containers: Modules inside of the model that are not called, because their parts are.
    """

    blocks: Sequence[nn.Module]

    def __init__(
        self, model: nn.Module, attention_mask: Tensor | None, *containers: nn.Module
    ) -> None:
        self.model: Any = model
        self.mask = attention_mask
        self.depth = len(self.blocks)
        self.trainable = Trainable()
        self._weight_dtype = _weight(model).dtype
        with without_traces(model), torch.no_grad():
            self._token_dtype, self.num_features = self._measured()
        self.probe = Probe(self, "trunk", "model", (model, *containers), (model,))

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenTrunk":
        return own_copy(self, self.model, self.trainable, memo)

    def begin(self, chosen: Sequence[nn.Parameter], *, probe: bool) -> None:
        """Turn on the gradients of some parameters, which are then `trainable`, and probe."""
        self.trainable = Trainable(self.model, chosen).requires_grad_()
        self.probe.begin(dict(self.trainable.named_parameters()), enabled=probe)

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """Check the model and the images, and return their tokens and the context of the blocks.

        Many models refuse empty batches. These get no tokens of one black image.
        """
        images = fitted(images, self.model, self.sizes())
        self.probe.look(images)
        some = images if images.shape[0] else images.new_zeros(1, *images.shape[1:])
        tokens, rotary = self.embedded(some)
        return tokens[: images.shape[0]], self.context(tokens, rotary)

    def pool(self, tokens: Tensor) -> Tensor:
        """Return the class token, normalized."""
        return self.normalize(tokens)[:, 0]

    @abstractmethod
    def own_features(self, images: Tensor) -> Any:
        """Return the features of images by the model's own forward pass."""

    def outputs(self, pooled: Tensor) -> Tensor:
        """Return the outputs of the model that belong to features, if it returns others."""
        return pooled

    @abstractmethod
    def embedded(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the tokens of images, and the context of the blocks."""

    @abstractmethod
    def sizes(self) -> Sizes:
        """Return the sizes of images that the model takes."""

    def resume(
        self, tokens: Tensor, *, start: int, image_size: tuple[int, int] | None
    ) -> tuple[Tensor, Context]:
        """Return tokens before block `start` in the model's dtype, and their context."""
        self.probe.look(tokens)
        self.check_front(start)
        weight = _weight(self.model)
        same = weight.dtype == self._weight_dtype  # else the model was cast later
        dtype = self._token_dtype if same else weight.dtype
        tokens = _cast("tokens", tokens, weight, dtype)
        return tokens, self.context(tokens, self.rotary_table(tokens, image_size))

    def check_front(self, start: int) -> None:
        """Require that no parameter before block `start` is trained."""
        if not any(parameter.requires_grad for parameter in self.trainable.parameters()):
            return
        # Models register their modules in the order in which they run.
        late = next(self.blocks[start].parameters())
        named = takewhile(lambda item: item[1] is not late, self.model.named_parameters())
        if trained := [name for name, parameter in named if parameter.requires_grad]:
            rule = "not be behind trained parameters, because tokens before them are out of date"
            raise check.wrong("start", rule, f"{start}, behind {trained[0]}")

    def rotary_table(self, tokens: Tensor, image_size: tuple[int, int] | None) -> Tensor | None:
        """Return the rotary table of the patches among tokens without prompts."""
        return None

    def context(self, tokens: Tensor, rotary: Tensor | None = None) -> Context:
        """Return the context of the blocks for tokens (batch, seq, dim) without prompts."""
        if self.mask is None:
            return Context(rotary, None)
        rule = f"have shape (seq, seq) for the {tokens.shape[1]} tokens"
        check.require(len(self.mask) == tokens.shape[1], "attention_mask", rule, self.mask)
        return Context(rotary, self.mask.to(tokens))

    def _image(self) -> Tensor:
        """Draw an image of the model's size."""
        sizes, weight = self.sizes(), _weight(self.model)
        height, width = sizes.image or (4 * side for side in sizes.patch or (1, 1))
        convolution = _convolution(self.model)
        channels = 3 if convolution is None else convolution.in_channels
        generator = torch.Generator().manual_seed(0)
        image = torch.rand(1, channels, height, width, generator=generator, device="cpu")
        return fitted(image.to(weight.device), self.model, sizes)

    def _measured(self) -> tuple[torch.dtype, int]:
        """Return the dtype of tokens and the width of features."""
        try:
            tokens = self.embedded(self._image())[0]
            pooled = self.pool(tokens[:, : self.prefix + 1])
        except Exception as error:  # a model of others raises errors of any type
            rule = "embed an image; weights outside of blocks must fit, not sharded or offloaded"
            got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise check.wrong("model", rule, got.rstrip(".")) from error
        rule = "return one vector of features for an image; timm pools with global_pool='token'"
        check.require(pooled.ndim == 2, "model", rule, f"features of shape {tuple(pooled.shape)}")
        return tokens.dtype, pooled.shape[1]

    def as_a_whole(self) -> Any:
        """Return the model's outputs of an image, of which blocks get some patches."""

        def first(block: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            tokens = given[0][:, : self.prefix + _SOME]
            for name in _ROTARY.intersection(named):
                patches = min(tokens.shape[1] - self.prefix, _SOME)
                named = named | {name: _first(named[name], patches)}
            return (tokens, *given[1:]), named

        hooks = [
            block.register_forward_pre_hook(first, with_kwargs=True, prepend=True)
            for block in self.blocks
        ]
        try:
            return self.own_features(self._image())
        finally:
            for hook in hooks:
                hook.remove()

    def part_by_part(self, prompts: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs of some patches of an image, or of a few with prompts."""
        mask, self.mask = self.mask, None
        try:
            tokens, context = self.embed(self._image())
        finally:
            self.mask = mask
        tokens = tokens[:, : self.prefix + (_FEW if prompts else _SOME)]
        context = context.first(tokens.shape[1] - self.prefix)
        return self.outputs(pooled_features(self, tokens, context, prompts))

    def run(
        self, block: Callable[..., Tensor], tokens: Tensor, *, checkpointing: bool, **arguments: Any
    ) -> Tensor:
        """Run a block, with gradient checkpointing if asked and if there are gradients.

        Without images no block runs, because many refuse empty batches.
        """
        if tokens.shape[0] == 0:
            return tokens
        if checkpointing and tokens.requires_grad:
            block = partial(checkpoint, block, use_reentrant=False)
        return block(tokens, **arguments)


def check_count(tokens: Tensor, prefix: int, rows: int, columns: int) -> None:
    """Require the tokens of a grid of patches, without prompts."""
    if tokens.shape[1] != (count := prefix + rows * columns):
        rule = f"have {count} tokens without prompts, for {rows} x {columns} patches"
        raise check.wrong("tokens", rule, tokens.shape[1])


def check_mask(mask: Tensor) -> None:
    """Require a square mask without NaN; ``-inf`` masks a token."""
    check.number_tensor("attention_mask", mask, "be a floating-point tensor of shape (seq, seq)")
    rule = "have shape (seq, seq)"
    check.require(mask.ndim == 2 and mask.shape[0] == mask.shape[1], "attention_mask", rule, mask)
    check.finite("attention_mask", torch.where(mask == -torch.inf, 0.0, mask))


def fitted(images: Tensor, model: nn.Module, sizes: Sizes) -> Tensor:
    """Return images in the dtype of the model's first layer, after all checks."""
    check.images(images)
    first = _convolution(model)
    if first is not None:
        _check_channels(images, first.in_channels)
    _check_size(images, sizes)
    weight = _weight(model)
    return _cast("images", images, weight, weight.dtype if first is None else first.weight.dtype)


def _cast(argument: str, inputs: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return images or tokens in a dtype; they must be on the device of a weight."""
    check.same_device(argument, inputs, weight.device, "the trunk's device")
    return inputs.to(dtype)


def _weight(model: nn.Module) -> nn.Parameter:
    """Return the first floating-point parameter, if possible one that is not offloaded."""
    for at_hand in (True, False):
        for part in model.parameters():
            if part.is_floating_point() and not (at_hand and part.is_meta):
                return part
    raise check.wrong("model", "have floating-point parameters", "none")


def _convolution(model: nn.Module) -> nn.Conv2d | None:
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def _check_channels(images: Tensor, channels: int) -> None:
    shape = tuple(images.shape)
    if shape[1] == channels:
        return
    hint = ""
    if shape[3] in (1, channels):
        hint = " in front of height and width; call images.permute(0, 3, 1, 2)"
    elif shape[1] == 1:
        hint = f"; for gray images, call images.expand(-1, {channels}, -1, -1)"
    raise check.wrong("images", f"have {channels} channels{hint}", shape)


def _check_size(images: Tensor, sizes: Sizes) -> None:
    size = tuple(images.shape[2:])
    if size == sizes.image:
        return
    if sizes.patch is None:
        rule = f"have the model's size {sizes.image}, because its positions are fixed"
        raise check.wrong("images", rule, size)
    if any(not side or side % step for side, step in zip(size, sizes.patch, strict=True)):
        rule = f"have a size that is a multiple of the patches' {sizes.patch}"
        raise check.wrong("images", rule, size)
