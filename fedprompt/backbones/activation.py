"""Check that an open_clip model computes the activation that its weights were trained with."""

import warnings

import torch.nn as nn

import fedprompt._refusals as check


def activation(clip_model: nn.Module, name: str, pretrained: str) -> bool:
    """Warn if weights trained with QuickGELU are in a model with GELU, or the other way round.

    The weights do not reveal the mismatch, and no error occurs: the features are just worse.
    OpenAI's, MetaCLIP's and DFN's weights were trained with QuickGELU, most others with GELU.
    open_clip's plain names, such as ``ViT-B-16``, build models with GELU.

    Args:
        clip_model: Model that contains the weights.
        name: Name of the model in open_clip, for example ``"ViT-B-16"``.
        pretrained: Tag of the weights, for example ``"openai"``.

    Returns:
        Whether the two activations agree.

    Raises:
        ValueError: If open_clip does not list such weights, for example because they come from
            a file. Their activation cannot be looked up.

    Warns:
        UserWarning: If the activations differ. The text explains how to build the right model.

    Example:
        >>> import open_clip
        >>> vision = dict(layers=1, width=8, head_width=4, patch_size=8, image_size=16)
        >>> text = dict(context_length=8, vocab_size=16, width=8, heads=2, layers=1)
        >>> clip_model = open_clip.model.CLIP(4, vision, text, quick_gelu=True)
        >>> check.activation(clip_model, "ViT-B-16", "openai")
        True
    """
    import open_clip
    from open_clip.transformer import QuickGELU

    check.module("clip_model", clip_model)
    check.text("name", name)
    check.text("pretrained", pretrained)
    weights = open_clip.get_pretrained_cfg(name, pretrained)
    check.require(weights, "pretrained", f"be a tag that open_clip lists for `{name}`", pretrained)
    trained = bool(weights.get("quick_gelu", False))
    built = any(isinstance(module, QuickGELU) for module in clip_model.modules())
    if trained != built:
        trained_with, built_with = ("QuickGELU", "GELU") if trained else ("GELU", "QuickGELU")
        remedy = "force_quick_gelu=True" if trained else "a name without '-quickgelu'"
        warnings.warn(
            f"The weights {pretrained!r} of {name!r} were trained with {trained_with}, but this "
            f"model computes {built_with}. Its features are wrong. Build the model with "
            f"open_clip.create_model and {remedy}.",
            stacklevel=2,
        )
    return trained == built
