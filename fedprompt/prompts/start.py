"""Initial values of prompts at the mean patch token of each layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Num
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Trunk, Weighted
from fedprompt.prompts._streams import depth_of, vpt_uniform
from fedprompt.prompts.visual import GroupPrompts, LayeredPrompts


@torch.no_grad()
def mean_patch_tokens(trunk: Trunk, images: Num[Tensor, "batch ..."]) -> Weighted:
    """Average the patch tokens before each block, over images and positions.

    The result is an entry, so :func:`weighted_mean` averages it over batches and over clients.
    Each client sends ``4 * depth * dim`` bytes once. :func:`initialize_at` writes the mean into
    prompts.

    Args:
        trunk: Frozen backbone, which runs once without prompts.
        images: Inputs of the trunk, such as images; a few dozen are enough.

    Returns:
        Mean tokens (depth, dim) in float32. Their weight is the number of images.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk, images = vit_trunk(model), torch.rand(6, 3, 16, 16)
        >>> clients = [mean_patch_tokens(trunk, each) for each in images.split([2, 4])]
        >>> mean = weighted_mean(clients)
        >>> tuple(mean.value.shape), mean.weight
        ((2, 8), tensor(6.))
        >>> torch.testing.assert_close(mean, mean_patch_tokens(trunk, images))
    """
    depth_of(trunk, None)
    check.some("images", len(images), "contain at least one image")
    tokens, context = trunk.embed(images)
    check.require(tokens.shape[1] != trunk.prefix, "images", "have at least one patch", images)
    means = []
    for layer in range(trunk.depth):
        means.append(tokens[:, trunk.prefix :].float().mean((0, 1)))
        if layer < trunk.depth - 1:  # nothing follows the last block
            tokens = trunk.block(layer, tokens, context, 0)
    return Weighted(torch.stack(means), torch.tensor(float(len(images)), device=tokens.device))


@torch.no_grad()
def initialize_at(
    prompts: LayeredPrompts | GroupPrompts,
    means: Weighted,
    *,
    noise: float = 0.1,
    generator: torch.Generator | None = None,
) -> None:
    r"""Start prompts at the mean patch token of their layers, so that features hardly change.

    Every token of layer :math:`l` becomes :math:`\bar x_l + \nu u`. Here :math:`\bar x_l` is the
    mean patch token before block :math:`l`, :math:`\nu` is `noise`, and :math:`u` is drawn from
    VPT's initial values, uniform in :math:`\pm\sqrt{6 / (3 p_h p_w + d)}`. The noise makes the
    tokens of a layer differ, so that they can learn different things.

    Prompts with random values are unlike any token of a pretrained network and draw attention away
    from the patches. Mean patch tokens do not.

    Args:
        prompts: Visual prompts of any kind. Their tokens are overwritten.
        means: Result of :func:`mean_patch_tokens`, or its mean over clients.
        noise: Factor of VPT's noise, at least 0.
        generator: Generator of the noise. If None, torch's global generator is used. Clients of a
            federation start alike if they load the values of one server.

    Raises:
        ValueError: If `means` has another width than the prompts, lacks one of their layers, or
            has weight 0. The prompts are unchanged then.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk, images = vit_trunk(model), torch.rand(6, 3, 16, 16)
        >>> prompts = DeepPrompts(3, trunk)
        >>> initialize_at(prompts, mean_patch_tokens(trunk, images), noise=0.0)
        >>> torch.equal(prompts.tokens[:, 0], mean_patch_tokens(trunk, images).value)
        True

    References:
        Jia et al., "Visual Prompt Tuning", ECCV 2022, for the noise.
    """
    kinds = LayeredPrompts | GroupPrompts
    check.instance("prompts", prompts, kinds, "be LayeredPrompts or GroupPrompts")
    check.number("noise", noise, at_least=0)
    _check_means(means, prompts.layers, prompts.tokens.shape[-1])
    tokens = prompts.tokens
    centers = means.value[list(prompts.layers)].to(tokens)  # (layers, dim)
    drawn = vpt_uniform(tuple(tokens.shape), prompts.patch_size, generator).to(tokens)
    started = centers[:, None] + noise * drawn
    if not bool(torch.isfinite(started).all()):
        raise check.wrong("noise", f"keep tokens finite in {tokens.dtype}", noise)
    tokens.copy_(started)


def _check_means(means: Weighted, layers: Sequence[int], dim: int) -> None:
    nouns.entry("means", means)
    value, weight = means
    if value.ndim != 2 or weight.ndim != 0 or value.shape[1] != dim or len(value) <= max(layers):
        rule = f"have shape (depth, {dim}), with a depth of at least {max(layers) + 1}"
        raise check.wrong("means", rule, tuple(value.shape))
    check.require(weight > 0, "means.weight", "be above 0", float(weight))
