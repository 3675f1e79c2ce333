"""Deep text prompts are learned together with the visual prompts that they are projected to.

Text prompts replace the context before every layer that both towers have. A linear projection of
each layer makes the visual prompts of that layer. The server averages both. This is FedAvg
(McMahan et al., AISTATS 2017) of MaPLe (Khattak et al., "MaPLe: Multi-Modal Prompt Learning", CVPR
2023), for L layers and images of width V.

Up: text prompts (L T D) and projections (L V (D + 1)). Down: text prompts and projections.

Deviations: all layers have prompts. MaPLe has them in 9 of 12 layers, with 2 tokens that begin at
the words of a template.

Compared: muzairkhattak/multimodal-prompt-learning 69bce21, with the deviations above, float64,
largest difference 1.0e-14 (2026-11).
"""

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import ClipModel, ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, fedavg_client


class LayeredClip(ClipModel):
    """Both towers of a frozen CLIP, for prompts of each layer that replace the previous ones."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        self.trunk: Any = fp.vit_trunk(setting.clip.visual)

    def encode_images(
        self, images: Tensor, visual: Mapping[int, Tensor]
    ) -> Float[Tensor, "batch dim"]:
        """Encode images with prompts by layer."""
        visual = {**visual, 0: self.trunk.model.ln_pre(visual[0])}
        return fp.encode_prompted(self.trunk, images, fp.PromptStream(visual, replace=True)).pooled

    def encode(
        self, images: Tensor, visual: Mapping[int, Tensor], text: Mapping[int, Tensor]
    ) -> tuple[Float[Tensor, "batch dim"], Float[Tensor, "classes dim"]]:
        """Encode images and class names with prompts by layer."""
        image = self.encode_images(images, visual)
        first = fp.prompted_text(text[0][None], self.names)
        later = {layer: tokens for layer, tokens in text.items() if layer > 0}
        streams = [fp.PromptStream(later, replace=True)] if later else []
        return image, self.tower(first, *streams)[0]


class _Coupled(LayeredClip):
    """Text prompts of each layer, and their projections to visual prompts."""

    def __init__(self, setting: ClipSetting) -> None:
        super().__init__(setting)
        width = self.tower.dim
        depth = min(self.tower.depth, self.trunk.depth)
        self.prompts = setting.drawn_contexts("prompts", depth)
        self.project = nn.ModuleList(nn.Linear(width, self.trunk.dim) for _ in range(depth))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        text = dict(enumerate(self.prompts()))
        visual = {layer: self.project[layer](tokens) for layer, tokens in text.items()}
        return fp.cosine_logits(*self.encode(images, visual, text), scale=self.scale)


@register("FedMaPLe", families=("CLIP",), search=LEARNING_RATE, inputs="images")
def fedmaple(setting: ClipSetting, *, learning_rate: float = 5e-3) -> fp.Method:
    """FedMaPLe."""
    model = setting.seeded(_Coupled, setting)
    return averaged(model, fedavg_client(model, learning_rate))
