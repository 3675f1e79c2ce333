"""Class means and the distillation loss, against loops over samples and classes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import Weighted, class_means, distillation_loss, weighted_mean
from references import fedhpl
from same import assert_identical
from tolerance import assert_near


def samples(generator, size=14, classes=5, *, without=(4,)):
    """Float64 logits that lean towards their labels; no sample of the classes in `without`."""
    own = torch.tensor([label for label in range(classes) if label not in without])
    labels = own[torch.randint(len(own), (size,), generator=generator)]
    logits = torch.randn(size, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(size), labels] += 1.0
    return logits, labels


def teacher_of(generator, classes=5, unknown=()):
    """Random rows; what the teacher does not know is NaN."""
    value = 2 * torch.randn(classes, classes, generator=generator, dtype=torch.float64)
    weight = 1 + torch.rand(classes, generator=generator)
    for label in unknown:
        value[label], weight[label] = torch.nan, 0.0
    return Weighted(value, weight)


# Class means.


def test_class_means_of_correct_logits_against_equation_10(generator):
    logits, labels = samples(generator, size=60)
    correct = logits.argmax(1) == labels
    assert 0 < correct.sum() < 60
    value, weight = class_means(logits, labels, num_classes=5, keep=correct)
    client = fedhpl.Client(1, list(logits), labels.tolist())
    rows = [fedhpl.sent(client, label) for label in range(5)]
    assert weight.tolist() == [len(sent) for sent in rows]
    assert_near(value, torch.stack([sum(sent, 0 * logits[0]) / max(1, len(sent)) for sent in rows]))
    assert weight.dtype == value.dtype


@settings(deadline=None, max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 12),
    classes=st.integers(1, 6),
    event=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_class_means_of_any_shape_against_a_loop(seed, size, classes, event, dtype):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((size, *event), generator=generator, dtype=dtype)
    labels = torch.randint(classes, (size,), generator=generator)
    keep = torch.rand(size, generator=generator) < 0.7
    before = values.clone()
    mean, count = class_means(values, labels, num_classes=classes, keep=keep)
    assert mean.shape == (classes, *event)
    assert mean.dtype == dtype
    for label in range(classes):
        own = [values[index] for index in range(size) if keep[index] and labels[index] == label]
        assert count[label] == len(own)
        total = sum(map(torch.Tensor.double, own), torch.zeros(event, dtype=torch.float64))
        assert_near(mean[label], total / max(1, len(own)))
    assert_identical(values, before)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 9))
def test_means_of_batches_combine_by_weighted_mean(seed, batch):
    logits, labels = samples(torch.Generator().manual_seed(seed), size=23)
    correct = logits.argmax(1) == labels
    whole = class_means(logits, labels, num_classes=5, keep=correct)
    parts = weighted_mean(
        class_means(*part[:2], num_classes=5, keep=part[2])
        for part in zip(logits.split(batch), labels.split(batch), correct.split(batch), strict=True)
    )
    assert_near(parts.value, whole.value)
    assert_identical(parts.weight, whole.weight)


def test_what_is_not_kept_may_hold_anything():
    values = torch.tensor([[1.0], [torch.nan], [torch.inf], [4.0]])
    labels, keep = torch.tensor([0, 0, 1, 0]), torch.tensor([True, False, False, True])
    mean = class_means(values, labels, num_classes=2, keep=keep)
    assert mean.value.tolist() == [[2.5], [0.0]]  # (1 + 4) / 2
    assert mean.weight.tolist() == [2.0, 0.0]


def test_sums_of_many_half_precision_samples_do_not_overflow():
    # 3,000 samples of 100 sum to 300,000, beyond float16 (65,504).
    values = torch.full((3000, 1), 100.0, dtype=torch.float16)
    mean = class_means(values, torch.zeros(3000, dtype=torch.int64), num_classes=1)
    assert mean.value.item() == 100.0
    assert mean.value.dtype == torch.float16
    assert mean.weight.item() == 3000.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_every_integer_dtype_are_indices_and_never_masks(dtype, generator):
    # With as many samples as classes, labels of dtype uint8 would index as a mask.
    logits, labels = samples(generator, size=5)
    teacher = teacher_of(generator)
    assert_identical(
        tuple(class_means(logits, labels.to(dtype), num_classes=5)),
        tuple(class_means(logits, labels, num_classes=5)),
    )
    assert_identical(
        distillation_loss(logits, labels.to(dtype), teacher),
        distillation_loss(logits, labels, teacher),
    )


# The distillation loss.


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.5, 20.0])
@pytest.mark.parametrize("unknown", [(), (0, 2), (0, 1, 2, 3, 4)])
def test_loss_against_equation_9_and_appendix_c_4(temperature, unknown, generator):
    """The reference takes the sample's logits for unknown classes (App. C.4) instead of a mask."""
    logits, labels = samples(generator)
    teacher = teacher_of(generator, unknown=unknown)
    expected = fedhpl.distillation_loss(
        logits, labels.tolist(), teacher.value, teacher.weight, temperature
    )
    options = {} if temperature == 4.5 else {"temperature": temperature}  # as in the paper
    assert_near(distillation_loss(logits, labels, teacher, **options), expected)


def test_divergence_runs_from_teacher_to_student():
    # By hand: the teacher is (3/4, 1/4) and the student (1/2, 1/2).
    # KL(t || s) = 3/4 log 3/2 + 1/4 log 1/2 = 0.1308, and KL(s || t) = 0.1438.
    teacher = Weighted(
        torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]], dtype=torch.float64), torch.ones(2)
    )
    loss = distillation_loss(
        torch.zeros(1, 2, dtype=torch.float64), torch.tensor([0]), teacher, temperature=1.0
    )
    assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-12)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), temperature=st.floats(0.5, 10))
def test_the_loss_is_never_negative_and_ignores_a_constant_per_row(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits, labels = samples(generator)
    teacher = teacher_of(generator, unknown=(1,))
    loss = distillation_loss(logits, labels, teacher, temperature=temperature)
    assert loss >= 0
    shift = 50 * torch.randn(len(logits), 1, generator=generator, dtype=torch.float64)
    lifted = Weighted(
        teacher.value + 30 * torch.randn(5, 1, generator=generator, dtype=torch.float64),
        teacher.weight,
    )
    assert_near(distillation_loss(logits + shift, labels, lifted, temperature=temperature), loss)


def test_gradient_against_finite_differences(generator):
    logits, labels = samples(generator, size=6)
    teacher = teacher_of(generator, unknown=(1,))
    assert {1} < set(labels.tolist())
    assert torch.autograd.gradcheck(
        lambda logits: distillation_loss(logits, labels, teacher), logits.requires_grad_()
    )


def test_no_gradient_reaches_the_teacher(generator):
    logits, labels = samples(generator)
    value, weight = teacher_of(generator)
    value.requires_grad_()
    weight.requires_grad_()
    distillation_loss(logits.requires_grad_(), labels, Weighted(value, weight)).backward()
    assert value.grad is None
    assert weight.grad is None
    assert logits.grad.abs().max() > 0


def gradients(loss, logits):
    (gradient,) = torch.autograd.grad(loss, logits)
    return gradient


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e300])
def test_a_class_without_evidence_adds_no_loss_and_no_gradient(garbage, generator):
    """Samples of unknown classes have no loss and no gradient, for any row of the teacher."""
    logits, labels = samples(generator)
    logits.requires_grad_()
    teacher = teacher_of(generator, unknown=(0, 2))
    teacher.value[[0, 2]] = garbage
    taught = (labels != 0) & (labels != 2)
    assert 0 < taught.sum() < len(labels)
    distilled = distillation_loss(logits, labels, teacher)
    gradient = gradients(F.cross_entropy(logits, labels) + distilled, logits)
    alone = gradients(F.cross_entropy(logits, labels), logits)
    assert_identical(gradient[~taught], alone[~taught])
    assert bool((gradient[taught] != alone[taught]).any(1).all())
    # Taught samples count as in a batch of their own, divided by the whole batch.
    own = distillation_loss(logits[taught], labels[taught], teacher)
    assert_near(distilled.detach(), (own * taught.sum() / len(labels)).detach())


def test_half_precision_students_learn_from_float32_teachers(generator):
    logits, labels = samples(generator)
    teacher = teacher_of(generator, unknown=(1,))
    loss = distillation_loss(
        logits.bfloat16(), labels, Weighted(teacher.value.float(), teacher.weight)
    )
    assert loss.dtype == torch.float32
    assert_near(loss, distillation_loss(logits, labels, teacher), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("student", "row"), [(torch.float16, 1e5), (torch.bfloat16, 1e5), (torch.float32, 1e300)]
)
def test_a_teacher_beyond_the_range_of_the_student_is_no_nan(student, row):
    # The teacher is certain and the student undecided: KL is log 2, its slope (-1/2, 1/2) / T.
    dtype = torch.float64 if row > 1e38 else torch.float32
    logits = torch.zeros(1, 2, dtype=student, requires_grad=True)
    teacher = Weighted(torch.tensor([[row, 0.0], [0.0, 0.0]], dtype=dtype), torch.ones(2))
    loss = distillation_loss(logits, torch.tensor([0]), teacher, temperature=2.0)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2))
    assert logits.grad.tolist() == [[-0.25, 0.25]]


def test_an_empty_batch_costs_nothing_and_has_a_gradient_of_zero():
    logits = torch.zeros(0, 3, requires_grad=True)
    loss = distillation_loss(
        logits, torch.zeros(0, dtype=torch.int64), Weighted(torch.eye(3), torch.ones(3))
    )
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 3)


def test_inputs_are_never_mutated(generator):
    logits, labels = samples(generator)
    teacher = teacher_of(generator, unknown=(1,))
    before = [tensor.clone() for tensor in (logits, labels, *teacher)]
    distillation_loss(logits, labels, teacher)
    class_means(logits, labels, num_classes=5, keep=labels > 0)
    assert_identical([logits, labels, *teacher], before)
