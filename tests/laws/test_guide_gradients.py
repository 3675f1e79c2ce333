"""Laws of guide gradients (L-a to L-l), for every implementation.

Wrong implementations are at the end. Each law must reject at least one of them.
"""

import copy
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

import fedprompt
from fedprompt import Weighted
from fedprompt.guidance import derivatives, double_backward, guide_gradient
from guided import (
    CLASSES,
    QUIZ,
    STUDY,
    WIDTH,
    Guided,
    Twice,
    assert_near_in_norm,
    cnn,
    draw_guides,
    draw_pair,
    mlp,
    vit,
)
from references import fedl2g
from same import assert_identical

Gradient = Callable[..., Weighted]
# name: (implementation, relative tolerance)
IMPLEMENTATIONS = {
    "forward_mode": (guide_gradient, 1e-10),
    "double_backward": (partial(guide_gradient, method=double_backward), 1e-10),
}


def small(features: bool = False) -> Guided:
    return Guided(cnn(), features=features)


def without_motion(parameters, gradients, *, learning_rate):
    """Return the same parameters, with the derivative of plain descent.

    The quiz gradient is then the same for every study batch.
    """
    return {
        name: value - learning_rate * (gradients[name] - gradients[name].detach())
        for name, value in parameters.items()
    }


# Laws. Each takes an implementation and its tolerance.


def law_equals_the_differentiated_step(gradient: Gradient, tolerance: float) -> None:
    """L-a: the gradient equals double backward through the whole step."""
    for features in (False, True):
        model, guides = small(features), draw_guides(WIDTH if features else CLASSES)
        expected = fedl2g.double_backward(
            model, guides, STUDY, QUIZ, fedl2g.descend(0.3), weight=0.7
        )
        assert_near_in_norm(
            gradient(model, guides, STUDY, QUIZ, learning_rate=0.3, guide_weight=0.7).value,
            expected,
            tolerance,
        )


def law_equals_finite_differences_of_the_whole_step(gradient: Gradient, tolerance: float) -> None:
    """L-b: the gradient equals finite differences of the whole step."""
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    expected = fedl2g.finite_differences(
        model, guides, STUDY, QUIZ, fedl2g.descend(0.3), seed=0, step=1e-4
    )
    assert_near_in_norm(
        gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value, expected, 1e-6
    )


def law_weights_mark_the_studied_classes(gradient: Gradient, tolerance: float) -> None:
    """L-c: weights depend on the study labels, and not on the quiz or on the values."""
    model, guides = small(), draw_guides(CLASSES)
    for quiz in (QUIZ, [draw_pair([0, 3], seed=8)]):
        value, weight = gradient(model, guides, STUDY, quiz, learning_rate=0.3)
        assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert value[4].tolist() == [0.0] * CLASSES
    value, weight = gradient(model, guides, STUDY, QUIZ, learning_rate=0.3, guide_weight=0.0)
    assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def law_is_linear_in_the_study_samples(gradient: Gradient, tolerance: float) -> None:
    """L-d: for a fixed quiz gradient, the gradient is a sum over the study samples."""
    model, guides, (images, labels) = Guided(mlp(), features=False), draw_guides(CLASSES), STUDY[0]
    run = partial(gradient, model, guides, learning_rate=0.3, update=without_motion)
    parts = [
        run((images[own], labels[own]), QUIZ).value * len(labels[own]) / 5
        for own in (slice(0, 2), slice(2, 5))
    ]
    assert_near_in_norm(run((images, labels), QUIZ).value, parts[0] + parts[1], tolerance)


def law_is_zero_without_guidance(gradient: Gradient, tolerance: float) -> None:
    """L-h: a guide loss of weight 0 gives a gradient of 0."""
    value, _ = gradient(
        small(), draw_guides(CLASSES), STUDY, QUIZ, learning_rate=0.3, guide_weight=0.0
    )
    assert not value.any()


def law_has_no_side_effects(gradient: Gradient, tolerance: float) -> None:
    """L-i: parameters, gradients, buffers, modes, arguments and random stream are unchanged."""
    model, guides = (
        Guided(nn.Sequential(nn.Dropout(0.5), cnn()), features=False),
        draw_guides(CLASSES),
    )
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    before, table, state = copy.deepcopy(model), guides.clone(), torch.get_rng_state()
    gradient(model, guides, STUDY, QUIZ, learning_rate=0.3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(guides, table)
    for (name, value), old in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(value, old), name
    for (name, value), old in zip(model.named_parameters(), before.parameters(), strict=True):
        assert value.requires_grad == old.requires_grad
        assert (value.grad is None) == (name != "head.weight"), name
    assert bool((model.head.weight.grad == 3.0).all())
    assert [module.training for module in model.modules()] == [
        module.training for module in before.modules()
    ]


def law_descent_lowers_the_quiz_losses(gradient: Gradient, tolerance: float) -> None:
    """L-j: a small step along the mean of two clients lowers the loss by its squared norm."""
    clients, guides, step = [small(), Guided(mlp(), features=False)], draw_guides(CLASSES), 1e-3
    mean = (
        sum(gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value for model in clients) / 2
    )

    def mean_quiz_loss(table: Tensor) -> float:
        return (
            sum(
                fedl2g.quiz_loss(model, table, STUDY, QUIZ, fedl2g.descend(0.3)).item()
                for model in clients
            )
            / 2
        )

    lowered = mean_quiz_loss(guides) - mean_quiz_loss(guides - step * mean)
    assert lowered == pytest.approx(step * mean.square().sum().item(), rel=1e-2)


def law_weight_decay_changes_only_the_end_of_the_step(gradient: Gradient, tolerance: float) -> None:
    """L-k: weight decay acts on the gradient only through the parameters after the step."""

    def decayed(parameters, gradients, *, learning_rate, back):
        return {
            name: value - learning_rate * (gradients[name] + 0.5 * (1 - back) * value)
            for name, value in parameters.items()
        }

    model, guides = small(), draw_guides(CLASSES)
    plain = gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value
    assert_near_in_norm(
        gradient(
            model, guides, STUDY, QUIZ, learning_rate=0.3, update=partial(decayed, back=1)
        ).value,
        plain,
        tolerance,
    )
    away = gradient(
        model, guides, STUDY, QUIZ, learning_rate=0.3, update=partial(decayed, back=0)
    ).value
    assert (away - plain).norm() > 1e-3 * plain.norm()


def law_replays_dropout(gradient: Gradient, tolerance: float) -> None:
    """L-a with dropout: passes over a study batch share masks, and the quiz has others."""
    model, guides = Guided(vit(dropout=0.3), features=False), draw_guides(CLASSES)
    torch.manual_seed(11)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.3))
    torch.manual_seed(11)
    assert_near_in_norm(
        gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value,
        expected,
        max(tolerance, 1e-4 if tolerance > 1e-8 else 0),
    )


def law_shared_modules_and_weights_move_once(gradient: Gradient, tolerance: float) -> None:
    """L-a and L-i for shared modules and tied weights. Afterwards the model can be trained."""
    model, guides = Guided(Twice(), features=False), draw_guides(CLASSES)
    before, values = copy.deepcopy(model.state_dict()), [*model.parameters(), *model.buffers()]
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.05))
    assert_near_in_norm(
        gradient(model, guides, STUDY, QUIZ, learning_rate=0.05).value, expected, tolerance
    )
    after = [*model.parameters(), *model.buffers()]
    assert all(old is new for old, new in zip(values, after, strict=True))
    assert_identical(dict(model.state_dict()), dict(before))
    F.cross_entropy(model(STUDY[0][0])[1], STUDY[0][1]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert moved >= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert model.body.features is model.body.enter


LAWS = {name: law for name, law in list(globals().items()) if name.startswith("law_")}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_laws(name, law):
    LAWS[law](*IMPLEMENTATIONS[name])


def test_every_public_method_is_in_the_table():
    public = {
        name
        for name in fedprompt.guidance.__all__
        if getattr(fedprompt.guidance, name).__module__ == derivatives.__name__
    }
    assert public == IMPLEMENTATIONS.keys()


# Wrong implementations. Each differs in one point from a correct one.


def right(model, guides, study, quiz, *, learning_rate, guide_weight=1.0, update=None, **options):
    """Call the reference with the signature of the library."""

    def step(parameters, gradients):
        if update is None:
            return fedl2g.descend(learning_rate)(parameters, gradients)
        return update(
            {name: value.detach() for name, value in parameters.items()},
            gradients,
            learning_rate=learning_rate,
        )

    state = torch.get_rng_state()
    study, quiz = (
        [batches] if isinstance(batches[0], Tensor) else batches for batches in (study, quiz)
    )
    value = fedl2g.double_backward(model, guides, study, quiz, step, weight=guide_weight)
    torch.set_rng_state(state)
    present = torch.zeros(len(guides))
    present[torch.cat([labels for _, labels in study])] = 1.0
    return Weighted(value, present)


def without_the_mean_over_dim(model, guides, *args, **options):
    """Follow Eq. 9 of the paper, which has no 1 / M."""
    value, weight = right(model, guides, *args, **options)
    return Weighted(value * guides.shape[1], weight)


def without_the_jacobian(model, guides, study, quiz, *, learning_rate, **options):
    """Follow Eq. 8 of the paper, with a scalar for each row instead of the Jacobian."""
    value, weight = right(model, guides, study, quiz, learning_rate=learning_rate, **options)
    return Weighted(value.mean(1, keepdim=True).expand_as(value), weight)


def without_the_second_derivative(model, guides, study, quiz, *, learning_rate, **options):
    """Differentiate the guide loss of the study batch itself."""
    _, weight = right(model, guides, study, quiz, learning_rate=learning_rate, **options)
    pairs = [study] if isinstance(study[0], Tensor) else study
    table = guides.clone().requires_grad_()
    total = sum(
        F.mse_loss(fedl2g.run(model, {}, images)[0].detach(), table[labels])
        for images, labels in pairs
    )
    return Weighted(torch.autograd.grad(total, table)[0] * options.get("weight", 1.0), weight)


def with_the_quiz_before_the_step(
    model, guides, study, quiz, *, learning_rate, update=None, **options
):
    return right(
        model, guides, study, quiz, learning_rate=learning_rate, update=without_motion, **options
    )


def weights_by_the_quiz(model, guides, study, quiz, **options):
    value, weight = right(model, guides, study, quiz, **options)
    return Weighted(value, weight.index_fill(0, torch.cat([labels for _, labels in quiz]), 1.0))


def averaged_over_each_class(model, guides, study, quiz, **options):
    """Divide every row by the number of its samples."""
    value, weight = right(model, guides, study, quiz, **options)
    pairs = [study] if isinstance(study[0], Tensor) else study
    return Weighted(
        value
        / torch.bincount(torch.cat([labels for _, labels in pairs]), minlength=len(guides)).clamp(
            min=1
        )[:, None],
        weight,
    )


def ignoring_the_weight(*args, guide_weight=1.0, **options):
    return right(*args, **options)


def ignoring_the_update(*args, update=None, **options):
    return right(*args, **options)


def moving_the_buffers(model, *args, **options):
    result = right(model, *args, **options)
    model(QUIZ[0][0])
    return result


def with_other_masks(*args, **options):
    state = torch.get_rng_state()
    torch.rand(1000)
    result = right(*args, **options)
    torch.set_rng_state(state)
    return result


def swapping_one_slot_twice(*args, **options):
    """Run the model by ``functional_call`` under the first name of each parameter."""

    def run(model, parameters, images):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return functional_call(model, {**parameters, **buffers}, (images,), tie_weights=True)

    with mock.patch.object(fedl2g, "run", run):
        return right(*args, **options)


WRONG: dict[Callable[..., Weighted], str] = {
    without_the_mean_over_dim: "law_equals_the_differentiated_step",
    without_the_jacobian: "law_equals_finite_differences_of_the_whole_step",
    without_the_second_derivative: "law_descent_lowers_the_quiz_losses",
    with_the_quiz_before_the_step: "law_equals_finite_differences_of_the_whole_step",
    weights_by_the_quiz: "law_weights_mark_the_studied_classes",
    averaged_over_each_class: "law_is_linear_in_the_study_samples",
    ignoring_the_weight: "law_is_zero_without_guidance",
    ignoring_the_update: "law_weight_decay_changes_only_the_end_of_the_step",
    moving_the_buffers: "law_has_no_side_effects",
    with_other_masks: "law_replays_dropout",
    swapping_one_slot_twice: "law_shared_modules_and_weights_move_once",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_law_rejects_each_wrong_implementation(wrong):
    with pytest.raises(AssertionError):
        LAWS[WRONG[wrong]](wrong, 1e-10)
