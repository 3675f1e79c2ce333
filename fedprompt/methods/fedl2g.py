"""Clients follow guide vectors, one for each class, and the server learns guides that help them.

A client adds to its loss the squared distance between the guide of a sample's class and its logits
(-l) or features (-f). It then takes one tentative step on a study batch, and computes the loss on
its quiz images. It sends the gradient of that loss with respect to the guides, and the server
descends the mean gradient. Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous
Federated Learning", 2024.

Up: at most C(G + 1) numbers, which are the rows of the classes of the study batch and a weight for
each class. G is C for FedL2G-l, and D for FedL2G-f. Down: CG numbers.

Deviations: before clients follow the guides, the guides learn for two rounds, in which clients also
train, without guides; in the paper there are 50 rounds, in which models stay
(`train_in_warm_up=False`). Clients have the optimizer of the setting, which is AdamW if you name
none, and the trial step is its next step, at its present learning rate; in the paper both are plain
SGD. After Adam's first step, as in a warm-up in which models stay, guides hardly learn. The server
rate of FedL2G-l is 500, which is ours, because at the paper's 0.1 the guides hardly move. The
server clips the gradient to norm 100, as in the authors' code. Clients do not clip theirs, which
the code clips to 100, too. The guide loss has the weight 0.1, and 1 in the paper. The quiz has the
paper's ten images, or a quarter of the images of a smaller client. The study batch is the last one
of the round; if no step is taken, it is drawn. With a `VitSetting`, clients train prompts on frozen
trunks, and features of a common width come from a learned projection. With a `NetworkSetting`, they
train whole networks, whose features are pooled, as in the paper.

Compared: TsingZ0/FedL2G 4db2d14 by double backward, with the deviations above, float64, largest
difference 1.1e-16 (2026-11).
"""

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.guidance import guided_loss, optimizer_update
from fedprompt.interfaces import GuideDerivative, GuideLoss, GuideUpdate
from fedprompt.methods.models import PromptedModel
from fedprompt.methods.registry import DIFFERENT_MODELS, LEARNING_RATE, register
from fedprompt.methods.setting import Batch, ClientData
from fedprompt.methods.steps import take_step
from fedprompt.methods.whole_networks import ImageSetting, NetworkModel

_SEARCH = LEARNING_RATE | {"guide_weight": (1e-2, 1.0), "server_rate": (1e-1, 1e3)}


class _Guided(nn.Module):
    """Model that returns what follows the guides (batch, guided), and logits (batch, classes)."""

    def __init__(self, model: PromptedModel | NetworkModel, by_features: bool) -> None:
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
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 500.0,
    warm_up: int = 2,
    train_in_warm_up: bool = True,
    quiz_size: int = 10,
    max_norm: float | None = 100.0,
    loss: GuideLoss | None = None,
    update: GuideUpdate | None = None,
    derivative: GuideDerivative | None = None,
) -> fp.Method:
    """FedL2G-l: guides of the logits.

    Args:
        setting: Setting of the run.
        learning_rate: Learning rate of clients (at least 0).
        guide_weight: Factor of the guide loss (at least 0).
        server_rate: Learning rate of the server (at least 0). With 0, the guides stay random. With
            the paper's 0.1, they stay close to their random start.
        warm_up: Number of first rounds in which clients do not follow the guides (at least 0).
        train_in_warm_up: Whether clients train in these rounds, without guides. In the paper, their
            models stay.
        quiz_size: Largest number of images of a quiz (at least 1).
        max_norm: Bound on the norm of the server's gradient (above 0). If None, there is no bound.
        loss: Guide loss. If None, the mean squared error.
        update: Trial step. If None, the next step of the client's optimizer, which must be SGD,
            Adam or AdamW.
        derivative: Derivative of the guided output along a direction. If None,
            :func:`~fedprompt.guidance.forward_mode`.
    """
    return _learn_to_guide(**locals(), by_features=False)


@register("FedL2G-f", **DIFFERENT_MODELS, search=_SEARCH)
def fedl2g_f(
    setting: ImageSetting,
    *,
    learning_rate: float = 1e-2,
    guide_weight: float = 0.1,
    server_rate: float = 100.0,
    warm_up: int = 2,
    train_in_warm_up: bool = True,
    quiz_size: int = 10,
    max_norm: float | None = 100.0,
    loss: GuideLoss | None = None,
    update: GuideUpdate | None = None,
    derivative: GuideDerivative | None = None,
) -> fp.Method:
    """FedL2G-f: guides of the features. The arguments are those of :func:`fedl2g_l`."""
    return _learn_to_guide(**locals(), by_features=True)


def _study_and_quiz(data: ClientData, largest: int) -> tuple[Tensor, Batch]:
    """Return the positions of study images, and a quiz, which are the same in all rounds."""
    size = min(largest, max(1, data.num_examples // 4))
    draw = data.at(0).generator("quiz")
    parts = fp.data.study_quiz_split(data.labels, quiz_size=size, generator=draw)
    study, quiz = map(torch.as_tensor, parts)
    inputs, labels = data.own()
    return study, (inputs[quiz], labels[quiz])


def _drawn(data: ClientData, study: Tensor) -> Batch:
    """Draw a study batch for a round in which the model stays."""
    draw = data.stream("study")
    order = torch.randperm(len(study), generator=draw, device="cpu")
    return data.batch(study.cpu()[order[: data.setting.batch_size]], draw)


def _learn_to_guide(
    *,
    setting: ImageSetting,
    by_features: bool,
    learning_rate: float,
    guide_weight: float,
    server_rate: float,
    warm_up: int,
    train_in_warm_up: bool,
    quiz_size: int,
    max_norm: float | None,
    loss: GuideLoss | None,
    update: GuideUpdate | None,
    derivative: GuideDerivative | None,
) -> fp.Method:
    """Make the method; guides are not followed in the first rounds, the warm-up."""
    classes = setting.num_classes
    width = setting.new_model(0).head.in_features if by_features else classes
    guides = torch.randn(classes, width, generator=setting.generator(0, purpose="guides"))
    guided = {"guide_weight": guide_weight, "loss": loss}
    server_update = fp.descend(partial(torch.optim.SGD, lr=server_rate), max_norm=max_norm)

    def train(data, answer, state):
        model = _Guided(setting.model(data.id, state), by_features)
        guides, batch = answer["guides"], None
        study, quiz = _study_and_quiz(data, quiz_size)
        if not len(study):  # of its one image, the client makes a quiz
            return None, state
        follows = data.server_round >= warm_up
        followed = guided if follows else {"guide_weight": 0.0}
        optimizer = data.optimizer(model, learning_rate)
        for batch in data.batches(among=study) if follows or train_in_warm_up else ():
            take_step(optimizer, guided_loss(*model(batch[0]), batch[1], guides, **followed))
        batch = batch or _drawn(data, study)
        trial = {"update": update or optimizer_update(optimizer, model), "method": derivative}
        trial |= {"learning_rate": optimizer.param_groups[0]["lr"]} | guided
        gradient = fp.guidance.guide_gradient(model, guides, batch, quiz, **trial)
        return {"guides": gradient}, fp.snapshot(model.model, buffers=True)

    def answer(client, state):
        return {"guides": state["guides"]}

    def step(server_round, payloads, state):
        mean = fp.weighted_mean(payload["guides"] for payload in payloads.values())
        guides, memory = server_update.step(state["guides"], mean, state["update"])
        return {"guides": guides, "update": memory}

    server = fp.Server({"guides": guides, "update": server_update.init(guides)}, answer, step)
    form = {"guides": fp.Weighted(guides, torch.zeros(classes))}
    return fp.Method(train, server, setting.private_model, form=lambda client: form)
