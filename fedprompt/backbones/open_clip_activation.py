"""Whether an open_clip model computes the activation that its weights were trained with."""

import warnings
from typing import TYPE_CHECKING

from fedprompt._checks import wrong_value

if TYPE_CHECKING:
    import torch.nn as nn


def check_activation(clip_model: "nn.Module", name: str, pretrained: str) -> bool:
    r"""Warn when weights trained with QuickGELU stand in a model of GELU, or the other way round.

    Nothing in the weights shows it and nothing fails: the model merely knows less. OpenAI's, MetaCLIP's and DFN's weights were trained with
    QuickGELU, most others with GELU, and open_clip's plain names (``ViT-B-16``) build GELU.

    Args:
        clip_model: The model that holds the weights.
        name: Its name in open_clip, for example ``"ViT-B-16"``.
        pretrained: The tag of the weights, for example ``"openai"``.

    Returns:
        Whether the two agree.

    Raises:
        ValueError: If open_clip does not know such weights, a file of your own included: then only you can know.

    Warns:
        UserWarning: If they differ; the text says how to build the right model.

    Example:
        >>> import open_clip
        >>> clip_model = open_clip.model.CLIP(
        ...     embed_dim=4, vision_cfg=dict(layers=1, width=8, head_width=4, patch_size=8, image_size=16),
        ...     text_cfg=dict(context_length=8, vocab_size=16, width=8, heads=2, layers=1), quick_gelu=True)
        >>> check_activation(clip_model, "ViT-B-16", "openai")
        True
    """
    import open_clip
    from open_clip.transformer import QuickGELU

    weights = open_clip.get_pretrained_cfg(name, pretrained)
    if not weights:
        raise wrong_value("pretrained", f"be a tag that open_clip lists for `{name}`", pretrained)
    trained = bool(weights.get("quick_gelu", False))
    built = any(isinstance(module, QuickGELU) for module in clip_model.modules())
    if trained != built:
        trained_with, built_with = ("QuickGELU", "GELU") if trained else ("GELU", "QuickGELU")
        remedy = "force_quick_gelu=True" if trained else "a name without '-quickgelu'"
        warnings.warn(
            f"The weights {pretrained!r} of {name!r} were trained with {trained_with}, and this model computes {built_with}: "
            f"its features are wrong. Build it with open_clip.create_model and {remedy}.",
            stacklevel=2,
        )
    return trained == built
