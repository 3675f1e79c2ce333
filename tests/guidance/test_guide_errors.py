"""Errors of guide_gradient and guided_loss."""

import re
from functools import partial

import pytest
import torch
import torch.nn as nn

from fedprompt import (
    Weighted,  # noqa: F401
    guide_gradient,
    guided_loss,
)
from fedprompt.guidance import central_difference
from guided import CLASSES, QUIZ, STUDY, WIDTH, Guided, decay_and_momentum, draw_guides, mlp
from refusals import check_refused, refusals


def run(model=None, guides=None, study=None, quiz=None, **options):
    model = Guided(mlp(), features=False) if model is None else model
    guides = draw_guides(CLASSES) if guides is None else guides
    study, quiz = (own if given is None else given for given, own in ((study, STUDY), (quiz, QUIZ)))
    return guide_gradient(model, guides, study, quiz, **{"learning_rate": 0.1, **options})


class Answer(nn.Module):
    """Model whose outputs are changed by a function."""

    def __init__(self, change):
        super().__init__()
        self.inner, self.change = Guided(mlp(), features=False), change

    def forward(self, images):
        return self.change(*self.inner(images))


def frozen_body():
    model = Guided(mlp(), features=True)
    model.body.requires_grad_(False)
    return model


def with_an_unused_parameter():
    model = Guided(mlp(), features=False)
    model.spare = nn.Linear(2, 2).double()
    return model


def with_a_broken_weight():
    model = Guided(mlp(), features=False)
    with torch.no_grad():
        model.head.bias[0] = torch.inf
    return model


IMAGES = STUDY[0][0]
EMPTY = (IMAGES[:0], torch.zeros(0, dtype=torch.int64))
BAD = [
    (
        {"model": torch.nn.functional.relu},
        TypeError,
        "`model` must be an nn.Module; got <function relu",
    ),
    (
        {"guides": torch.zeros(5, 5, dtype=torch.int64)},
        TypeError,
        "`guides` must be a floating-point tensor of shape (classes, dim), or a Weighted of one",
    ),
    ({"guides": torch.zeros(5)}, ValueError, "`guides` must have shape (classes, dim); got (5,)"),
    (
        {"guides": draw_guides(7)},
        ValueError,
        "`guided` must be floating-point of shape (batch=5, 7), the width of `guides`; got",
    ),
    (
        {"guides": draw_guides(5, classes=6)},
        ValueError,
        "`logits` must be floating-point of shape (batch=5, 6), one column for each row",
    ),
    ({"learning_rate": 0.0}, ValueError, "`learning_rate` must be above 0; got 0.0"),
    ({"weight": -1.0}, ValueError, "`weight` must be at least 0; got -1.0"),
    (
        {"study": (IMAGES, torch.tensor([0, 1, 5, 0, 0]))},
        ValueError,
        "`study labels` must lie in [0, 5); got values from 0 to 5",
    ),
    (
        {"quiz": [QUIZ[0], (IMAGES, torch.tensor([0, 1, -1, 0, 0]))]},
        ValueError,
        "`quiz[1] labels` must lie in [0, 5); got values from -1 to 1",
    ),
    (
        {"study": (IMAGES, torch.zeros(5))},
        TypeError,
        "`study labels` must be integers of shape (batch,); got a float32",
    ),
    ({"study": EMPTY}, ValueError, "`study` must contain at least one sample; got none"),
    ({"quiz": EMPTY}, ValueError, "`quiz` must contain at least one sample; got none"),
    ({"study": []}, ValueError, "`study` must contain at least one batch; got none"),
    ({"quiz": []}, ValueError, "`quiz` must contain at least one batch; got none"),
    (
        {"study": IMAGES},
        TypeError,
        "`study` must be a pair (images, labels) or a sequence of pairs; got a float64",
    ),
    (
        {"study": [IMAGES, STUDY[0][1], IMAGES]},
        TypeError,
        "`study[0]` must be a pair of tensors (images, labels); got a float64",
    ),
    (
        {"quiz": (IMAGES, torch.tensor([0, 1]))},
        ValueError,
        "`quiz` must have as many images as labels; got (5, 3, 16, 16) and (2,)",
    ),
    (
        {"model": Answer(lambda guided, logits: logits)},
        TypeError,
        "`model` must return two tensors (guided, logits); got a float64",
    ),
    (
        {"model": Answer(lambda guided, logits: (logits,))},
        TypeError,
        "`model` must return two tensors (guided, logits); got ['a float64",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided, logits[:, :4]))},
        ValueError,
        "`logits` must be floating-point of shape (batch=5, 5)",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided[:-1], logits))},
        ValueError,
        "`guided` must be floating-point of shape (batch=5, 5)",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided[:-1], logits[:-1]))},
        ValueError,
        "`logits` must be floating-point of shape (batch=5, 5), one column",
    ),
    (
        {"model": Answer(lambda guided, logits: (guided.detach(), logits))},
        ValueError,
        "`model` must compute its guided output from a trainable",
    ),
    (
        {"model": frozen_body(), "guides": draw_guides(WIDTH)},
        ValueError,
        "`model` must compute its guided output from a trainable parameter; got",
    ),
    (
        {"model": with_an_unused_parameter()},
        ValueError,
        "or freeze it; got no gradient for ['spare.weight', 'spare.bias'].",
    ),
    (
        {"model": with_an_unused_parameter(), "update": decay_and_momentum},
        ValueError,
        "or freeze it; got no gradient for ['spare.weight'",
    ),
    (
        {"model": Guided(mlp(), features=False).requires_grad_(False)},
        ValueError,
        "`model` must have a parameter that requires gradients; got none",
    ),
    (
        {"model": with_a_broken_weight()},
        ValueError,
        "`study` must give finite gradients; got NaN or infinity for ['body.1.weight'",
    ),
    (
        {"quiz": (QUIZ[0][0] * torch.nan, QUIZ[0][1])},
        ValueError,
        "`quiz` must give finite gradients; got NaN or infinity for ['body.1.weight'",
    ),
    (
        {"loss": lambda guided, rows: (guided - rows).square()},
        ValueError,
        "`loss` must return a scalar, such as a mean over the batch; got a",
    ),
    (
        {"loss": lambda guided, rows: guided.mean()},
        ValueError,
        "`loss` must be twice differentiable; got a gradient with respect to",
    ),
    (
        {"update": lambda parameters, gradients, *, learning_rate: {}},
        ValueError,
        "`update` must return parameter 'body.1.weight' with shape (10, 768); got none",
    ),
    (
        {"update": lambda parameters, gradients, *, learning_rate: {**parameters, "more": 1}},
        ValueError,
        "`update` must return the parameters that it was given; got ['more']",
    ),
    (
        {"update": lambda parameters, gradients, *, learning_rate: parameters},
        ValueError,
        "`update` must compute the step from the gradients",
    ),
    (
        {"method": partial(central_difference, step=0.0)},
        ValueError,
        "`step` must be above 0; got 0.0",
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_guide_gradient_names_a_bad_argument(options, error, message):
    state = torch.get_rng_state()
    with pytest.raises(error, match=re.escape(message)):
        run(**options)
    assert torch.equal(torch.get_rng_state(), state)


def good_loss(guided=None, logits=None, labels=None, guides=None, **options):
    good = (torch.zeros(2, 3), torch.zeros(2, 4), torch.tensor([0, 1]), torch.zeros(4, 3))
    given = (guided, logits, labels, guides)
    return guided_loss(
        *(one if other is None else other for one, other in zip(good, given, strict=True)),
        **options,
    )


@pytest.mark.bad_input
def test_inference_mode_is_refused():
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"which torch\.inference_mode forbids"),
    ):
        run()


REFUSED = """
good_loss(labels=torch.tensor([0, 4])) -> ValueError: `labels` must lie in [0, 4); got values from
good_loss(labels=torch.zeros(2)) -> TypeError: `labels` must be integers of shape (batch,)
good_loss(labels=torch.tensor([0])) -> ValueError: `logits` must be floating-point of shape
good_loss(logits=torch.zeros(2, 5)) -> ValueError: `logits` must be floating-point of shape
good_loss(guided=torch.zeros(2, 2)) -> ValueError: `guided` must be floating-point of shape
good_loss(guides=torch.zeros(0, 3)) -> ValueError: `guides` must have shape (classes, dim); got (0
good_loss(guides=Weighted(torch.zeros(4, 3), torch.zeros(()))) \
-> ValueError: `guides.weight` must have shape (4,); got ()
good_loss(guides=Weighted(torch.zeros(4, 3), torch.tensor([1.0, -1.0, 0.0, 0.0]))) \
-> ValueError: `guides.weight` must be finite and at least 0; got -1.0
good_loss(weight=-0.5) -> ValueError: `weight` must be at least 0; got -0.5
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
