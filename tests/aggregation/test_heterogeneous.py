"""FedHPL's teachers, against Eq. 8 over every correct logit, and the laws that follow from it."""

import time
import weakref

import pytest
import torch

from fedprompt import Weighted, class_means, heterogeneous_means, num_bytes, weighted_mean
from references import fedhpl
from refusals import check_refused, refusals
from same import assert_identical
from tolerance import assert_near

CLASSES = 5


def client(dim, size, seed, *, num_classes=CLASSES, skill=1.5, without=()):
    """Make a client with random logits that favor the label, without samples of some classes."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.tensor([label for label in range(num_classes) if label not in without])
    labels = own[torch.randint(len(own), (size,), generator=generator)]
    logits = torch.randn(size, num_classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(size), labels] += skill
    return fedhpl.Client(dim, logits.tolist(), labels.tolist())


def tensors(one):
    return torch.tensor(one.logits, dtype=torch.float64), torch.tensor(one.labels)


def class_logits(one, num_classes=CLASSES):
    """Return the entry of a FedHPL client: means and counts of its correct logits."""
    logits, labels = tensors(one)
    return class_means(logits, labels, num_classes=num_classes, keep=logits.argmax(1) == labels)


def single_logits(one):
    """Return each correct logit as an entry of weight 1, as the paper also allows."""
    entries = []
    for logits, label in zip(one.logits, one.labels, strict=True):
        if fedhpl.is_correct(logits, label):
            value = torch.full((CLASSES, CLASSES), torch.nan, dtype=torch.float64)
            weight = torch.zeros(CLASSES)
            value[label] = torch.tensor(logits, dtype=torch.float64)
            weight[label] = 1.0
            entries.append(Weighted(value, weight))
    return entries


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
        rows, evidence = fedhpl.teacher(clients, dim, CLASSES, smoothing=smoothing)
        assert_near(value, torch.tensor(rows, dtype=torch.float64))
        assert_near(weight, torch.tensor(evidence), dtype=torch.float32)
        assert weight[4] == 0


@pytest.mark.parametrize(
    ("dim", "other", "expected"),
    [(384, 768, 0.5), (384, 1024, 0.375), (768, 1024, 0.75), (3, 3, 1.0), (1, 2048, 2**-11)],
)
def test_the_similarity_of_two_widths_is_their_ratio(dim, other, expected):
    """Without smoothing and with one example each, the teacher is (v + s v') / (1 + s)."""
    assert fedhpl.similarity(dim, other) == fedhpl.similarity(other, dim) == expected
    one, two = (
        Weighted(torch.tensor([value], dtype=torch.float64), torch.ones(1)) for value in (1.0, 2.0)
    )
    for dims in ((dim, other), (other, dim)):
        teacher = heterogeneous_means([one, two], dims, smoothing=0)[dims[0]]
        if dim == other:
            assert teacher.value.item() == 1.5
        else:
            assert teacher.value.item() == pytest.approx((1 + 2 * expected) / (1 + expected))
            assert teacher.weight.item() == 1 + expected


def test_scaling_every_width_changes_nothing(clients):
    doubled = [one._replace(dim=2 * one.dim) for one in clients]
    for (dim, teacher), (dim_doubled, teacher_doubled) in zip(
        teachers(clients).items(), teachers(doubled).items(), strict=True
    ):
        assert dim_doubled == 2 * dim
        assert_identical(tuple(teacher_doubled), tuple(teacher))


def test_single_logits_and_class_means_make_the_same_teachers(clients):
    every = [(single, one.dim) for one in clients for single in single_logits(one)]
    assert len(every) > 40
    from_singles = heterogeneous_means((single for single, _ in every), (dim for _, dim in every))
    for dim, teacher in teachers(clients).items():
        assert_near(from_singles[dim].value, teacher.value)
        assert_near(from_singles[dim].weight, teacher.weight)


def test_order_and_sharding_of_clients_do_not_matter(clients):
    expected = teachers(clients)
    third = clients[2]
    shards = [
        fedhpl.Client(third.dim, third.logits[part], third.labels[part])
        for part in (slice(0, 7), slice(7, 8), slice(8, None))
    ]
    for variant in (clients[::-1], [*clients[:2], *shards, *clients[3:]]):
        result = teachers(variant)
        for dim in expected:
            assert_near(result[dim].value, expected[dim].value)
            assert_near(result[dim].weight, expected[dim].weight)


def test_a_known_class_is_the_largest_logit_of_its_teacher(clients):
    for value, weight in teachers(clients).values():
        known = torch.nonzero(weight).flatten()
        assert known.tolist() == [0, 1, 2, 3]
        assert value.argmax(1)[known].tolist() == known.tolist()


def test_equal_widths_make_one_teacher_from_plain_sums(clients):
    alike = [one._replace(dim=512) for one in clients]
    ((dim, teacher),) = teachers(alike).items()
    assert dim == 512
    for label in range(CLASSES):
        correct = [
            logits
            for one in alike
            for logits, own in zip(one.logits, one.labels, strict=True)
            if own == label and fedhpl.is_correct(logits, label)
        ]
        expected = torch.tensor(correct, dtype=torch.float64).reshape(-1, CLASSES).sum(0) / (
            1 + len(correct)
        )
        assert_near(teacher.value[label], expected)
        assert teacher.weight[label] == len(correct)


def test_smoothing_shrinks_the_mean_by_n_over_s_plus_n(clients):
    plain = teachers(clients, smoothing=0)
    for smoothing in (0.25, 1.0, 10.0):
        for dim, (value, weight) in teachers(clients, smoothing=smoothing).items():
            shrink = (weight.double() / (smoothing + weight.double()))[:, None]
            assert_near(value, shrink * plain[dim].value)
            assert_identical(weight, plain[dim].weight)


def test_teachers_of_one_width_without_smoothing_are_the_weighted_mean(clients):
    alike = [one._replace(dim=512) for one in clients]
    expected = weighted_mean(class_logits(one) for one in alike)
    assert_identical(tuple(teachers(alike, smoothing=0)[512]), tuple(expected))


def random_logits(generator, num_classes):
    """Make an entry in which every class is known."""
    counts = torch.randint(1, 90, (num_classes,), generator=generator).float()
    return Weighted(torch.randn(num_classes, num_classes, generator=generator), counts)


@pytest.mark.parametrize(
    ("num_classes", "numbers", "kilo"),
    [(10, 550, 0.537), (100, 50_500, 49.32)],  # 5 clients, K n_c (n_c + 1) numbers, over 1024
)
def test_five_clients_send_the_number_of_values_in_the_paper(num_classes, numbers, kilo, generator):
    sent = sum(num_bytes({"logits": random_logits(generator, num_classes)}) for _ in range(5))
    assert sent == 4 * numbers  # 4 bytes for each float32
    assert numbers / 1024 == pytest.approx(kilo, abs=5e-3 if num_classes == 100 else 5e-4)


@pytest.mark.parametrize(
    ("num_classes", "numbers"), [(10, 110), (100, 10_100)]
)  # Table 9, means and counts
def test_class_means_have_the_size_of_table_9(num_classes, numbers, generator):
    assert num_bytes({"logits": random_logits(generator, num_classes)}) == 4 * numbers


@pytest.mark.parametrize(
    ("num_classes", "per_sample"), [(10, 11), (100, 101)]
)  # Table 9, a row of logits and a label for each sample
def test_single_logits_have_the_size_of_table_9(num_classes, per_sample, generator):
    for samples in (1, 37):
        logits = torch.randn(samples, num_classes, generator=generator)
        message = {"logits": logits, "labels": torch.zeros(samples, dtype=torch.int32)}
        assert num_bytes(message) == 4 * per_sample * samples


def test_uniform_similarity_is_the_ablation_without_equation_7(clients):
    uniform = teachers(clients, similarity=lambda dim, other: 1.0)
    alike = teachers([one._replace(dim=512) for one in clients])[512]
    for dim in (384, 768, 1024):
        assert_near(uniform[dim].value, alike.value)
        assert_identical(uniform[dim].weight, alike.weight)
    assert not torch.allclose(teachers(clients)[384].value, alike.value)


def test_similarity_is_called_with_the_dimension_of_the_teacher_first():
    narrow = Weighted(torch.tensor([[1.0]]), torch.tensor([1.0]))
    wide = Weighted(torch.tensor([[5.0]]), torch.tensor([1.0]))
    up_only = heterogeneous_means(
        [narrow, wide], [2, 8], smoothing=0, similarity=lambda dim, other: float(other >= dim)
    )
    assert up_only[2].value.item() == 3.0  # (1 + 5) / 2: the narrow client learns from both
    assert up_only[8].value.item() == 5.0  # the wide one from itself alone


@pytest.mark.unhooked  # the hook would take longer than the sums
def test_ten_thousand_clients_are_streamed():
    """Three of 10,000 entries exist at a time. A closed form gives the teacher."""
    num_clients, num_classes = 10_000, 100
    base = torch.randn(num_classes, num_classes, generator=torch.Generator().manual_seed(0))
    classes, dims = torch.arange(num_classes), (384, 768, 1024)
    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for number in range(num_clients):
            value = base * (1 + number % 17)
            weight = ((number + classes) % 5).float()
            alive[:] = [reference for reference in alive if reference() is not None]
            alive.append(weakref.ref(value))
            most = max(most, len(alive))
            yield Weighted(value, weight)
            del value, weight

    started = time.process_time()
    result = heterogeneous_means(stream(), (dims[number % 3] for number in range(num_clients)))
    assert time.process_time() - started < 3  # measured: 0.7 to 1.1 s on one core
    assert most <= 3  # the first, whose layout is kept, the last, and the one being made

    for dim in dims:
        for label in (0, 1, 57):
            evidence = [
                (fedhpl.similarity(dim, dims[n % 3]) * ((n + label) % 5), 1 + n % 17)
                for n in range(num_clients)
            ]
            weight = sum(share for share, _ in evidence)
            factor = sum(share * scale for share, scale in evidence) / (1 + weight)
            assert_near(result[dim].value[label], factor * base[label].double())
            assert result[dim].weight[label].item() == pytest.approx(weight, rel=1e-6)


def known(value, weight=1.0):
    return Weighted(torch.tensor([value]), torch.tensor(weight))


ONE = Weighted(torch.ones(2, 3), torch.ones(2))


REFUSED = """
heterogeneous_means([ONE, ONE], [4]) -> ValueError: `dims` must have one latent dimension for
heterogeneous_means([ONE], [4, 5]) -> ValueError: `dims` must have one latent dimension for each
heterogeneous_means([ONE, ONE], [4, 0]) -> ValueError: `dims[1]` must be at least 1; got 0
heterogeneous_means([ONE], [4], smoothing=-0.5) -> ValueError: `smoothing` must be at least 0
heterogeneous_means([ONE], [4], smoothing=torch.nan) \
-> ValueError: `smoothing` must be finite; got nan
heterogeneous_means([ONE], [4], similarity=lambda dim, other: -1.0) \
-> ValueError: `similarity(4, 4)` must be at least 0; got -1.0
heterogeneous_means([ONE], [4], similarity=lambda dim, other: torch.inf) \
-> ValueError: `similarity(4, 4)` must be finite; got inf
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
