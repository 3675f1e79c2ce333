"""FedHPL's teachers, against Eq. 8 over every correct logit, and the laws that follow from it."""

import pytest
import torch

from fedprompt import Weighted, class_means, heterogeneous_means
from references import fedhpl
from tolerance import assert_near

CLASSES = 5


def client(dim, size, seed, *, num_classes=CLASSES, skill=1.5, without=()):
    """Make a client with random logits that favor the label, without samples of some classes."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.tensor([label for label in range(num_classes) if label not in without])
    labels = own[torch.randint(len(own), (size,), generator=generator)]
    logits = torch.randn(size, num_classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(size), labels] += skill
    return fedhpl.Client(dim, list(logits), labels.tolist())


def tensors(one):
    return torch.stack(one.logits), torch.tensor(one.labels)


def class_logits(one, num_classes=CLASSES):
    """Return the entry of a FedHPL client: means and counts of its correct logits."""
    logits, labels = tensors(one)
    return class_means(logits, labels, num_classes=num_classes, keep=logits.argmax(1) == labels)


@pytest.fixture
def clients():
    """Five clients of three widths. One client has class 3, and none has class 4."""
    return [
        client(384, 11, 0, without=(3, 4)),
        client(768, 25, 1, without=(3, 4)),
        client(768, 40, 2, without=(0, 3, 4)),
        client(1024, 17, 3, without=(4,)),
        client(384, 6, 4, without=(1, 3, 4)),
    ]


def teachers(clients, **options):
    dims = [one.dim for one in clients]
    return heterogeneous_means([class_logits(one) for one in clients], dims, **options)


@pytest.mark.parametrize("smoothing", [0.0, 1.0, 3.5])
def test_teachers_against_equation_8_over_every_correct_logit(clients, smoothing):
    result = teachers(clients, smoothing=smoothing)
    assert set(result) == {384, 768, 1024}
    for dim, (value, weight) in result.items():
        rows, evidence = fedhpl.teacher(clients, dim, CLASSES, fedhpl.Axes(smoothing=smoothing))
        assert_near(value, rows)
        assert_near(weight, evidence, dtype=torch.float32)
        assert weight[4] == 0


@pytest.mark.parametrize(
    ("dim", "other", "expected"),
    [(384, 768, 0.5), (384, 1024, 0.375), (768, 1024, 0.75), (3, 3, 1.0), (1, 2048, 2**-11)],
)
def test_the_similarity_of_two_widths_is_their_ratio(dim, other, expected):
    """Without smoothing and with one example each, the teacher is (v + s v') / (1 + s)."""
    assert fedhpl.similarity(dim, other) == fedhpl.similarity(other, dim) == expected
    one, two = (Weighted(torch.full((1,), n).double(), torch.ones(1)) for n in (1.0, 2.0))
    for dims in ((dim, other), (other, dim)):
        teacher = heterogeneous_means([one, two], dims, smoothing=0)[dims[0]]
        if dim == other:
            assert teacher.value.item() == 1.5
        else:
            assert teacher.value.item() == pytest.approx((1 + 2 * expected) / (1 + expected))
            assert teacher.weight.item() == 1 + expected


def test_similarity_is_called_with_the_dimension_of_the_teacher_first():
    narrow = Weighted(torch.tensor([[1.0]]), torch.tensor([1.0]))
    wide = Weighted(torch.tensor([[5.0]]), torch.tensor([1.0]))
    upwards = lambda dim, other: float(other >= dim)  # noqa: E731
    up_only = heterogeneous_means([narrow, wide], [2, 8], smoothing=0, similarity=upwards)
    assert up_only[2].value.item() == 3.0  # (1 + 5) / 2: the narrow client learns from both
    assert up_only[8].value.item() == 5.0  # the wide one from itself alone
