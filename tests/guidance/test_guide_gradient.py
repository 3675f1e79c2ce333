"""Values of guide gradients, for every kind of model, step and loss, against double backward."""

from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
import torch.nn as nn
from torch.utils import checkpoint

from fedprompt import Weighted
from fedprompt.guidance import double_backward, forward_mode, guide_gradient
from guided import (
    BODIES,
    CLASSES,
    LOSSES,
    QUIZ,
    STUDY,
    WIDTH,
    Guided,
    assert_near_in_norm,
    cnn,
    decay_and_momentum,
    draw_guides,
    mlp,
    seeded,
    vit,
)
from references import fedl2g

# Whether gradient checkpointing has a rule of forward mode in the installed torch.
SAVING = getattr(checkpoint, "_NoopSaveInputs", None)  # before torch 2.11
CHECKPOINTS_HAVE_TANGENTS = SAVING is None or "jvp" in vars(SAVING)


@cache
def expected_gradient(body, features, loss):
    """Compute the reference, which is the same for both methods."""
    _, without_checkpointing = BODIES[body]
    twin = Guided(without_checkpointing(), features=features)
    guides = draw_guides(WIDTH if features else CLASSES)
    torch.manual_seed(11)
    return fedl2g.double_backward(
        twin, guides, STUDY, QUIZ, fedl2g.descend(0.1), weight=0.7, loss=LOSSES[loss]
    )


# Every body with both methods, and every loss with one body; guides of features and of logits.
CASES = [
    *(("mlp", forward_mode, True, loss) for loss in LOSSES),
    *((body, forward_mode, False, "mse") for body in BODIES),
    *((body, double_backward, True, "kl") for body in BODIES),
]


@pytest.mark.parametrize(("body", "method", "features", "loss"), CASES)
def test_gradient_equals_double_backward_for_every_model_and_loss(body, method, features, loss):
    make, _ = BODIES[body]
    model = Guided(make(), features=features)
    guides = draw_guides(WIDTH if features else CLASSES).requires_grad_()
    expected = expected_gradient(body, features, loss)
    torch.manual_seed(11)
    options = {"learning_rate": 0.1, "guide_weight": 0.7, "loss": LOSSES[loss], "method": method}
    checkpoints = body == "vit, dropout, checkpointing"
    falls_back = checkpoints and method is forward_mode and not CHECKPOINTS_HAVE_TANGENTS
    with pytest.warns(UserWarning, match="double_backward") if falls_back else nullcontext():
        value, weight = guide_gradient(model, guides, STUDY, QUIZ, **options)
    assert_near_in_norm(value, expected)
    assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
    assert guides.grad is None
    assert not value.requires_grad


def clipped(parameters, gradients, *, learning_rate):
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    assert norm > 0.5  # the clipping is active
    return {
        name: value - learning_rate * 0.5 / norm * gradients[name]
        for name, value in parameters.items()
    }


def of_later_layers(parameters, gradients, *, learning_rate):
    return {
        name: value if name.startswith("body.0") else value - learning_rate * gradients[name]
        for name, value in parameters.items()
    }


@pytest.mark.parametrize("update", [decay_and_momentum, clipped, of_later_layers])
@pytest.mark.parametrize("features", [False, True])
def test_gradient_through_every_differentiable_step(update, features):
    model, guides = Guided(cnn(), features=features), draw_guides(WIDTH if features else CLASSES)
    expected = fedl2g.double_backward(
        model, guides, STUDY, QUIZ, partial(update, learning_rate=0.1)
    )
    assert_near_in_norm(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1, update=update).value, expected
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_every_integer_dtype_are_indices(dtype):
    model, guides, (images, labels) = Guided(mlp(), features=False), draw_guides(CLASSES), STUDY[0]
    expected = guide_gradient(model, guides, (images, labels), QUIZ[0], learning_rate=0.1)
    actual = guide_gradient(
        model,
        guides,
        (images, labels.to(dtype)),
        (QUIZ[0][0], QUIZ[0][1].to(dtype)),
        learning_rate=0.1,
    )
    assert torch.equal(actual.value, expected.value)
    assert torch.equal(actual.weight, expected.weight)


class Outside(nn.Module):
    """Model with logits from a tensor that is not one of its parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.outside = mlp(), (torch.ones(CLASSES).double().requires_grad_(),)

    def forward(self, images):
        return self.body(images), self.outside[0].expand(len(images), -1)


def test_guides_without_an_effect_have_no_gradient():
    """No parameter affects the quiz, or the loss ignores the guides."""
    own = {"loss": lambda guided, rows: guided.square().mean()}
    models = (Outside(), {}), (Guided(mlp(), features=True), own)
    for model, options in models:
        entry = guide_gradient(model, draw_guides(WIDTH), STUDY, QUIZ, learning_rate=0.1, **options)
        assert not entry.value.any()
        assert entry.weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_autocast_are_near_float64(dtype):
    model, guides = Guided(vit(), features=False), draw_guides(CLASSES)
    expected = guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value

    def single(pairs):
        return [(images.float(), labels) for images, labels in pairs]

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        actual = guide_gradient(
            model.float(), guides.float(), single(STUDY), single(QUIZ), learning_rate=0.1
        ).value
    assert actual.dtype == torch.float32
    assert_near_in_norm(actual.double(), expected, 1e-4 if dtype == torch.float32 else 0.1)


class Branches(nn.Module):
    """Model with one layer for study batches (size 5) and another for quiz batches (size 4).

    Its scale is rounded, so the derivative with respect to the scale is 0.
    """

    def __init__(self):
        super().__init__()
        self.body, self.scale = mlp(), nn.Parameter(torch.full((WIDTH,), 2.2, dtype=torch.float64))
        self.studied, self.judged = (seeded(lambda: nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, images):
        return (self.studied if len(images) == 5 else self.judged)(
            self.body(images).tanh()
        ) * self.scale.round()


@pytest.mark.parametrize("method", [forward_mode, double_backward])
@pytest.mark.parametrize("update", [None, decay_and_momentum])
def test_parameters_that_only_one_loss_or_no_derivative_reaches(update, method):
    model, guides = Guided(Branches(), features=False), draw_guides(CLASSES)
    step = fedl2g.descend(0.1) if update is None else partial(update, learning_rate=0.1)
    expected = fedl2g.double_backward(model, guides, STUDY[:1], QUIZ[:1], step)
    assert_near_in_norm(
        guide_gradient(
            model, guides, STUDY[0], QUIZ[0], learning_rate=0.1, update=update, method=method
        ).value,
        expected,
    )


@pytest.mark.parametrize("method", [forward_mode, double_backward])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_with_guides_of_weight_zero(loss, method):
    """The loss of the reference leaves out samples of class 1, which has weight 0."""
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    weight = torch.tensor([1.0, 0.0, 2.0, 5.0, 1.0])
    entry = Weighted(guides.index_fill(0, torch.tensor(1), torch.nan), weight)

    def without(guided, rows):
        unknown = (rows == guides[1]).all(1)
        return LOSSES[loss](guided[~unknown], rows[~unknown]) * (~unknown).double().mean()

    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1), loss=without)
    value, known = guide_gradient(
        model, entry, STUDY, QUIZ, learning_rate=0.1, loss=LOSSES[loss], method=method
    )
    assert_near_in_norm(value, expected)
    assert not value[1].any()
    assert known.tolist() == [1.0, 0.0, 1.0, 1.0, 0.0]
