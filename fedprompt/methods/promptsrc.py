"""Deep text and visual prompts stay near the frozen CLIP, and rounds are averaged by a Gaussian.

The loss has the distances of text and image features to the frozen CLIP's features, and the
divergence of the logits. The server averages the prompts of clients. Predictions use a mean of the
prompts after all rounds, with weights of a Gaussian at 75 % of the run, 5 % wide. This is FedAvg
(McMahan et al., AISTATS 2017) of PromptSRC (Khattak et al., "Self-regulating Prompts: Foundational
Model Adaptation without Forgetting", ICCV 2023), for L layers and images of width V.

Up: text prompts (L T D) and visual prompts (L T V). Down: twice the same, newest and averaged.

Deviations: the Gaussian is over rounds in place of epochs, and before the last round the mean has
the rounds so far. All layers have prompts, where the code has them in 9 of 12. The teacher of the
text is one sentence for each class, in place of 60 sentences. Initial text prompts are N(0, .02²)
in place of words, and visual prompts are drawn as in VPT.

Compared: muzairkhattak/PromptSRC bb95c77, with the deviations above, float64, largest difference
1.8e-14 (2026-11).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.fedivlp import IndependentClip
from fedprompt.methods.models import ClipSetting
from fedprompt.methods.registry import LEARNING_RATE, register
from fedprompt.methods.steps import averaged, mean_of_rounds, rounds_server, take_step


class _Regulated(IndependentClip):
    """Text and visual prompts of each layer, near the frozen CLIP."""

    def loss(
        self, images: Tensor, labels: Tensor, names: Tensor, weights: Sequence[float]
    ) -> Tensor:
        """Compute the loss with the distances to the features of the frozen CLIP."""
        with torch.no_grad():
            frozen = F.normalize(fp.encode_prompted(self.trunk, images).pooled, dim=-1)
            teacher = (self.scale * frozen @ names.T).log_softmax(1)
        image, text = self.features(images)
        logits = self.scale * image @ text.T
        text_weight, image_weight = weights
        loss = F.cross_entropy(logits, labels) + text_weight * F.l1_loss(text, names)
        loss = loss + image_weight * F.l1_loss(image, frozen)
        return loss + (teacher.exp() * (teacher - logits.log_softmax(1))).mean()


@register(
    "PromptSRC (averaged)",
    families=("CLIP",),
    search=LEARNING_RATE | {"text_weight": (1.0, 50.0), "image_weight": (1.0, 50.0)},
    inputs="images",
)
def promptsrc(
    setting: ClipSetting,
    *,
    learning_rate: float = 5e-3,
    text_weight: float = 25.0,
    image_weight: float = 10.0,
) -> fp.Method:
    """PromptSRC (averaged)."""
    model = _Regulated(setting)
    handwritten = setting.handwritten_text()
    weights = (text_weight, image_weight)

    def train(data, answer, state):
        fp.load_values(model, fp.part(answer, "newest"))
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            loss = model.loss(images, labels, handwritten, weights)
            take_step(optimizer, loss)
        return fp.collect(model, weight=data.num_examples), state

    def weight(server_round: int) -> float:
        return math.exp(-200 * ((server_round + 1) / setting.rounds - 0.75) ** 2)

    server = rounds_server(fp.snapshot(model), weight)
    return averaged(model, train, server=server, predict=mean_of_rounds(model))
