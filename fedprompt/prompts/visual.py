"""Visual prompts: learnable tokens, and the layers at which they enter a transformer."""

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

    Initial values are those of VPT, uniform in :math:`\pm\sqrt{6 / (3 p_h p_w + d)}` for patches
    of :math:`p_h \times p_w` pixels and width :math:`d`. Use ``torch.nn.init`` on ``tokens`` for
    other values. Prompts have no positional embedding, so their order does not matter.

    Args:
        num_prompts: Number of tokens that enter before each layer. With 0, the backbone is
            unchanged.
        dim: Width of a token, ``trunk.dim``.
        layers: Layers at which tokens enter, 0-based and distinct.
        replace: Whether new tokens replace the module's earlier ones, as in VPT-deep. If False,
            earlier tokens are kept, as in SGPT.
        patch_size: Patch size of the backbone in pixels, one number or (height, width). It
            affects the initial values only.
        generator: Generator of the initial values. If None, torch's global generator is used.

    Attributes:
        tokens: Parameter (layers, prompts, dim).

    Raises:
        ValueError: If a number is out of range, or `layers` is empty or contains a layer twice.

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
        """Return the tokens (prompts, dim) of each layer."""
        return PromptStream(
            dict(zip(self.layers, self.tokens.unbind(0), strict=True)), self.replace
        )

    def extra_repr(self) -> str:
        """Show sizes and layers."""
        _, num_prompts, dim = self.tokens.shape
        return f"{num_prompts}, {dim}, layers={self.layers}, replace={self.replace}"


class ShallowPrompts(LayeredPrompts):
    """Learnable tokens that enter before the first layer and pass through all others (VPT-shallow).

    Args:
        num_prompts: Number of tokens.
        dim: Width of a token, ``trunk.dim``.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

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
    """Learnable tokens for every layer; each layer replaces those of the previous one (VPT-deep).

    Args:
        num_prompts: Number of tokens at each layer.
        dim: Width of a token, ``trunk.dim``.
        depth: Number of layers, ``trunk.depth``.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

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
    """Learnable tokens for each group of samples (SGPT); each sample uses those of its group.

    Args:
        num_groups: Number of groups.
        num_prompts: Number of tokens that enter before each layer.
        dim: Width of a token, ``trunk.dim``.
        layers: Layers at which tokens enter, 0-based and distinct. They do not depend on the
            layers of other prompt modules.
        replace: Whether new tokens replace earlier ones, as in :class:`LayeredPrompts`.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

    Attributes:
        tokens: Parameter (groups, layers, prompts, dim). Its rows are groups, so aggregation can
            weight each group by the number of its samples (``collect(rows=...)``).

    Raises:
        ValueError: If a number is out of range, or `layers` is empty or contains a layer twice.

    Example:
        >>> prompts = GroupPrompts(5, 1, 8, layers=(4, 5, 6))
        >>> stream = prompts(torch.tensor([3, 0]))
        >>> {layer: tuple(tokens.shape) for layer, tokens in stream.layers.items()}
        {4: (2, 1, 8), 5: (2, 1, 8), 6: (2, 1, 8)}
        >>> torch.equal(stream.layers[5][0], prompts.tokens[3, 1])
        True

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Eq. 3.
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
        """Return the tokens (batch, prompts, dim) of each layer, for the group of each sample.

        Args:
            indices: Group of each sample, in [0, num_groups), from a selector. The range is
                checked on CPU tensors only, to avoid a GPU synchronization.

        Raises:
            ValueError: If a group is out of range.
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
        raise wrong_value("layers", "contain at least one layer, and none twice", chosen)
    return chosen
