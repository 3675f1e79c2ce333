"""Class means, distillation, mutual and proximal losses, against equations, loops and by hand."""

import math
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import eye, nan, ones, tensor, zeros

from fedprompt import (
    Weighted,
    class_means,
    distillation_loss,
    mutual_loss,
    proximal_loss,
    snapshot,
    weighted_mean,
)
from references import fedhpl
from refusals import number, refused_and_taken
from same import assert_identical
from tolerance import assert_near

float64 = torch.float64


def samples(generator, size=14, classes=5):
    """Logits that lean towards their labels; no sample has the last class."""
    labels = torch.randint(classes - 1, (size,), generator=generator)
    logits = torch.randn(size, classes, generator=generator, dtype=float64)
    return logits + F.one_hot(labels, classes), labels


def teacher_of(generator, unknown=()):
    """Draw logits of each class; unknown ones are NaN."""
    value = 2 * torch.randn(5, 5, generator=generator, dtype=float64)
    weight = 1 + torch.rand(5, generator=generator)
    value[list(unknown)], weight[list(unknown)] = nan, 0.0
    return Weighted(value, weight)


# Class means.


def test_class_means_of_correct_logits_against_equation_10(generator):
    logits, labels = samples(generator, size=60)
    value, weight = class_means(logits, labels, num_classes=5, keep=logits.argmax(1) == labels)
    client = fedhpl.Client(1, list(logits), labels.tolist())
    rows = [fedhpl.sent(client, label) for label in range(5)]
    assert weight.tolist() == [len(sent) for sent in rows]
    assert 0 < weight.sum() < 60
    assert_near(value, torch.stack([sum(sent, 0 * logits[0]) / max(1, len(sent)) for sent in rows]))


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 12),
    classes=st.integers(1, 6),
    event=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from([torch.float32, float64]),
)
def test_class_means_of_any_shape_against_a_loop_and_of_two_batches(
    seed, size, classes, event, dtype
):
    """Samples that are not kept may hold anything, and no argument is changed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((size, *event), generator=generator, dtype=dtype)
    labels = torch.randint(classes, (size,), generator=generator)
    keep = torch.rand(size, generator=generator) < 0.7
    values[~keep] = nan
    before, mean_of = values.clone(), partial(class_means, num_classes=classes)
    mean, count = whole = mean_of(values, labels, keep=keep)
    assert (mean.dtype, mean.shape, count.dtype) == (dtype, (classes, *event), dtype)
    for label in range(classes):
        own = [
            values[index].double()
            for index in range(size)
            if keep[index] and labels[index] == label
        ]
        assert count[label] == len(own)
        assert_near(mean[label], sum(own, zeros(event, dtype=float64)) / max(1, len(own)))
    parts = [mean_of(values[at], labels[at], keep=keep[at]) for at in (slice(4), slice(4, None))]
    assert_near(weighted_mean(parts).value, whole.value)
    assert_identical(weighted_mean(parts).weight, count)
    assert_identical(values, before)


def test_sums_of_many_half_precision_samples_do_not_overflow():
    # 3,000 samples of 100 sum to 300,000, beyond float16 (65,504).
    values = torch.full((3000, 1), 100.0, dtype=torch.float16)
    mean = class_means(values, zeros(3000).long(), num_classes=1)
    assert (mean.value.item(), mean.value.dtype, mean.weight.item()) == (100, torch.float16, 3000)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_labels_of_every_integer_dtype_are_indices_and_never_masks(dtype, generator):
    # With as many samples as classes, labels of dtype uint8 would index as a mask.
    logits, labels = samples(generator, size=5)
    for call in (
        partial(class_means, num_classes=5),
        partial(distillation_loss, teacher=teacher_of(generator)),
    ):
        assert_identical(call(logits, labels.to(dtype)), call(logits, labels))


# Distillation.


@pytest.mark.parametrize("temperature", [0.5, 4.5, 20.0])
@pytest.mark.parametrize("unknown", [(), (0, 2), (0, 1, 2, 3, 4)])
def test_loss_against_equation_9_and_appendix_c_4(temperature, unknown, generator):
    """The reference takes the sample's logits for unknown classes (App. C.4) instead of a mask."""
    logits, labels = samples(generator)
    teacher = teacher_of(generator, unknown)
    value, weight = (part.clone().requires_grad_() for part in teacher)
    before = [part.clone() for part in (logits, labels, *teacher)]
    expected = fedhpl.distillation_loss(logits, labels.tolist(), *teacher, temperature)
    options = {} if temperature == 4.5 else {"temperature": temperature}  # as in the paper
    logits.requires_grad_()
    loss = distillation_loss(logits, labels, Weighted(value, weight), **options)
    assert_near(loss.detach(), expected)
    assert_identical([logits.detach(), labels, *teacher], before)
    loss.backward()
    assert value.grad is weight.grad is None
    taught = tensor([label not in unknown for label in labels.tolist()])
    assert_identical(logits.grad.ne(0).any(1), taught)
    half = distillation_loss(logits.bfloat16(), labels, Weighted(value.float(), weight), **options)
    assert half.dtype == torch.float32
    assert_near(half.detach(), expected, dtype=torch.bfloat16)


def test_gradient_against_finite_differences(generator):
    logits, labels = samples(generator, size=6)
    loss = partial(distillation_loss, labels=labels, teacher=teacher_of(generator, unknown=(1,)))
    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


def test_divergence_runs_from_teacher_to_student():
    # By hand: the teacher is (3/4, 1/4) and the student (1/2, 1/2).
    # KL(t || s) = 3/4 log 3/2 + 1/4 log 1/2 = 0.1308, and KL(s || t) = 0.1438.
    logits, other = zeros(1, 2, dtype=float64), tensor([[math.log(3.0), 0.0]], dtype=float64)
    teacher = Weighted(other.expand(2, 2), ones(2))
    for loss in (distillation_loss(logits, tensor([0]), teacher, temperature=1.0),
                 mutual_loss(logits, other, temperature=1.0)):  # fmt: skip
        assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-12)


@pytest.mark.parametrize(
    ("student", "row"), [(torch.float16, 1e5), (torch.bfloat16, 1e5), (torch.float32, 1e300)]
)
def test_a_teacher_beyond_the_range_of_the_student_is_no_nan(student, row):
    # The teacher is certain and the student undecided: KL is log 2, its slope (-1/2, 1/2) / T.
    dtype = float64 if row > 1e38 else torch.float32
    logits = zeros(1, 2, dtype=student, requires_grad=True)
    teacher = Weighted(tensor([[row, 0.0], [0.0, 0.0]], dtype=dtype), ones(2))
    loss = distillation_loss(logits, tensor([0]), teacher, temperature=2.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2))
    assert logits.grad.tolist() == [[-0.25, 0.25]]


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits: distillation_loss(logits, zeros(0).long(), Weighted(eye(3), ones(3))),
        lambda logits: mutual_loss(logits, zeros(0, 3), temperature=1.0),
    ],
)
def test_an_empty_batch_costs_nothing_and_has_a_gradient_of_zero(loss):
    logits = zeros(0, 3, requires_grad=True)
    loss(logits).backward()
    assert loss(logits).item() == 0
    assert logits.grad.shape == (0, 3)


# The mutual loss.


def test_its_gradient_is_the_difference_of_probabilities(generator):
    """The gradient of KL(p || softmax(z / T)) with respect to z is (softmax(z / T) - p) / T."""
    logits, other = (3 * torch.randn(2, 6, 4, generator=generator, dtype=float64)).unbind()
    found = mutual_loss(logits.requires_grad_(), other.requires_grad_(), temperature=2.0)
    found.backward()
    expected = ((logits / 2).softmax(1) - (other / 2).softmax(1)) / 2 / len(logits)
    torch.testing.assert_close(logits.grad, expected.detach())
    assert other.grad is None
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype), other.to(dtype)
        loss = mutual_loss(*half, temperature=1.0)
        assert loss.dtype == torch.float32
        assert_identical(loss, mutual_loss(*(each.float() for each in half), temperature=1.0))


# The proximal loss.


def model_and_values(generator):
    model = nn.ModuleDict({"shared": nn.Linear(3, 2), "private": nn.Linear(2, 2)}).double()
    values = {
        name: value + torch.randn(value.shape, generator=generator, dtype=float64)
        for name, value in snapshot(model, only=["shared"]).items()
    }
    return model, values


def test_it_is_half_the_squared_distance_with_the_difference_as_gradient(generator):
    model, values = model_and_values(generator)
    model["shared"].bias.requires_grad_(False)
    values = {name: value.requires_grad_() for name, value in values.items()}
    loss = proximal_loss(model, values)
    loss.backward()
    changes = {name: model.get_parameter(name).detach() - value for name, value in values.items()}
    numbers = torch.cat([change.detach().flatten() for change in changes.values()]).tolist()
    assert loss.item() == pytest.approx(sum(each**2 for each in numbers) / 2, rel=1e-12)
    assert_identical(model["shared"].weight.grad, changes["shared.weight"].detach())
    assert model["shared"].bias.grad is model["private"].weight.grad is None
    assert all(value.grad is None for value in values.values())
    assert_identical(proximal_loss(nn.DataParallel(model), values), loss)  # names inside


def test_a_tied_parameter_counts_once():
    model = nn.ModuleDict({"first": nn.Linear(2, 1, bias=False)})
    model["second"] = model["first"]
    values = {f"{name}.weight": model["first"].weight.detach() + 1 for name in model}
    assert proximal_loss(model, values).item() == pytest.approx(1.0)  # (1 + 1) / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype):
    model = nn.Linear(300, 300, bias=False).to(dtype)
    values = {"weight": model.weight.detach().float() + 2}  # 90,000 squares of 4 exceed float16
    loss = proximal_loss(model, values)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(180_000.0, rel=1e-5)


LABELS = [tensor([0, 3]), tensor([-1, 0]), tensor([0]), zeros(2), [0, 1], zeros(2, 1).long()], [
    tensor([2, 0]), tensor([0, 0]).byte()]  # fmt: skip
LOGITS = [None, zeros(3), zeros(2, 3).long(), zeros(2, 3).to_sparse()], [ones(2, 3).bfloat16()]
TEACHERS = [eye(3), Weighted(1, 1), Weighted(zeros(3, 4), ones(3)), Weighted(eye(3), tensor(1.0)),
            Weighted(eye(3), tensor([1.0, -1.0, 1.0])), Weighted(eye(3) * nan, ones(3))], [
    Weighted(eye(3) * nan, zeros(3))]  # fmt: skip
ABOVE_0 = [0, -1.0, nan, math.inf, "1", 1e-320], [1.2e-38]
MEANS = {"values": zeros(2, 3), "labels": tensor([0, 2]), "num_classes": 3}
DISTILLED = {"logits": zeros(2, 3), "labels": tensor([0, 2]), "teacher": Weighted(eye(3), ones(3))}
LINEAR = nn.Linear(2, 1)
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    (class_means, MEANS, {
        "labels": LABELS, "num_classes": (number(1)[0], [3]),
        "values": ([None, zeros(2, 3).long(), tensor(1.0), ones(2, 3) * nan], [
            zeros(2), ones(2, 1, 1)]),
        "keep": ([ones(2), tensor([True]), [True, False]], [None, tensor([False, False])])}),
    (distillation_loss, DISTILLED, {
        "logits": LOGITS, "labels": LABELS, "teacher": TEACHERS, "temperature": ABOVE_0}),
    (mutual_loss, {"logits": zeros(2, 3), "other": zeros(2, 3), "temperature": 1.0}, {
        "logits": LOGITS, "other": ([*LOGITS[0], zeros(1, 3)], LOGITS[1]), "temperature": ABOVE_0}),
    (partial(proximal_loss, values={"bias": zeros(1)}), {}, {
        "module": (["model", nn.Linear], [LINEAR])}),
    (partial(proximal_loss, LINEAR), {}, {"values": (
        [2, {}, {"head.bias": zeros(1)}, {"weight": zeros(2)}, {"bias": 0.0},
         {"bias": tensor([nan])}], [{"bias": zeros(1).double()}])}),
    (partial(proximal_loss, nn.BatchNorm1d(2)), {}, {
        "values": ([{"running_mean": zeros(2)}], [{"bias": zeros(2)}])}),
])  # fmt: skip
