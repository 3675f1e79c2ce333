"""Each client keeps a learned border of its images, and the server averages the head.

The border is added to the pixels of every image. In each round a client first trains its border
with the head frozen. It then trains the head with its border frozen. Li et al., "Visual Prompt
Based Personalized Federated Learning" (pFedPT), 2023.

Up: the head, C·D weights and C biases. Down: the head.

Deviations: the paper shares and trains a whole network, as here with a `NetworkSetting`. A trunk is
frozen, so the head is all that clients share. If the setting counts steps, each phase has a half;
with epochs, each has as many, as in the authors' code. There, the optimizer of the border keeps its
momentum over rounds. The border is 1 pixel wide, as 2 of 32 pixels there.

Compared: hkgdifyu/pFedPT cebec63, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import Complete
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, adapted, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


class _Bordered(Complete):
    """A network whose images have a learned border of pixels added to them."""

    def __init__(self, setting: ImageSetting, width: int) -> None:
        super().__init__()
        self.network = setting.bare_model()
        if setting.public.ndim != 4:
            raise ValueError(
                "`public` must have the shape of images for pFedPT, as images[:0] has."
            )
        channels, *size = setting.public.shape[1:]
        inside = [side - 2 * width for side in size]
        plain = dict[str, Any](mean=[0.0] * channels, std=[1.0] * channels)
        self.border = fp.PadPrompts((inside[0], inside[1]), padding=width, **plain)
        draw = setting.stream(0, purpose="border")
        for pixels in self.border.parameters():
            nn.init.normal_(pixels, generator=draw)
        self.inside = torch.zeros(1, channels, *inside)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.network(images + self.border(self.inside))


@register("pFedPT", **adapted(PERSONALIZED), search=LEARNING_RATE | {"border_rate": (1e-2, 1.0)})
def pfedpt(
    setting: ImageSetting, *, learning_rate: float = 1e-2, border_rate: float = 1e-1, width: int = 1
) -> fp.Method:
    """pFedPT."""  # noqa: D403
    model = setting.seeded(_Bordered, setting, width)
    first = fp.snapshot(model)

    def train(data, answer, state):
        fp.load_values(model, {**first, **answer, **state})
        blocks = ((model.border, border_rate), (model.network, learning_rate))
        for (part, rate), batches in zip(blocks, data.phases(2), strict=True):
            optimizer = data.optimizer(part, rate)
            with fp.training_only(model, part):
                for images, labels in batches:
                    take_step(optimizer, F.cross_entropy(model(images), labels))
        payload = fp.collect(model, weight=data.num_examples, only=["network"])
        return payload, fp.snapshot(model, only=["border"])

    return averaged(model, train, shared=["network"])
