"""Errors of guide_gradient and guided_loss."""

import pytest
import torch
import torch.nn as nn

from fedprompt.guidance import guide_gradient, guided_loss
from guided import CLASSES, QUIZ, STUDY, Guided, draw_guides, mlp
from refusals import refused


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


def with_an_unused_parameter():
    model = Guided(mlp(), features=False)
    model.spare = nn.Linear(2, 2).double()
    return model


def with_an_infinite_slope():
    """Only the first entry of one parameter has it."""
    model = Answer(lambda guided, logits: (guided + model.zero.sqrt().sum(), logits))
    model.zero = nn.Parameter(torch.tensor([0.0, 1.0], dtype=torch.float64))
    return model


IMAGES = STUDY[0][0]
EMPTY = (IMAGES[:0], torch.zeros(0, dtype=torch.int64))


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
        pytest.raises(RuntimeError, match=r"which torch\.inference_mode does not record"),
    ):
        run()


AT = {"x": torch.ones(2)}


def scaled(parameters, then):
    return then(parameters["x"][None])


test_wrong_calls_are_refused_by_name = refused(globals())("""
guidance.forward_mode(3, AT, AT) -> TypeError: `evaluate` must be a function; got 3
guidance.forward_mode(scaled, 3, AT) -> TypeError: `parameters` must map names to tensors; got 3
guidance.forward_mode(scaled, AT, 3) -> TypeError: `direction` must map names to tensors; got 3
guidance.forward_mode(scaled, AT, {'y': ones(2)}) -> ValueError: `direction` must have the names of
guidance.double_backward(scaled, AT, {'x': ones(3)}) -> ValueError: `direction['x']` must have the
good_loss(loss=3) -> TypeError: `loss` must be a function; got 3
good_loss(logits=zeros(2, 4).long()) -> TypeError: `logits` must be a floating-point tensor
good_loss(guided=zeros(2, 3).long()) -> TypeError: `guided` must be a floating-point tensor
good_loss(guides=full((4, 3), nan)) -> ValueError: `guides` must be finite; got 12
run(loss=3) -> TypeError: `loss` must be a function; got 3
run(method=3) -> TypeError: `method` must be a function; got 3
run(update=3) -> TypeError: `update` must be a function; got 3
run(method=lambda *_: None) -> TypeError: `method` must return a tensor; got None
run(study=(IMAGES.to_sparse(), STUDY[0][1])) -> TypeError: `study` must be a dense tensor; got one
good_loss(labels=tensor([0, 4])) -> ValueError: `labels` must lie in [0, 4); got values from
good_loss(labels=zeros(2)) -> TypeError: `labels` must be integers of shape (batch,)
good_loss(labels=tensor([0])) -> ValueError: `logits` must have the shape of labels by
good_loss(guides=zeros(0, 3)) -> ValueError: `guides` must have shape (classes, dim); got (0
good_loss(guides=Weighted(zeros(4, 3), zeros(()))) -> ValueError: `guides.weight` must have shape
good_loss(guides=Weighted(zeros(4, 3), -ones(4))) -> ValueError: be finite and at least 0; got -1.0
good_loss(guide_weight=-0.5) -> ValueError: `guide_weight` must be at least 0; got -0.5
run(model=torch.nn.functional.relu) -> TypeError: `model` must be an nn.Module; got <function relu
run(guides=zeros(5, 5, dtype=torch.int64)) -> TypeError: `guides` must be a floating-point
run(guides=zeros(5)) -> ValueError: `guides` must have shape (classes, dim); got (5,)
run(learning_rate=-0.1) -> ValueError: `learning_rate` must be at least 0; got -0.1
run(method=lambda *_: zeros(1)) -> ValueError: `method` must have the shape of the guided output
run(update=lambda *_, **rate: None) -> TypeError: `update` must return a mapping from names
run(loss=lambda a, b: (a - b).sum().detach()) -> ValueError: `loss` must be twice differentiable
run(guide_weight=-1.0) -> ValueError: `guide_weight` must be at least 0; got -1.0
run(study=(IMAGES, tensor([0, 1, 5, 0, 0]))) -> ValueError: `study labels` must lie in [0
run(study=(IMAGES, zeros(5))) -> TypeError: `study labels` must be integers of shape
run(study=EMPTY) -> ValueError: `study` must contain at least one sample; got none
run(study=[]) -> ValueError: `study` must contain at least one batch; got none
run(study=IMAGES) -> TypeError: `study` must be a pair (images, labels) or a sequence of pairs; got
run(study=[IMAGES, STUDY[0][1], IMAGES]) -> TypeError: `study[0]` must be a pair of tensors
run(quiz=(IMAGES, tensor([0, 1]))) -> ValueError: `quiz` must have as many images as labels
run(model=Answer(lambda guided, logits: logits)) -> TypeError: `model` must return two tensors
run(model=Answer(lambda guided, logits: (guided[:-1], logits))) -> ValueError: columns of
run(model=Answer(lambda guided, logits: (guided.detach(), logits))) -> ValueError: compute its
run(model=with_an_unused_parameter()) -> ValueError: or freeze it; got no gradient for
run(model=Guided(mlp(), features=False).requires_grad_(False)) -> ValueError: `model` must have a
run(model=with_an_infinite_slope()) -> ValueError: finite gradients; got NaN or infinity for ['zero'
run(quiz=(QUIZ[0][0] * nan, QUIZ[0][1])) -> ValueError: `quiz` must give finite gradients
run(loss=lambda guided, rows: (guided - rows).square()) -> ValueError: `loss` must return a scalar,
run(loss=lambda guided, rows: rows.mean()) -> ValueError: `loss` must be twice differentiable
run(update=lambda parameters, gradients, *, learning_rate: {}) -> ValueError: `update` must return
run(update=lambda own, _, learning_rate: {**own, 'more': 1}) -> ValueError: got ['more']
run(update=lambda own, _, learning_rate: own) -> ValueError: compute the step from the gradients
""")
