"""Each client mixes the same few models with weights that it learns by EM.

In the E-step a client computes the probability of each component for each of its images, by Bayes'
rule from its mixture weights and the losses. In the M-step its weights become the mean of these
probabilities, and its loss is the sum of the components' losses, weighted by them. The server
averages each component. Marfoq et al., "Federated Multi-Task Learning under a Mixture of
Distributions" (FedEM), NeurIPS 2021.

Up: prompts and head of each component. Down: prompts and head of each component.

Deviations: batches are augmented. So the probabilities for the images of a batch are computed in
each step, from the losses of that step. A batch needs a forward pass of every component. Only the
clients of a round count in the mean. The authors' code also averages the old models of absent
clients. A newcomer mixes the components equally, where the paper runs EM on its data.

Compared: omarfoq/FedEM 996fadd, with the deviations above, float64, largest difference 1.1e-16
(2026-11).
"""

from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.models import Complete
from fedprompt.methods.registry import LEARNING_RATE, PERSONALIZED, adapted, register
from fedprompt.methods.steps import averaged, take_step
from fedprompt.methods.whole_networks import ImageSetting


class _Mixture(Complete):
    """Components with different initial values, and the mixture weights of a client."""

    def __init__(self, setting: ImageSetting, number: int) -> None:
        super().__init__()
        seeds = [setting.seed + 1000 * component for component in range(number)]
        self.components = nn.ModuleList(replace(setting, seed=seed).new_model() for seed in seeds)
        self.weights = torch.full((number,), 1 / number)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logarithm of the mixture of the components' probabilities."""
        logits = torch.stack([component(images) for component in self.components], 1)
        return (logits.log_softmax(-1) + self.weights.log()[:, None]).logsumexp(1)

    def losses(self, images: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each component for each image, (images, components)."""
        outputs = [component(images) for component in self.components]
        return torch.stack([F.cross_entropy(out, labels, reduction="none") for out in outputs], 1)


def _posterior(losses: Tensor, weights: Tensor) -> Tensor:
    """Compute the probability of each component for each image."""
    return (weights.log() - losses.detach()).softmax(1)


@register("FedEM", **adapted(PERSONALIZED), search=LEARNING_RATE | {"num_components": [2, 3]})
def fedem(
    setting: ImageSetting, *, learning_rate: float = 1e-2, num_components: int = 3
) -> fp.Method:
    """FedEM."""
    model = _Mixture(setting, num_components)
    uniform = {"weights": model.weights.clone()}

    def train(data, answer, state):
        predict(data, answer, state)
        with torch.no_grad():
            parts = [_posterior(model.losses(*part), model.weights) for part in data.parts()]
            weights = torch.cat(parts).mean(0)
        optimizer = data.optimizer(model, learning_rate)
        for images, labels in data.batches():
            losses = model.losses(images, labels)
            loss = (_posterior(losses, weights) * losses).sum(1).mean()
            take_step(optimizer, loss)
        return fp.collect(model, weight=data.num_examples), {"weights": weights}

    def predict(data, answer, state):
        fp.load_values(model, {**answer, **(state or uniform)})
        return model

    return averaged(model, train, predict=predict)
