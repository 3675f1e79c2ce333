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
    guides = draw_guides(WIDTH if features else CLASSES)
    expected = expected_gradient(body, features, loss)
    torch.manual_seed(11)
    options = {"learning_rate": 0.1, "guide_weight": 0.7, "loss": LOSSES[loss], "method": method}
    checkpoints = body == "vit, dropout, checkpointing"
    falls_back = checkpoints and method is forward_mode and not CHECKPOINTS_HAVE_TANGENTS
    with pytest.warns(UserWarning, match="double_backward") if falls_back else nullcontext():
        value, weight = guide_gradient(model, guides, STUDY, QUIZ, **options)
    assert_near_in_norm(value, expected)
    assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


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


class Pooled(nn.Module):
    """Model whose features are pooled or projected to a common width."""

    def __init__(self, *, projected):
        super().__init__()
        self.body = mlp()
        self.adapt = nn.Linear(WIDTH, 8).double() if projected else nn.AdaptiveAvgPool1d(8)
        self.head = nn.Linear(8, CLASSES).double()

    def forward(self, images):
        features = self.adapt(self.body(images))
        return features, self.head(features)


@pytest.mark.parametrize("projected", [False, True])
def test_gradient_of_pooled_and_projected_features(projected):
    model, guides = Pooled(projected=projected), draw_guides(8)
    assert_near_in_norm(
        guide_gradient(model, guides, STUDY, QUIZ, learning_rate=0.1).value,
        fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.1)),
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


def test_guides_that_require_gradients_receive_none():
    guides = draw_guides(CLASSES).requires_grad_()
    entry = guide_gradient(Guided(mlp(), features=False), guides, STUDY, QUIZ, learning_rate=0.1)
    assert guides.grad is None
    assert not entry.value.requires_grad


def test_a_loss_that_ignores_the_guides_gives_them_no_gradient():
    model = Guided(mlp(), features=False)
    options = {"learning_rate": 0.1, "loss": lambda guided, rows: guided.square().mean()}
    entry = guide_gradient(model, draw_guides(CLASSES), STUDY, QUIZ, **options)
    assert not entry.value.any()


class Outside(nn.Module):
    """Model with logits from a tensor that is not one of its parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.outside = mlp(), (torch.ones(CLASSES).double().requires_grad_(),)

    def forward(self, images):
        return self.body(images), self.outside[0].expand(len(images), -1)


def test_guides_have_no_gradient_if_no_parameter_affects_the_quiz():
    entry = guide_gradient(Outside(), draw_guides(WIDTH), STUDY, QUIZ, learning_rate=0.1)
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
