"""Arguments of guidance are refused by name, and their edges are taken."""

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import full, nan, ones, tensor, zeros

from fedprompt import Weighted, freeze
from fedprompt.guidance import (
    double_backward,
    forward_mode,
    guide_gradient,
    guided_loss,
    optimizer_update,
)
from guided import CLASSES, QUIZ, STUDY, Guided, draw_guides, mlp
from refusals import refused_and_taken


class Answer(nn.Module):
    """Model whose outputs are changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = Guided(mlp(), features=False), change

    def forward(self, images):
        return self.change(*self.inner(images))


def with_an_unused_parameter():
    model = Guided(mlp(), features=False)
    model.spare = nn.Linear(2, 2).double()
    return model


def with_an_infinite_slope():
    """Only the first entry of one parameter has it."""
    model = Answer(lambda guided, logits: (guided + model.zero.sqrt().sum(), logits))
    model.zero = nn.Parameter(tensor([0.0, 1.0], dtype=torch.float64))
    return model


def step(change=lambda parameters: parameters):
    """A step of plain descent whose result is changed."""

    def update(parameters, gradients, *, learning_rate):
        stepped = {key: own - learning_rate * gradients[key] for key, own in parameters.items()}
        return change(stepped)

    return update


def scaled(parameters, then):
    return then(parameters["x"][None])


IMAGES, LABELS = STUDY[0]
BATCHES = [IMAGES, [], 3, "pairs", [IMAGES, LABELS, IMAGES], (IMAGES[:0], LABELS[:0]),
           [STUDY[0], (IMAGES,)], (IMAGES.to_sparse(), LABELS), (IMAGES, LABELS[:2]),
           (IMAGES, LABELS.double())]  # fmt: skip
FACTOR = [-0.5, nan, "1", 1e39], [0, 3.4e38]
TABLES = [3, zeros(5), zeros(0, CLASSES), zeros(5, 5).long(), full((5, 5), nan), Weighted(
    ones(5, 5), zeros(())), Weighted(ones(5, 5), -ones(5))]  # fmt: skip
RUN = {"model": Guided(mlp(), features=False), "guides": draw_guides(CLASSES), "study": STUDY,
       "quiz": QUIZ, "learning_rate": 0.1}  # fmt: skip
LOSS = {
    "guided": zeros(2, 3),
    "logits": zeros(2, 4),
    "labels": tensor([0, 1]),
    "guides": zeros(4, 3),
}
AT = {"x": ones(2)}
DERIVATIVE = {"evaluate": scaled, "parameters": AT, "direction": AT}
MODEL = nn.Linear(2, 2)
SGD, optim = torch.optim.SGD(MODEL.parameters(), lr=1.0), torch.optim
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    *((partial(method), DERIVATIVE, {
        "evaluate": ([3], [scaled]), "parameters": ([3, {}, {"x": ones(2).long()}], [AT]),
        "direction": ([3, {"y": ones(2)}, {"x": ones(3)}, {"x": ones(2).double()}], [AT])})
      for method in (forward_mode, double_backward)),
    (guided_loss, LOSS, {
        "guided": ([zeros(2, 3).long(), zeros(1, 3), zeros(2, 4), None], [ones(2, 3).bfloat16()]),
        "logits": ([zeros(2, 4).long(), zeros(2, 3), zeros(1, 4), None], [ones(2, 4).bfloat16()]),
        "labels": ([tensor([0, 4]), tensor([-1, 0]), zeros(2), [0, 1]], [tensor([3, 0]).int()]),
        "guides": (TABLES[:3] + TABLES[4:], [Weighted(zeros(4, 3), zeros(4))]),
        "guide_weight": FACTOR, "loss": ([3, lambda guided, rows: guided - rows], [F.l1_loss])}),
    (guide_gradient, RUN, {
        "model": ([F.relu, Answer(lambda guided, logits: logits), Answer(lambda *both: both[:1]),
                   Answer(lambda guided, logits: (guided.detach(), logits)),
                   with_an_unused_parameter(), freeze(Guided(mlp(), features=False))], []),
        "guides": (TABLES, [Weighted(draw_guides(CLASSES), ones(5))]),
        "learning_rate": (FACTOR[0], [0]), "guide_weight": (FACTOR[0], [0]),
        "study": (BATCHES, [STUDY[0]]),
        "quiz": ([*BATCHES[:2], (QUIZ[0][0] * nan, QUIZ[0][1])], [QUIZ[0]]),
        "loss": ([3, lambda guided, rows: (guided - rows).square(), lambda _, rows: rows.mean(),
                  lambda guided, rows: (guided - rows).sum().detach()], [F.mse_loss]),
        "update": ([3, lambda *_, **rate: None, lambda own, _, learning_rate: own,
                    step(lambda own: {}), step(lambda own: own | {"more": 1}),
                    step(lambda own: own | dict.fromkeys(own, 1))], [step(), None]),
        "method": ([3, lambda *_: None, lambda *_: zeros(1)], [double_backward])}),
    (lambda guided: guide_gradient(**RUN | {"model": Answer(guided)}), {}, {
        "guided": ([lambda guided, logits: (guided[:-1], logits)], [lambda *both: [*both]])}),
    (lambda study: guide_gradient(**RUN | {"model": study}), {}, {
        "study": ([with_an_infinite_slope()], [])}),
    (optimizer_update, {"optimizer": SGD, "model": MODEL}, {"optimizer": (
        [None, optim.RMSprop(MODEL.parameters()), optim.Adam(MODEL.parameters(), amsgrad=True)], [
            optim.Adam(MODEL.parameters()), optim.AdamW(MODEL.parameters())]),
        "model": ([optim.SGD], [])}),
    (partial(optimizer_update(SGD, MODEL), {}, {}), {}, {"learning_rate": ([0.5], [1])}),
])  # fmt: skip


@pytest.mark.bad_input
def test_inference_mode_is_refused():
    message = r"which torch\.inference_mode does not record"
    with torch.inference_mode(), pytest.raises(RuntimeError, match=message):
        guide_gradient(**RUN)
