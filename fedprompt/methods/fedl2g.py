"""Clients follow guide vectors, one for each class, and the server learns guides that help them.

A client adds to its loss the squared distance between the guide of a sample's class and its logits
(-l) or features (-f). It then takes one tentative step on a study batch, and computes the loss on
its quiz images. It sends the gradient of that loss with respect to the guides, and the server
descends the mean gradient. Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous
Federated Learning", 2024.

Up: at most C(G + 1) numbers, which are the rows of the classes of the study batch and a weight for
each class. G is C for FedL2G-l, and D for FedL2G-f. Down: CG numbers.

Deviations: before clients follow the guides, the guides learn for two rounds, in which clients also
train, without guides; in the paper they do not. The quiz has the paper's ten images, or a quarter
of the images of a smaller client. The study batch is the last one of the round. Clients do not clip
gradients, and the guide loss has a tuned weight, which is 1 in the paper.

Compared: TsingZ0/FedL2G 4db2d14 by double backward, with the deviations above, float64, largest
difference 1.1e-16 (2026-11).
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.setting import Batch, ClientData, PromptedModel, VitSetting, take_step

_SEARCH = LEARNING_RATE | {"guide_weight": (1e-2, 1.0), "server_rate": (1e-1, 1e3)}


class _Guided(nn.Module):
    """Model that returns what follows the guides (batch, guided), and logits (batch, classes)."""

    def __init__(self, model: PromptedModel, by_features: bool) -> None:
        super().__init__()
        self.model = model
        self.by_features = by_features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guided output and logits."""
        features = self.model.features(images)
        logits = self.model.head(features)
        return (features if self.by_features else logits), logits


@register("FedL2G-l", **DIFFERENT_MODELS, search=_SEARCH)
def fedl2g_l(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 1.0,
    warm_up: int = 2,
) -> fp.Method:
    """FedL2G-l: guides of the logits."""
    return _learn_to_guide(setting, False, learning_rate, guide_weight, server_rate, warm_up)


@register("FedL2G-f", **DIFFERENT_MODELS, search=_SEARCH)
def fedl2g_f(
    setting: VitSetting,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 100.0,
    warm_up: int = 2,
) -> fp.Method:
    """FedL2G-f: guides of the features."""
    return _learn_to_guide(setting, True, learning_rate, guide_weight, server_rate, warm_up)


def _study_and_quiz(data: ClientData) -> tuple[Tensor, Batch]:
    """Return the positions of study images, and a quiz, which are the same in all rounds."""
    size = max(1, min(10, data.num_examples // 4))
    draw = data.at(0).generator("quiz")
    parts = fp.data.study_quiz_split(data.labels, quiz_size=size, generator=draw)
    study, quiz = map(torch.as_tensor, parts)
    inputs, labels = data.own()
    return study, (inputs[quiz], labels[quiz])


def _learn_to_guide(
    setting: VitSetting, by_features: bool, rate: float, weight: float, pace: float, warm_up: int
) -> fp.Method:
    """Make the method; guides are not followed in the first `warm_up` rounds.

    The server's learning rate is `pace`.
    """
    classes = setting.num_classes
    width = setting.new_model(0).head.in_features if by_features else classes
    guides = torch.randn(classes, width, generator=setting.generator(0, purpose="guides"))
    update = fp.descend(partial(torch.optim.SGD, lr=pace), max_norm=100.0)

    def train(data, answer, state):
        model = _Guided(setting.model(data.id, state), by_features)
        guides = answer["guides"]
        study, quiz = _study_and_quiz(data)
        if not len(study):  # of its one image, the client makes a quiz
            return None, state
        followed = weight if data.server_round >= warm_up else 0.0
        optimizer = data.optimizer(model, rate)
        for images, labels in data.batches(among=study):
            loss = fp.guided_loss(*model(images), labels, guides, guide_weight=followed)
            take_step(optimizer, loss)
        rates = {"learning_rate": rate, "guide_weight": weight}
        gradient = fp.guide_gradient(model, guides, (images, labels), quiz, **rates)
        return {"guides": gradient}, fp.snapshot(model.model, buffers=True)

    def answer(client, state):
        return {"guides": state["guides"]}

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(payload["guides"] for payload in payloads.values())
        guides, memory = update.step(state["guides"], mean, state["update"])
        return {"guides": guides, "update": memory}

    server = fp.Server({"guides": guides, "update": update.init(guides)}, answer, step)
    form = {"guides": fp.Weighted(guides, torch.zeros(classes))}
    return fp.Method(train, server, setting.private_model, form=lambda client: form)
