"""Visual prompts: learnable tokens, and the layers that they enter at."""

import math
from collections.abc import Iterable

import torch
import torch.nn as nn
from jaxtyping import Float, Integer
from torch import Tensor

from fedprompt._checks import (
    check_count,
    check_initial_generator,
    check_labels,
    height_and_width,
    kind,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import PromptStream


class LayeredPrompts(nn.Module):
    r"""Learnable tokens that enter a transformer before some of its layers.

    Initial values are VPT's, uniform in :math:`\pm\sqrt{6 / (3 p_h p_w + d)}` for patches of :math:`p_h \times p_w` pixels and width
    :math:`d`; overwrite ``tokens`` with ``torch.nn.init`` for others. Prompts carry no positions, so their order does not matter.

    Args:
        num_prompts: Tokens that enter before each layer; 0 leaves the backbone as it is.
        dim: Width of a token, ``trunk.dim``.
        layers: 0-based layers, distinct.
        replace: Whether new tokens take the place of the module's own old ones (VPT-deep) or old ones are carried on (SGPT).
        patch_size: Of the backbone, in pixels, for the initial values alone: one number or (height, width).
        generator: For the initial values; None uses torch's global one.

    Attributes:
        tokens: Parameter (layers, prompts, dim).

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range, or `layers` is empty or holds a layer twice.

    Example:
        >>> prompts = LayeredPrompts(2, 8, layers=(0, 3))
        >>> {layer: tuple(tokens.shape) for layer, tokens in prompts().layers.items()}
        {0: (2, 8), 3: (2, 8)}

    References:
        Jia et al., "Visual Prompt Tuning", ECCV 2022.
    """

    tokens: nn.Parameter

    def __init__(
        self,
        num_prompts: int,
        dim: int,
        *,
        layers: Iterable[int],
        replace: bool = False,
        patch_size: int | tuple[int, int] = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_prompts", num_prompts, at_least=0)
        check_count("dim", dim)
        self.layers = _checked_layers(layers)
        _check_replace(replace)
        self.replace = replace
        self.tokens = nn.Parameter(
            vpt_uniform((len(self.layers), num_prompts, dim), patch_size, generator)
        )

    def forward(self) -> PromptStream:
        """Return the tokens of each layer, (prompts, dim)."""
        return PromptStream(
            dict(zip(self.layers, self.tokens.unbind(0), strict=True)), self.replace
        )

    def extra_repr(self) -> str:
        """Show sizes and layers."""
        _, num_prompts, dim = self.tokens.shape
        return f"{num_prompts}, {dim}, layers={self.layers}, replace={self.replace}"


class ShallowPrompts(LayeredPrompts):
    """VPT-shallow: prompts enter before the first layer and are carried through all others.

    Args:
        num_prompts: Number of tokens.
        dim: Width of a token, ``trunk.dim``.
        patch_size: As in :class:`LayeredPrompts`.
        generator: As in :class:`LayeredPrompts`.

    Example:
        >>> tuple(ShallowPrompts(5, 8).tokens.shape)
        (1, 5, 8)
    """

    def __init__(
        self,
        num_prompts: int,
        dim: int,
        *,
        patch_size: int | tuple[int, int] = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_prompts, dim, layers=(0,), patch_size=patch_size, generator=generator)


class DeepPrompts(LayeredPrompts):
    """VPT-deep: every layer gets prompts of its own, in the place of those of the layer before.

    Args:
        num_prompts: Number of tokens at each layer.
        dim: Width of a token, ``trunk.dim``.
        depth: Number of layers, ``trunk.depth``.
        patch_size: As in :class:`LayeredPrompts`.
        generator: As in :class:`LayeredPrompts`.

    Example:
        >>> tuple(DeepPrompts(5, 8, depth=12).tokens.shape)
        (12, 5, 8)
    """

    def __init__(
        self,
        num_prompts: int,
        dim: int,
        depth: int,
        *,
        patch_size: int | tuple[int, int] = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        check_count("depth", depth)
        super().__init__(
            num_prompts,
            dim,
            layers=range(depth),
            replace=True,
            patch_size=patch_size,
            generator=generator,
        )


class GroupPrompts(nn.Module):
    """Learnable tokens for each group of samples: every sample brings those of its own group, at all layers (SGPT).

    Args:
        num_groups: Number of groups.
        num_prompts: Tokens that enter before each layer.
        dim: Width of a token, ``trunk.dim``.
        layers: 0-based layers, distinct; any, before, after or among those of other modules.
        replace: As in :class:`LayeredPrompts`.
        patch_size: As in :class:`LayeredPrompts`.
        generator: As in :class:`LayeredPrompts`.

    Attributes:
        tokens: Parameter (groups, layers, prompts, dim): a row for each group, so that counts can weigh them (``collect(rows=...)``).

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range, or `layers` is empty or holds a layer twice.

    Example:
        >>> prompts = GroupPrompts(5, 1, 8, layers=(4, 5, 6))
        >>> stream = prompts(torch.tensor([3, 0]))
        >>> {layer: tuple(tokens.shape) for layer, tokens in stream.layers.items()}
        {4: (2, 1, 8), 5: (2, 1, 8), 6: (2, 1, 8)}
        >>> torch.equal(stream.layers[5][0], prompts.tokens[3, 1])
        True

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning" (SGPT),
        CVPR 2024, Eq. 3.
    """

    tokens: nn.Parameter

    def __init__(
        self,
        num_groups: int,
        num_prompts: int,
        dim: int,
        *,
        layers: Iterable[int],
        replace: bool = False,
        patch_size: int | tuple[int, int] = 16,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_count("num_groups", num_groups)
        check_count("num_prompts", num_prompts, at_least=0)
        check_count("dim", dim)
        self.layers = _checked_layers(layers)
        _check_replace(replace)
        self.replace = replace
        self.tokens = nn.Parameter(
            vpt_uniform((num_groups, len(self.layers), num_prompts, dim), patch_size, generator)
        )

    def forward(self, indices: Integer[Tensor, " batch"]) -> PromptStream:
        """Return the tokens of each layer, (batch, prompts, dim), for the group of each sample.

        Args:
            indices: In [0, num_groups), from a selector; range looked at on a CPU only, because looking costs a sync on a GPU.

        Raises:
            TypeError: If `indices` are not integers (batch,).
            ValueError: If a group lies outside the range.
        """
        check_labels("indices", indices, len(self.tokens), sync=False)
        return PromptStream(
            dict(zip(self.layers, self.tokens[indices.long()].unbind(1), strict=True)), self.replace
        )

    def extra_repr(self) -> str:
        """Show sizes and layers."""
        num_groups, _, num_prompts, dim = self.tokens.shape
        return f"{num_groups}, {num_prompts}, {dim}, layers={self.layers}, replace={self.replace}"


def vpt_uniform(
    shape: tuple[int, ...], patch_size: int | tuple[int, int], generator: torch.Generator | None
) -> Float[Tensor, "*shape"]:
    """Draw VPT's initial values for tokens of width ``shape[-1]``."""
    height, width = height_and_width("patch_size", patch_size)
    check_initial_generator(generator)
    bound = math.sqrt(6 / (3 * height * width + shape[-1]))
    device = None if generator is None else generator.device
    return torch.empty(shape, device=device).uniform_(-bound, bound, generator=generator)


def _check_replace(replace: object) -> None:
    if not isinstance(replace, bool):
        raise wrong_type("replace", "be True or False", kind(replace))


def _checked_layers(layers: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(layers, Iterable):
        raise wrong_type("layers", "be layer indices, such as range(4) or (0, 3)", kind(layers))
    chosen = tuple(layers)
    for layer in chosen:
        check_count("layers", layer, at_least=0)
    if not chosen or len(set(chosen)) < len(chosen):
        raise wrong_value("layers", "hold at least one layer, and none twice", chosen)
    return chosen
