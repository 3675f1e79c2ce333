"""Visual prompts: learnable tokens, and the layers at which they enter a transformer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

import torch
import torch.nn as nn
from jaxtyping import Integer
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.interfaces import PromptStream, Trunk
from fedprompt.prompts._streams import vpt_uniform

_DEFAULT_PATCH_SIZE = 16


class _VisualPrompts(nn.Module):
    """Base of all visual prompts: tokens (*groups, layers, prompts, dim)."""

    tokens: nn.Parameter

    def __init__(
        self,
        groups: tuple[int, ...],
        num_prompts: int,
        dim: int | Trunk,
        layers: Iterable[int],
        replace: bool,
        patch_size: int | tuple[int, int] | None,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        _check_num_prompts(num_prompts)
        width = _width_of(dim)
        self.layers = _layers_of(layers, dim)
        check.flag("replace", replace)
        self.replace = replace
        if patch_size is None:
            patch_size = dim.patch_size if isinstance(dim, Trunk) else _DEFAULT_PATCH_SIZE
        self.patch_size = convert.height_and_width("patch_size", patch_size)
        shape = (*groups, len(self.layers), num_prompts, width)
        self.tokens = nn.Parameter(vpt_uniform(shape, self.patch_size, generator))

    def extra_repr(self) -> str:
        """Show sizes and layers."""
        *groups, _, num_prompts, dim = self.tokens.shape
        sizes = ", ".join(map(str, (*groups, num_prompts, dim)))
        return f"{sizes}, layers={self.layers}, replace={self.replace}"

    def _stream(self, layers: Sequence[Tensor]) -> PromptStream:
        return PromptStream(dict(zip(self.layers, layers, strict=True)), self.replace)


class LayeredPrompts(_VisualPrompts):
    r"""Learnable tokens that enter a transformer before some of its layers.

    Initial values are drawn as in VPT, uniform in :math:`\pm\sqrt{6 / (3 p_h p_w + d)}` for patches
    of :math:`p_h \times p_w` pixels and width :math:`d`. Use ``torch.nn.init`` on ``tokens`` for
    other values. Prompts have no positional embedding, so their order does not matter.

    Args:
        num_prompts: Number of tokens that enter before each layer. With 0, the backbone is
            unchanged.
        dim: Trunk that the prompts enter, or the width of a token, ``trunk.dim``.
        layers: Layers at which tokens enter, 0-based and distinct.
        replace: Whether new tokens replace the module's earlier ones, as in VPT-deep. If False,
            earlier tokens are kept, as in SGPT.
        patch_size: Patch size of the backbone in pixels, one number or (height, width). It affects
            the initial values only. If None, it is the patch size of the trunk, or 16 if `dim` is a
            number.
        generator: Generator of the initial values. If None, torch's global generator is used.

    Attributes:
        tokens: Parameter (layers, prompts, dim).
        patch_size: Patch size (height, width) in pixels.

    Raises:
        ValueError: If a number is out of range, `layers` is empty or contains a layer twice, or a
            layer is outside the trunk.

    Example:
        >>> prompts = LayeredPrompts(2, 8, layers=(0, 3))
        >>> {layer: tuple(tokens.shape) for layer, tokens in prompts().layers.items()}
        {0: (2, 8), 3: (2, 8)}

    References:
        Jia et al., "Visual Prompt Tuning", ECCV 2022.
    """

    def __init__(
        self,
        num_prompts: int,
        dim: int | Trunk,
        *,
        layers: Iterable[int],
        replace: bool = False,
        patch_size: int | tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__((), num_prompts, dim, layers, replace, patch_size, generator)

    def forward(self) -> PromptStream:
        """Return the tokens (prompts, dim) of each layer."""
        return self._stream(self.tokens.unbind(0))


class ShallowPrompts(LayeredPrompts):
    """Learnable tokens that enter before the first layer and pass through all others (VPT-shallow).

    Args:
        num_prompts: Number of tokens.
        dim: Trunk or width of a token as in :class:`LayeredPrompts`.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

    Example:
        >>> tuple(ShallowPrompts(5, 8).tokens.shape)
        (1, 5, 8)
    """

    def __init__(
        self,
        num_prompts: int,
        dim: int | Trunk,
        *,
        patch_size: int | tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(num_prompts, dim, layers=(0,), patch_size=patch_size, generator=generator)


class DeepPrompts(LayeredPrompts):
    """Learnable tokens for every layer, in place of the previous layer's tokens (VPT-deep).

    Args:
        num_prompts: Number of tokens at each layer.
        dim: Trunk or width of a token as in :class:`LayeredPrompts`.
        depth: Number of layers, ``trunk.depth``. If None, all blocks of the trunk; needed if `dim`
            is a number.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

    Example:
        >>> tuple(DeepPrompts(5, 8, depth=12).tokens.shape)
        (12, 5, 8)
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(28, 14, embed_dim=8, depth=2, num_heads=2)
        >>> prompts = DeepPrompts(5, vit_trunk(model))
        >>> tuple(prompts.tokens.shape), prompts.patch_size
        ((2, 5, 8), (14, 14))
    """

    def __init__(
        self,
        num_prompts: int,
        dim: int | Trunk,
        depth: int | None = None,
        *,
        patch_size: int | tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_num_prompts(num_prompts)
        if depth is None:
            if not isinstance(dim, Trunk):
                rule = "be an integer, unless `dim` is a trunk"
                raise check.wrong_type("depth", rule, check.kind(depth))
            depth = dim.depth
        check.count("depth", depth)
        super().__init__(
            num_prompts,
            dim,
            layers=range(depth),
            replace=True,
            patch_size=patch_size,
            generator=generator,
        )


class GroupPrompts(_VisualPrompts):
    """Learnable tokens for each group of samples (SGPT).

    Args:
        num_groups: Number of groups.
        num_prompts: Number of tokens that enter before each layer.
        dim: Trunk or width of a token as in :class:`LayeredPrompts`.
        layers: Layers at which tokens enter, 0-based and distinct. They do not depend on the
            layers of other prompt modules.
        replace: Whether new tokens replace earlier ones, as in :class:`LayeredPrompts`.
        patch_size: Patch size as in :class:`LayeredPrompts`.
        generator: Generator as in :class:`LayeredPrompts`.

    Attributes:
        tokens: Parameter (groups, layers, prompts, dim). Its rows are groups, so aggregation can
            weight each group by the number of its samples (``collect(rows=...)``).
        patch_size: Patch size (height, width) in pixels.

    Raises:
        ValueError: If a number is out of range, `layers` is empty or contains a layer twice, or a
            layer is outside the trunk.

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

    def __init__(
        self,
        num_groups: int,
        num_prompts: int,
        dim: int | Trunk,
        *,
        layers: Iterable[int],
        replace: bool = False,
        patch_size: int | tuple[int, int] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check.count("num_groups", num_groups)
        super().__init__((num_groups,), num_prompts, dim, layers, replace, patch_size, generator)

    def forward(self, indices: Integer[Tensor, " batch"]) -> PromptStream:
        """Return the tokens (batch, prompts, dim) of each layer, for the group of each sample.

        Args:
            indices: Group of each sample, in [0, num_groups), from a selector. The range is
                checked on CPU tensors only, to avoid a GPU synchronization.

        Raises:
            ValueError: If a group is out of range.
        """
        check.labels("indices", indices, len(self.tokens), sync=False)
        check.same_device("indices", indices, self.tokens.device, or_cpu=True)
        return self._stream(self.tokens[indices.long()].unbind(1))


def _check_num_prompts(num_prompts: object) -> None:
    rule = "be an integer; the trunk comes after it"
    check.typed(not isinstance(num_prompts, Trunk), "num_prompts", rule, num_prompts)
    check.count("num_prompts", num_prompts, at_least=0)


def _width_of(dim: object) -> int:
    if isinstance(dim, Trunk):
        return dim.dim
    if isinstance(dim, bool) or not isinstance(dim, Integral):
        raise check.wrong_type("dim", "be an integer or a Trunk", check.kind(dim))
    check.count("dim", dim)
    return int(dim)


def _layers_of(layers: Iterable[int], dim: int | Trunk) -> tuple[int, ...]:
    check.iterable("layers", layers, "layer indices, such as range(4) or (0, 3)")
    chosen = tuple(layers)
    last = dim.depth - 1 if isinstance(dim, Trunk) else None
    for layer in chosen:
        check.count("layers", layer, at_least=0, at_most=last, of="the trunk's last block")
    if not chosen or len(set(chosen)) < len(chosen):
        raise check.wrong("layers", "contain at least one layer, and none twice", chosen)
    return tuple(map(int, chosen))
