"""Common part of all trunks: the model stays frozen, and prompts fit its masks and positions."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fedprompt._checks as check
from fedprompt.backbones._models import Trainable, check_frozen
from fedprompt.interfaces import Trunk


@dataclass(frozen=True)
class Context:
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


class Sizes(NamedTuple):
    """Sizes (height, width) of the images that a model takes, in pixels.

    Attributes:
        image: Size of the model's images, or None if it has none.
        patch: Other sizes are multiples of this one. If None, there are no other sizes.
    """

    image: tuple[int, int] | None
    patch: tuple[int, int] | None


ANY_SIZE = Sizes(None, (1, 1))


class FrozenTrunk(Trunk):
    """Base of the trunks of all libraries.

    A trunk first sets `blocks`, `prefix`, `dim`, `patch_size` and all that its `pool` reads.

    Args:
        model: Frozen model in eval mode.
        attention_mask: Mask (seq, seq) over all tokens except prompts, or None.
    """

    blocks: Sequence[nn.Module]

    def __init__(self, model: nn.Module, attention_mask: Tensor | None) -> None:
        self.model: Any = model
        self.mask = attention_mask
        self.depth = len(self.blocks)
        self.trainable = Trainable()
        # Checked in every forward pass, so stored as flat lists.
        self._all_modules = list(model.modules())
        self._all_parameters = list(model.parameters())
        with torch.no_grad():  # a sequence with a single patch
            tokens = self._all_parameters[0].new_zeros(1, self.prefix + 1, self.dim)
            self.num_features = self.pool(tokens).shape[-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenTrunk":
        self.trainable.check_alone()
        return self

    def train_parameters(self, chosen: Sequence[nn.Parameter]) -> None:
        """Turn on the gradients of some parameters of the model, which are then `trainable`."""
        self.trainable = Trainable(self.model, chosen).requires_grad_()
        trained = set(chosen)
        self._all_parameters = [frozen for frozen in self._all_parameters if frozen not in trained]

    def embed(self, images: Tensor) -> tuple[Tensor, Context]:
        """Check the model and the images, and return their tokens and the context of the blocks.

        Many models refuse empty batches. These get no tokens of one black image.
        """
        check_frozen("trunk", self._all_modules, self._all_parameters)
        images = fitted(images, self.model, self.sizes())
        some = images if images.shape[0] else images.new_zeros(1, *images.shape[1:])
        tokens, rotary = self.embedded(some)
        return tokens[: images.shape[0]], self.context(tokens, rotary)

    def pool(self, tokens: Tensor) -> Tensor:
        """Return the class token, normalized."""
        return self.normalize(tokens)[:, 0]

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
        check_frozen("trunk", self._all_modules, self._all_parameters)
        self.check_front(start)
        tokens = _cast("tokens", tokens, self.model)
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
        if len(self.mask) != tokens.shape[1]:
            rule = f"have shape (seq, seq) for the {tokens.shape[1]} tokens"
            raise check.wrong("attention_mask", rule, tuple(self.mask.shape))
        return Context(rotary, self.mask.to(tokens))

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


def unchanged(model: object, family: type, method: str = "forward") -> bool:
    """Whether a model is of a family and computes by the family's own method."""
    return isinstance(model, family) and getattr(type(model), method) is getattr(family, method)


def check_mask(mask: Tensor) -> None:
    """Require a square mask without NaN; ``-inf`` masks a token."""
    check.floating("attention_mask", mask, "be a floating-point tensor of shape (seq, seq)")
    if mask.ndim != 2 or mask.shape[0] != mask.shape[1]:
        raise check.wrong("attention_mask", "have shape (seq, seq)", tuple(mask.shape))
    check.finite("attention_mask", torch.where(mask == -torch.inf, 0.0, mask))


def fitted(images: Tensor, model: nn.Module, sizes: Sizes) -> Tensor:
    """Return images in the dtype of the model's first layer, after all checks."""
    check.images(images)
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None:
        _check_channels(images, first.in_channels)
    _check_size(images, sizes)
    return _cast("images", images, model if first is None else first)


def _cast(argument: str, inputs: Tensor, model: nn.Module) -> Tensor:
    """Return images or tokens in a model's dtype; they must be on its device."""
    weight = next(model.parameters())
    check.same_device(argument, inputs, weight.device, "the trunk's device")
    return inputs.to(weight.dtype)


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
