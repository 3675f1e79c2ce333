"""Deep visual prompts of a frozen CLIP are averaged, alone or together with deep text prompts.

Visual prompts alone are classified by a handwritten sentence of each class (VPT). With text prompts
of their own, both towers have prompts that replace those of the previous layer (IVLP). This is
FedAvg (McMahan et al., AISTATS 2017) of VPT (Jia et al., "Visual Prompt Tuning", ECCV 2022) and of
independent vision-language prompts (Rasheed et al., "Fine-tuned CLIP Models are Efficient Video
Learners", CVPR 2023). Both are baselines of FedMGP (Bo et al., NeurIPS 2025).

Up: visual prompts (L T V), V the width of image tokens, and for FedIVLP text prompts (L T D).

Down: the same.

Deviations: all layers have prompts. FedMGP's baselines have them before the first layer, which is
``depth=1``. Initial text prompts are N(0, .02²) in place of words, and visual prompts are drawn as
in VPT, in place of N(0, .02²).

Compared: weihao-bo/FedMGP 3a02697, `trainers/vpt.py`, `trainers/independentVL.py` and
`clip/model.py`, with the deviations above, float64, largest difference 2.1e-14 (2026-11).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.fedmaple import LayeredClip
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client

__all__ = ["IndependentClip", "fedivlp", "fedvpt_clip"]


class IndependentClip(LayeredClip):
    """Visual and text prompts of the first layers, independent of one another."""

    def __init__(self, setting: ClipSetting, depth: int | None = None) -> None:
        super().__init__(setting)
        draw = dict[str, Any](generator=setting.generator(0, purpose="prompts"))
        layers = self.tower.depth if depth is None else min(depth, self.tower.depth)
        size = dict[str, Any](num_contexts=layers, length=setting.length)
        self.context = fp.ContextPrompts(self.tower.dim, **size, **draw)
        self.prompts = fp.DeepPrompts(setting.length, self.trunk, depth, **draw)

    def features(self, images: Tensor) -> list[Tensor]:
        """Encode images and classes, normalized."""
        text = dict(enumerate(self.context()))
        pair = self.encode(images, self.prompts().layers, text)
        return [F.normalize(features, dim=-1) for features in pair]

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        image, text = self.features(images)
        return self.scale * image @ text.T


class _Visual(LayeredClip):
    """Visual prompts of the first layers, and handwritten sentences."""

    def __init__(self, setting: ClipSetting, depth: int | None) -> None:
        super().__init__(setting)
        draw = setting.generator(0, purpose="prompts")
        self.prompts = fp.DeepPrompts(setting.length, self.trunk, depth, generator=draw)
        self.text = setting.handwritten_text()

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        image = self.encode_images(images, self.prompts().layers)
        return fp.cosine_logits(image, self.text, scale=self.scale)


@register("FedIVLP", families=("CLIP",), search=LEARNING_RATE, inputs="images")
def fedivlp(
    setting: ClipSetting, *, learning_rate: float = 5e-3, depth: int | None = None
) -> fp.Method:
    """FedIVLP."""
    model = IndependentClip(setting, depth)
    return averaged(model, fedavg_client(model, learning_rate))


@register("FedVPT (CLIP)", families=("CLIP",), search=LEARNING_RATE, inputs="images")
def fedvpt_clip(
    setting: ClipSetting, *, learning_rate: float = 5e-3, depth: int | None = None
) -> fp.Method:
    """FedVPT (CLIP)."""
    model = _Visual(setting, depth)
    return averaged(model, fedavg_client(model, learning_rate))
