"""The laws of guide gradients, every implementation, and wrong ones that the laws must reject (L-a to L-l)."""

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
from fedprompt import Weighted, descend, guide_gradient, guided_loss, weighted_mean
from fedprompt.guidance import central_difference, double_backward, methods
from fedprompt.interfaces import GuideGradient
from guided import CLASSES, QUIZ, STUDY, WIDTH, Guided, Twice, cnn, draw_guides, draw_pair, mlp, vit
from references import fedl2g
from same import assert_same

# name: (implementation, how far from exact)
IMPLEMENTATIONS = {
    "forward_mode": (guide_gradient, 1e-10),
    "double_backward": (partial(guide_gradient, method=double_backward), 1e-10),
    "central_difference": (
        partial(guide_gradient, method=partial(central_difference, step=1e-6)),
        1e-6,
    ),
}


def near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.norm() > 0
    assert (actual - expected).norm() <= tolerance * expected.norm()


def small(features: bool = False) -> Guided:
    return Guided(cnn(), features=features)


def standing_still(parameters, gradients, *, learning_rate):
    """A step that goes nowhere, but would move with the guides as plain descent does: the quiz gradient is the same for every study."""
    return {
        name: value - learning_rate * (gradients[name] - gradients[name].detach())
        for name, value in parameters.items()
    }


# The laws: each takes an implementation and its tolerance.


def law_equals_the_differentiated_step(gradient: GuideGradient, tolerance: float) -> None:
    """L-a."""
    for features in (False, True):
        model, guides = small(features), draw_guides(WIDTH if features else CLASSES)
        expected = fedl2g.double_backward(
            model, guides, STUDY, QUIZ, fedl2g.descend(0.3), weight=0.7
        )
        near(
            gradient(model, guides, STUDY, QUIZ, learning_rate=0.3, weight=0.7).value,
            expected,
            tolerance,
        )


def law_equals_finite_differences_of_the_whole_step(
    gradient: GuideGradient, tolerance: float
) -> None:
    """L-b."""
    model, guides = Guided(mlp(), features=False), draw_guides(CLASSES)
    expected = fedl2g.finite_differences(
        model, guides, STUDY, QUIZ, fedl2g.descend(0.3), seed=0, step=1e-4
    )
    near(gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value, expected, 1e-6)


def law_only_classes_that_were_studied_count(gradient: GuideGradient, tolerance: float) -> None:
    """L-c: by the labels of the study batches, whatever the quiz holds and whatever the values are."""
    model, guides = small(), draw_guides(CLASSES)
    for quiz in (QUIZ, [draw_pair([0, 3], seed=8)]):
        value, weight = gradient(model, guides, STUDY, quiz, learning_rate=0.3)
        assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]
        assert value[4].tolist() == [0.0] * CLASSES
    value, weight = gradient(model, guides, STUDY, QUIZ, learning_rate=0.3, weight=0.0)
    assert weight.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def law_is_linear_in_the_samples_of_the_study(gradient: GuideGradient, tolerance: float) -> None:
    """L-d: with the quiz gradient held fixed and nothing that couples samples."""
    model, guides, (images, labels) = Guided(mlp(), features=False), draw_guides(CLASSES), STUDY[0]
    run = partial(gradient, model, guides, learning_rate=0.3, update=standing_still)
    parts = [
        run((images[own], labels[own]), QUIZ).value * len(labels[own]) / 5
        for own in (slice(0, 2), slice(2, 5))
    ]
    near(run((images, labels), QUIZ).value, parts[0] + parts[1], tolerance)


def law_without_guidance_there_is_no_gradient(gradient: GuideGradient, tolerance: float) -> None:
    """L-h."""
    value, _ = gradient(small(), draw_guides(CLASSES), STUDY, QUIZ, learning_rate=0.3, weight=0.0)
    assert not value.any()


def law_nothing_else_moves(gradient: GuideGradient, tolerance: float) -> None:
    """L-i: parameters, gradients, buffers, modes, arguments and the random stream are what they were."""
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


def law_following_it_lowers_the_quiz_losses(gradient: GuideGradient, tolerance: float) -> None:
    """L-j: a small step along the mean of two clients' gradients, to first order by its squared norm."""
    clients, guides, step = [small(), Guided(mlp(), features=False)], draw_guides(CLASSES), 1e-3
    mean = (
        sum(gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value for model in clients) / 2
    )

    def judged(table: Tensor) -> float:
        return (
            sum(
                fedl2g.quiz_loss(model, table, STUDY, QUIZ, fedl2g.descend(0.3)).item()
                for model in clients
            )
            / 2
        )

    assert judged(guides) - judged(guides - step * mean) == pytest.approx(
        step * mean.square().sum().item(), rel=1e-2
    )


def law_weight_decay_in_the_step_changes_where_it_ends_and_not_how_it_follows(
    gradient: GuideGradient, tolerance: float
) -> None:
    """L-k: once the end point is put back, a step with weight decay has the same gradient; otherwise another quiz gradient is met."""

    def decayed(parameters, gradients, *, learning_rate, back):
        return {
            name: value - learning_rate * (gradients[name] + 0.5 * (1 - back) * value)
            for name, value in parameters.items()
        }

    model, guides = small(), draw_guides(CLASSES)
    plain = gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value
    near(
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


def law_replays_dropout(gradient: GuideGradient, tolerance: float) -> None:
    """L-a where masks are drawn: the same ones in every pass over a study batch, others for the quiz."""
    model, guides = Guided(vit(dropout=0.3), features=False), draw_guides(CLASSES)
    torch.manual_seed(11)
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.3))
    torch.manual_seed(11)
    near(
        gradient(model, guides, STUDY, QUIZ, learning_rate=0.3).value,
        expected,
        max(tolerance, 1e-4 if tolerance > 1e-8 else 0),
    )


def law_modules_and_weights_of_two_names_move_once(
    gradient: GuideGradient, tolerance: float
) -> None:
    """L-a and L-i where a module has two names and a weight two modules; afterwards the model still trains."""
    model, guides = Guided(Twice(), features=False), draw_guides(CLASSES)
    before, values = copy.deepcopy(model.state_dict()), [*model.parameters(), *model.buffers()]
    expected = fedl2g.double_backward(model, guides, STUDY, QUIZ, fedl2g.descend(0.05))
    near(gradient(model, guides, STUDY, QUIZ, learning_rate=0.05).value, expected, tolerance)
    after = [*model.parameters(), *model.buffers()]
    assert all(old is new for old, new in zip(values, after, strict=True))
    assert_same(model.state_dict(), before)
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


def test_every_implementation_and_every_method_is_in_the_table():
    assert all(
        isinstance(implementation, GuideGradient) for implementation, _ in IMPLEMENTATIONS.values()
    )
    public = {
        name
        for name in fedprompt.guidance.__all__
        if getattr(fedprompt, name).__module__ == methods.__name__
    }
    assert public == IMPLEMENTATIONS.keys()


# Wrong implementations. Each differs in one thing from one that obeys.


def right(model, guides, study, quiz, *, learning_rate, weight=1.0, update=None, **options):
    """The reference in the dress of the library."""

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
    value = fedl2g.double_backward(model, guides, study, quiz, step, weight=weight)
    torch.set_rng_state(state)
    present = torch.zeros(len(guides))
    present[torch.cat([labels for _, labels in study])] = 1.0
    return Weighted(value, present)


def without_the_mean_over_dim(model, guides, *args, **options):
    """The paper's Eq. 9: twice the learning rate, no 1 / M."""
    value, weight = right(model, guides, *args, **options)
    return Weighted(value * guides.shape[1], weight)


def without_the_jacobian(model, guides, study, quiz, *, learning_rate, **options):
    """The paper's Eq. 8: the same scalar for every entry of a row instead of the network's Jacobian."""
    value, weight = right(model, guides, study, quiz, learning_rate=learning_rate, **options)
    return Weighted(value.mean(1, keepdim=True).expand_as(value), weight)


def without_the_second_derivative(model, guides, study, quiz, *, learning_rate, **options):
    """Pulls the guides towards the outputs, as if the loss on the study batch were to be lowered."""
    _, weight = right(model, guides, study, quiz, learning_rate=learning_rate, **options)
    pairs = [study] if isinstance(study[0], Tensor) else study
    table = guides.clone().requires_grad_()
    total = sum(
        F.mse_loss(fedl2g.run(model, {}, images)[0].detach(), table[labels])
        for images, labels in pairs
    )
    return Weighted(torch.autograd.grad(total, table)[0] * options.get("weight", 1.0), weight)


def judged_before_the_step(model, guides, study, quiz, *, learning_rate, update=None, **options):
    return right(
        model, guides, study, quiz, learning_rate=learning_rate, update=standing_still, **options
    )


def present_by_the_quiz(model, guides, study, quiz, **options):
    value, weight = right(model, guides, study, quiz, **options)
    return Weighted(value, weight.index_fill(0, torch.cat([labels for _, labels in quiz]), 1.0))


def present_by_value(*args, **options):
    value, _ = right(*args, **options)
    return Weighted(value, value.abs().sum(1).ne(0).float())


def averaged_over_each_class(model, guides, study, quiz, **options):
    """Divides every row by the number of its samples."""
    value, weight = right(model, guides, study, quiz, **options)
    pairs = [study] if isinstance(study[0], Tensor) else study
    return Weighted(
        value
        / torch.bincount(torch.cat([labels for _, labels in pairs]), minlength=len(guides)).clamp(
            min=1
        )[:, None],
        weight,
    )


def deaf_to_the_weight(*args, weight=1.0, **options):
    return right(*args, **options)


def deaf_to_the_update(*args, update=None, **options):
    return right(*args, **options)


def ascending(*args, **options):
    value, weight = right(*args, **options)
    return Weighted(-value, weight)


def moving_the_buffers(model, *args, **options):
    result = right(model, *args, **options)
    model(QUIZ[0][0])
    return result


def drawing_from_the_stream(*args, **options):
    result = right(*args, **options)
    torch.rand(1)
    return result


def of_the_first_study_batch(model, guides, study, quiz, **options):
    return right(
        model, guides, study if isinstance(study[0], Tensor) else study[:1], quiz, **options
    )


def with_other_masks(*args, **options):
    state = torch.get_rng_state()
    torch.rand(1000)
    result = right(*args, **options)
    torch.set_rng_state(state)
    return result


def normalising_with_running_statistics(model, *args, **options):
    model = copy.deepcopy(model).eval()
    return right(model, *args, **options)


def swapping(*args, tie_weights, **options):
    """Runs the model by ``functional_call`` under the first name of each parameter."""

    def run(model, parameters, images):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return functional_call(model, {**parameters, **buffers}, (images,), tie_weights=tie_weights)

    with mock.patch.object(fedl2g, "run", run):
        return right(*args, **options)


def swapping_one_slot_twice(*args, **options):
    return swapping(*args, tie_weights=True, **options)


def moving_one_of_two_tied_weights(*args, **options):
    return swapping(*args, tie_weights=False, **options)


WRONG: dict[Callable[..., Weighted], str] = {
    without_the_mean_over_dim: "law_equals_the_differentiated_step",
    without_the_jacobian: "law_equals_finite_differences_of_the_whole_step",
    without_the_second_derivative: "law_following_it_lowers_the_quiz_losses",
    judged_before_the_step: "law_equals_finite_differences_of_the_whole_step",
    present_by_the_quiz: "law_only_classes_that_were_studied_count",
    present_by_value: "law_only_classes_that_were_studied_count",
    averaged_over_each_class: "law_is_linear_in_the_samples_of_the_study",
    deaf_to_the_weight: "law_without_guidance_there_is_no_gradient",
    deaf_to_the_update: "law_weight_decay_in_the_step_changes_where_it_ends_and_not_how_it_follows",
    ascending: "law_following_it_lowers_the_quiz_losses",
    moving_the_buffers: "law_nothing_else_moves",
    drawing_from_the_stream: "law_nothing_else_moves",
    of_the_first_study_batch: "law_equals_the_differentiated_step",
    with_other_masks: "law_replays_dropout",
    normalising_with_running_statistics: "law_equals_the_differentiated_step",
    swapping_one_slot_twice: "law_modules_and_weights_of_two_names_move_once",
    moving_one_of_two_tied_weights: "law_modules_and_weights_of_two_names_move_once",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_law_rejects_what_is_wrong(wrong):
    with pytest.raises(AssertionError):
        LAWS[WRONG[wrong]](wrong, 1e-10)


@pytest.mark.parametrize("law", LAWS)
def test_the_reference_obeys(law):
    LAWS[law](right, 1e-10)


# Server side: Algorithm 1 and Eq. 6 from weighted_mean and descend.


def test_a_class_is_averaged_over_its_uploaders_and_stays_without_one():
    """L-f, L-g: Alg. 1 by hand, in any order; the mean over all (Eq. 6) where all have studied every class."""
    guides = draw_guides(CLASSES)
    studies = [
        draw_pair([0, 1, 2], seed=20),
        draw_pair([1, 3], seed=21),
        draw_pair([1, 2, 2], seed=22),
    ]
    uploads = [guide_gradient(small(), guides, study, QUIZ, learning_rate=0.3) for study in studies]
    update = descend(partial(torch.optim.SGD, lr=0.5), max_norm=100.0)
    new, _ = update.step(guides, weighted_mean(uploads), update.init(guides))
    expected = guides.clone()
    for label in range(CLASSES):
        own = [
            upload.value[label]
            for upload, (_, labels) in zip(uploads, studies, strict=True)
            if label in labels
        ]
        if own:
            expected[label] -= 0.5 * sum(own) / len(own)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-12)
    assert torch.equal(new[4], guides[4])
    again, _ = update.step(guides, weighted_mean(uploads[::-1]), update.init(guides))
    torch.testing.assert_close(again, new, rtol=0, atol=1e-12)
    everywhere = [
        guide_gradient(
            small(), guides, draw_pair([0, 1, 2, 3, 4], seed=seed), QUIZ, learning_rate=0.3
        )
        for seed in (30, 31)
    ]
    torch.testing.assert_close(
        weighted_mean(everywhere).value, (everywhere[0].value + everywhere[1].value) / 2
    )


def test_the_summed_gradient_is_cut_to_a_norm_of_100():
    guides = torch.zeros(2, 2)
    gradient = Weighted(
        torch.tensor([[300.0, 0.0], [0.0, 400.0]]), torch.ones(2)
    )  # norm 500: a fifth is left
    update = descend(partial(torch.optim.SGD, lr=1.0), max_norm=100.0)
    torch.testing.assert_close(
        update.step(guides, gradient, update.init(guides))[0],
        torch.tensor([[-60.0, 0.0], [0.0, -80.0]]),
    )


def test_local_training_without_guidance_is_plain_training():
    """L-h, the loss."""
    logits, labels = draw_guides(CLASSES), torch.tensor([0, 1, 2, 3, 3])
    torch.testing.assert_close(
        guided_loss(logits, logits, labels, draw_guides(CLASSES), weight=0.0),
        F.cross_entropy(logits, labels),
    )
