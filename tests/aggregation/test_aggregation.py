"""Means, FedHPL's teachers, names and server updates: their numbers, against loops, torch's optimisers and calculations by hand."""

import re
import time
import weakref
from copy import deepcopy
from functools import partial
from itertools import islice

import pytest
import torch

from fedprompt import (
    Weighted,
    aggregate_by_name,
    class_means,
    descend,
    ema,
    heterogeneous_means,
    krum,
    multi_krum,
    num_bytes,
    overwrite,
    trimmed_mean,
    update_by_name,
    weighted_mean,
    weighted_median,
)
from fedprompt.aggregation.heterogeneous import dimension_similarity
from references import fedhpl
from same import assert_same
from tolerance import assert_near

CLASSES = 5
assert_identical = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


def client(dim, size, seed, *, num_classes=CLASSES, skill=1.5, without=()):
    """A client of random logits that lean towards the label; it has no sample of the classes in `without`."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.tensor([label for label in range(num_classes) if label not in without])
    labels = own[torch.randint(len(own), (size,), generator=generator)]
    logits = torch.randn(size, num_classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(size), labels] += skill
    return fedhpl.Client(dim, logits.tolist(), labels.tolist())


def tensors(one):
    return torch.tensor(one.logits, dtype=torch.float64), torch.tensor(one.labels)


def upload(one, num_classes=CLASSES):
    """What FedHPL's client sends: means and counts of its correct logits."""
    logits, labels = tensors(one)
    return class_means(logits, labels, num_classes=num_classes, keep=logits.argmax(1) == labels)


def single_logits(one):
    """The other form that the paper allows: every correct logit for itself, as an upload of weight 1."""
    uploads = []
    for logits, label in zip(one.logits, one.labels, strict=True):
        if fedhpl.is_correct(logits, label):
            value, weight = (
                torch.full((CLASSES, CLASSES), torch.nan, dtype=torch.float64),
                torch.zeros(CLASSES),
            )
            value[label], weight[label] = torch.tensor(logits, dtype=torch.float64), 1.0
            uploads.append(Weighted(value, weight))
    return uploads


@pytest.fixture
def clients():
    """Three widths, five sizes; nobody has class 4, and one client alone has class 3."""
    return [
        client(384, 11, 0, without=(3, 4)),
        client(768, 25, 1, without=(3, 4)),
        client(768, 40, 2, without=(0, 3, 4)),
        client(1024, 17, 3, without=(4,)),
        client(384, 6, 4, without=(1, 3, 4)),
    ]


def teachers(clients, **options):
    return heterogeneous_means(
        [upload(one) for one in clients], [one.dim for one in clients], **options
    )


# The weighted mean.


def test_weighted_mean_against_a_loop_over_clients_rows_and_columns(generator):
    values = torch.randn(4, 3, 2, generator=generator)
    weights = torch.randint(0, 50, (4, 3), generator=generator).float()
    weights[:, 1] = torch.tensor([0.0, 3.0, 0.0, 8.0])
    mean = weighted_mean(map(Weighted, values, weights))
    expected, total = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row in range(3):
        total[row] = sum(weights[k, row].item() for k in range(4))
        for column in range(2):
            expected[row, column] = (
                sum(weights[k, row].item() * values[k, row, column].item() for k in range(4))
                / total[row]
            )
    assert_near(mean.value, expected, dtype=torch.float32)
    assert_identical(mean.weight, total.float())  # sums of small integers are exact


def test_parameters_without_an_axis_are_averaged_too():
    # 0.25 * 2 + 0.75 * 6 = 5: a logit scale is a parameter of shape ()
    mean = weighted_mean(
        [
            Weighted(torch.tensor(2.0), torch.tensor(1.0)),
            Weighted(torch.tensor(6.0), torch.tensor(3.0)),
        ]
    )
    assert mean.value.item() == 5.0
    assert mean.weight.item() == 4.0


def test_sums_do_not_drift_over_many_clients():
    # In float32 a running sum of 0.1 over 100,000 clients is off in the third digit; the exact mean is 0.1 itself.
    def stream():
        for _ in range(100_000 // 50):
            yield Weighted(torch.full((50,), 0.1), torch.full((50,), 1000.1))

    mean = weighted_mean(stream())
    assert_identical(mean.value, torch.full((50,), 0.1))
    assert_identical(
        mean.weight,
        torch.full((50,), float(torch.tensor(1000.1)) * 2000, dtype=torch.float64).float(),
    )


# FedHPL, by the names of its laws.


@pytest.mark.parametrize("smoothing", [0.0, 1.0, 3.5])
def test_teachers_against_equation_8_over_every_correct_logit(clients, smoothing):
    result = teachers(clients, smoothing=smoothing)
    assert set(result) == {384, 768, 1024}
    for dim, (value, weight) in result.items():
        rows, evidence = fedhpl.teacher(clients, dim, CLASSES, smoothing=smoothing)
        assert_near(value, torch.tensor(rows, dtype=torch.float64))
        assert_near(weight, torch.tensor(evidence), dtype=torch.float32)
        assert weight[4] == 0


def test_h_a_similarity_of_widths():
    # By hand: 384/768, 384/1024, 768/1024
    assert (
        dimension_similarity(384, 768),
        dimension_similarity(384, 1024),
        dimension_similarity(768, 1024),
    ) == (0.5, 0.375, 0.75)
    widths = [1, 3, 192, 384, 768, 1024, 2048]
    for dim in widths:
        assert dimension_similarity(dim, dim) == 1
        for other in widths:
            assert (
                dimension_similarity(dim, other)
                == dimension_similarity(other, dim)
                == fedhpl.similarity(dim, other)
            )
            assert dimension_similarity(8 * dim, 8 * other) == dimension_similarity(dim, other)
            assert 0 < dimension_similarity(dim, other) <= 1


def test_h_a_scaling_every_width_changes_nothing(clients):
    doubled = [one._replace(dim=2 * one.dim) for one in clients]
    for (dim, teacher), (dim_doubled, teacher_doubled) in zip(
        teachers(clients).items(), teachers(doubled).items(), strict=True
    ):
        assert dim_doubled == 2 * dim
        assert_identical(tuple(teacher_doubled), tuple(teacher))


def test_h_b_single_logits_and_class_means_make_the_same_teachers(clients):
    every = [(single, one.dim) for one in clients for single in single_logits(one)]
    assert len(every) > 40
    from_singles = heterogeneous_means((single for single, _ in every), (dim for _, dim in every))
    for dim, teacher in teachers(clients).items():
        assert_near(from_singles[dim].value, teacher.value)
        assert_near(from_singles[dim].weight, teacher.weight)


def test_h_c_order_and_sharding_of_clients_do_not_matter(clients):
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


def test_h_d_a_known_class_is_the_largest_logit_of_its_teacher(clients):
    for value, weight in teachers(clients).values():
        known = torch.nonzero(weight).flatten()
        assert known.tolist() == [0, 1, 2, 3]
        assert value.argmax(1)[known].tolist() == known.tolist()


def test_h_e_equal_widths_make_one_teacher_from_plain_sums(clients):
    alike = [one._replace(dim=512) for one in clients]
    ((dim, teacher),) = teachers(alike).items()
    assert dim == 512
    for label in range(CLASSES):
        correct = [logits for one in alike for logits, own in zip(one.logits, one.labels, strict=True)
                   if own == label and fedhpl.is_correct(logits, label)]  # fmt: skip
        expected = torch.tensor(correct, dtype=torch.float64).reshape(-1, CLASSES).sum(0) / (
            1 + len(correct)
        )
        assert_near(teacher.value[label], expected)
        assert teacher.weight[label] == len(correct)


def test_h_f_smoothing_shrinks_the_mean_by_n_over_s_plus_n(clients):
    plain = teachers(clients, smoothing=0)
    for smoothing in (0.25, 1.0, 10.0):
        for dim, (value, weight) in teachers(clients, smoothing=smoothing).items():
            shrink = (weight.double() / (smoothing + weight.double()))[:, None]
            assert_near(value, shrink * plain[dim].value)
            assert_identical(weight, plain[dim].weight)


def test_h_f_without_smoothing_and_with_one_width_it_is_the_weighted_mean(clients):
    alike = [one._replace(dim=512) for one in clients]
    expected = weighted_mean(upload(one) for one in alike)
    assert_identical(tuple(teachers(alike, smoothing=0)[512]), tuple(expected))


def random_upload(generator, num_classes):
    """Every class known."""
    counts = torch.randint(1, 90, (num_classes,), generator=generator).float()
    return Weighted(torch.randn(num_classes, num_classes, generator=generator), counts)


@pytest.mark.parametrize(
    ("num_classes", "numbers", "kilo"),
    [
        (10, 550, 0.537),
        (100, 50_500, 49.32),
    ],  # semantics H-j: 5 clients, K n_c (n_c + 1) numbers, over 1024
)
def test_h_j_five_clients_send_as_many_numbers_as_the_paper_says(
    num_classes, numbers, kilo, generator
):
    sent = sum(num_bytes({"logits": random_upload(generator, num_classes)}) for _ in range(5))
    assert sent == 4 * numbers  # 4 bytes for each float32
    assert numbers / 1024 == pytest.approx(kilo, abs=5e-3 if num_classes == 100 else 5e-4)


@pytest.mark.parametrize(
    ("num_classes", "numbers"), [(10, 110), (100, 10_100)]
)  # Table 9: one upload of means and counts
def test_h_j_one_upload_of_means_as_in_table_9(num_classes, numbers, generator):
    assert num_bytes({"logits": random_upload(generator, num_classes)}) == 4 * numbers


@pytest.mark.parametrize(
    ("num_classes", "per_sample"), [(10, 11), (100, 101)]
)  # Table 9: a logit row and a label for each sample
def test_h_j_one_upload_of_all_logits_as_in_table_9(num_classes, per_sample, generator):
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


def test_similarity_is_asked_from_the_side_of_the_learner():
    narrow = Weighted(torch.tensor([[1.0]]), torch.tensor([1.0]))
    wide = Weighted(torch.tensor([[5.0]]), torch.tensor([1.0]))
    up_only = heterogeneous_means(
        [narrow, wide], [2, 8], smoothing=0, similarity=lambda dim, other: float(other >= dim)
    )
    assert up_only[2].value.item() == 3.0  # (1 + 5) / 2: the narrow client learns from both
    assert up_only[8].value.item() == 5.0  # the wide one from itself alone


@pytest.mark.unhooked  # the hook would take longer than the sums
def test_ten_thousand_clients_stream_through_without_being_kept():
    """100 classes x 10,000 uploads, each freed before the next but one is asked for; a closed form gives the teacher."""
    num_clients, num_classes = 10_000, 100
    base = torch.randn(num_classes, num_classes, generator=torch.Generator().manual_seed(0))
    classes, dims = torch.arange(num_classes), (384, 768, 1024)
    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for number in range(num_clients):
            value, weight = base * (1 + number % 17), ((number + classes) % 5).float()
            alive[:] = [reference for reference in alive if reference() is not None] + [
                weakref.ref(value)
            ]
            most = max(most, len(alive))
            yield Weighted(value, weight)
            del value, weight

    started = time.process_time()
    result = heterogeneous_means(stream(), (dims[number % 3] for number in range(num_clients)))
    assert time.process_time() - started < 3  # measured: 0.7 to 1.1 s on one core
    assert most <= 3  # the first (it tells the layout), the last, and the one being made

    for dim in dims:
        for label in (0, 1, 57):
            evidence = [
                (dimension_similarity(dim, dims[n % 3]) * ((n + label) % 5), 1 + n % 17)
                for n in range(num_clients)
            ]
            weight = sum(share for share, _ in evidence)
            factor = sum(share * scale for share, scale in evidence) / (1 + weight)
            assert_near(result[dim].value[label], factor * base[label].double())
            assert result[dim].weight[label].item() == pytest.approx(weight, rel=1e-6)


def test_weighted_mean_does_not_keep_its_uploads_either():
    alive: list[weakref.ref] = []

    def stream():
        for number in range(200):
            value = torch.full((10,), float(number))
            alive.append(weakref.ref(value))
            assert sum(reference() is not None for reference in alive) <= 3
            yield Weighted(value, torch.tensor(1.0 + number))
            del value

    # sum of n (1 + n) over sum of (1 + n), n < 200: 2,666,600 / 20,100 (sum n = 19,900; sum n^2 = 2,646,700)
    assert_near(weighted_mean(stream()).value, torch.full((10,), 2_666_600 / 20_100))


# Names.


def known(value, weight=1.0):
    return Weighted(torch.tensor([value]), torch.tensor(weight))


def constant(number):
    """An aggregator that can be recognised by what it returns."""

    def aggregate(uploads):
        *_, last = uploads
        return last._replace(value=torch.full_like(last.value, number))

    return aggregate


RULES = {"head": 1.0, "head.proj": 2.0, "head.proj.weight": 3.0}
MATCHES = [
    ("head", 1.0),  # the full name
    ("head.bias", 1.0),  # a prefix
    ("head.proj.bias", 2.0),  # the longer prefix
    ("head.proj.weight", 3.0),  # the full name over both prefixes
    ("head.project", 1.0),  # "head.proj" ends inside a word
    ("header.x", 9.0),  # so does "head"
    ("ahead", 9.0),
    ("x.head", 9.0),  # a suffix is no prefix
    ("keys", 9.0),
]


@pytest.mark.parametrize("order", [1, -1])
def test_a_full_name_wins_over_a_longer_prefix_over_a_shorter_over_the_default(order):
    rules = {rule: constant(number) for rule, number in list(RULES.items())[::order]}
    payload = aggregate_by_name(rules, default=constant(9.0))(
        [{name: known(0.0) for name, _ in MATCHES}]
    )
    assert {name: upload.value.item() for name, upload in payload.items()} == dict(MATCHES)


@pytest.mark.parametrize("order", [1, -1])
def test_updates_match_names_as_aggregators_do(order):
    # ema from 0 towards 1 with decay d ends at 1 - d: 1 - d/16 is exact and tells which rule was taken.
    rules = {rule: ema(decay=number / 16) for rule, number in list(RULES.items())[::order]}
    update = update_by_name(rules, default=ema(decay=9 / 16))
    values = {name: torch.zeros(1) for name, _ in MATCHES}
    new, _ = update.step(values, {name: known(1.0) for name in values}, update.init(values))
    assert {name: 16 * (1 - value.item()) for name, value in new.items()} == dict(MATCHES)


def test_a_payload_without_a_name_counts_as_weight_zero_for_it():
    payloads = [
        {"prompts": known(1.0, 2.0), "keys": known(5.0, 1.0)},
        {"prompts": known(4.0, 1.0)},
        {"keys": known(torch.nan, 0.0), "prompts": known(10.0, 1.0), "own": known(8.0, 3.0)},
    ]
    mean = weighted_mean(iter(payloads))
    # prompts: (2 * 1 + 4 + 10) / 4 = 4; keys and own: one client alone
    assert {name: (upload.value.item(), upload.weight.item()) for name, upload in mean.items()} == {
        "prompts": (4.0, 4.0),
        "keys": (5.0, 1.0),
        "own": (8.0, 3.0),
    }


def test_means_of_payloads_are_payloads(generator):
    def upload():
        return Weighted(torch.randn(2, generator=generator), torch.rand((), generator=generator))

    payloads = [{"a": upload(), "b": upload()} for _ in range(5)]
    average = weighted_mean
    edges = average([average(payloads[:2]), average(payloads[2:])])
    for name, upload in average(payloads).items():
        assert_near(edges[name].value, upload.value)
        assert_near(edges[name].weight, upload.weight)


@pytest.mark.unhooked  # the hook keeps the arguments of a call alive
def test_payloads_are_streamed_in_the_memory_of_one_of_them():
    """A hundred payloads of 2 MB: at most two are alive, and the peak is that of their float64 sums."""
    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for client in range(100):
            payload = {
                name: Weighted(torch.full((250_000,), float(client)), torch.tensor(1.0 + client))
                for name in "ab"
            }
            alive[:] = [held for held in alive if held() is not None] + [
                weakref.ref(payload["a"].value)
            ]
            most = max(most, len(alive))
            yield payload
            del payload

    mean = weighted_mean(stream())
    assert most <= 2  # the last one and the one being made
    # sum of n (1 + n) over sum of (1 + n), n < 100: 333,300 / 5,050
    for name in "ab":
        assert_near(mean[name].value, torch.full((250_000,), 333_300 / 5_050))
        assert mean[name].weight.item() == 5_050


def test_order_statistics_hold_every_payload_and_aggregate_name_by_name():
    payloads = [{"a": known(value), "b": known(-2 * value)} for value in (1.0, 2.0, 9.0)]
    payloads.append({"b": known(7.0, 0.0)})
    assert {
        name: entry.value.item() for name, entry in weighted_median(iter(payloads)).items()
    } == {"a": 2.0, "b": -4.0}
    trimmed = trimmed_mean(
        iter(payloads), fraction=0.34
    )  # of three equal weights a third and a little more goes at each end
    assert {name: entry.value.item() for name, entry in trimmed.items()} == {"a": 2.0, "b": -4.0}
    assert {name: entry.weight.item() for name, entry in trimmed.items()} == {"a": 3.0, "b": 3.0}


def test_names_that_no_one_sent_keep_value_and_state():
    update = descend(partial(torch.optim.SGD, lr=0.5, momentum=0.9))
    values = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    state = update.init(values)
    first, state = update.step(values, {"a": known(1.0), "b": known(1.0)}, state)
    second, after = update.step(first, {"b": known(1.0)}, state)
    assert_identical(second["a"], first["a"])
    assert after["a"] is state["a"]
    # b by hand: speed 1, then 0.9 + 1 = 1.9; 2 - 0.5 - 0.95
    assert second["b"].item() == pytest.approx(0.55, rel=1e-6)


def test_the_default_update_takes_the_mean():
    update = overwrite()
    values = {"a": torch.tensor([1.0])}
    assert update.step(values, {"a": known(5.0)}, update.init(values))[0]["a"].item() == 5.0


# Server updates: their numbers. Their laws are in laws/test_server_updates.py.


def test_ema_against_a_loop(generator):
    previous = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    mean = Weighted(
        torch.randn(4, 3, generator=generator, dtype=torch.float64),
        torch.tensor([3.0, 0.0, 0.5, 9.0]),
    )
    new, _ = ema(decay=0.8).step(previous, mean, {})
    for row in range(4):
        for column in range(3):
            old, average = previous[row, column].item(), mean.value[row, column].item()
            expected = old if mean.weight[row] == 0 else 0.8 * old + 0.2 * average
            assert new[row, column].item() == pytest.approx(expected, rel=1e-12)


def test_overwrite_takes_known_rows_as_they_are(generator):
    previous, mean = torch.randn(3, 2, generator=generator), torch.randn(3, 2, generator=generator)
    new, state = overwrite().step(previous, Weighted(mean, torch.tensor([0.01, 0.0, 900.0])), {})
    assert_identical(new, torch.stack([mean[0], previous[1], mean[2]]))
    assert state == {}


@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
        partial(torch.optim.Adagrad, lr=0.1),
    ],
)
def test_descending_with_full_evidence_is_one_uninterrupted_torch_optimizer(
    make_optimizer, generator
):
    parameter = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
    optimizer, update = make_optimizer([parameter]), descend(make_optimizer)
    value = parameter.detach().clone()
    state = update.init(value)
    for _ in range(5):
        parameter.grad = torch.randn(4, 3, generator=generator)
        mean = Weighted(parameter.grad.clone(), torch.rand(4, generator=generator) + 0.1)
        optimizer.step()
        value, state = update.step(value, mean, state)
        assert_identical(value, parameter.detach())


@pytest.mark.parametrize(
    ("max_norm", "factor"), [(None, 1.0), (100.0, 1.0), (5.0, 1.0), (1.0, 0.2)]
)
def test_descending_scales_a_long_gradient_down_to_the_largest_norm(max_norm, factor):
    # The norm of (3, 4) is 5; the third row is unknown, and its NaN must not count.
    gradient = Weighted(torch.tensor([[3.0], [4.0], [torch.nan]]), torch.tensor([1.0, 2.0, 0.0]))
    update = descend(partial(torch.optim.SGD, lr=1.0), max_norm=max_norm)
    guides = torch.ones(3, 1)
    new, _ = update.step(guides, gradient, update.init(guides))
    assert_near(new, torch.tensor([[1 - 3 * factor], [1 - 4 * factor], [1.0]]))


@pytest.mark.parametrize("max_norm", [5.0, 1e20, 3e38])
def test_descending_shortens_a_gradient_whose_norm_overflows(max_norm):
    # The norm of 3e38 and 2e38 is beyond the range of float32 (3.4e38); the direction is (3, 2) / sqrt(13).
    gradient = Weighted(torch.tensor([[3e38], [2e38], [torch.nan]]), torch.tensor([1.0, 2.0, 0.0]))
    update, start = descend(partial(torch.optim.SGD, lr=1.0), max_norm=max_norm), torch.zeros(3, 1)
    new, _ = update.step(start, gradient, update.init(start))
    assert_near(new / max_norm, -torch.tensor([[3.0], [2.0], [0.0]]) / 13**0.5)


@pytest.mark.parametrize(
    ("make_optimizer", "largest", "broken"),
    [
        (partial(torch.optim.Adam, lr=0.1), 3e38, "exp_avg_sq"),
        (partial(torch.optim.Adagrad, lr=0.1), 3e38, "sum"),
        (partial(torch.optim.SGD, lr=10.0), 3e38, "value"),
    ],
)
def test_a_step_that_would_overflow_is_refused_and_the_round_can_be_repeated(
    make_optimizer, largest, broken, generator
):
    update, start = descend(make_optimizer), torch.randn(3, 2, generator=generator)
    good = Weighted(torch.randn(3, 2, generator=generator), torch.tensor([1.0, 1.0, 0.0]))
    value, state = update.step(start, good, update.init(start))
    before = deepcopy((value, state))
    hostile = Weighted(torch.full((3, 2), largest), good.weight)
    message = f"`mean` must keep the value and the optimizer's state finite; got entries up to 3e+38, which overflow ['{broken}']."
    with pytest.raises(ValueError, match=re.escape(message)):
        update.step(value, hostile, state)
    assert_same((value, state), before)
    assert_same(update.step(value, good, state), update.step(*before[:1], good, before[1]))


# Bad input: the error names the argument, the rule and what was got, and nothing has changed.

ONE = Weighted(torch.ones(2, 3), torch.ones(2))
BAD_UPLOADS = {
    "empty": ([], ValueError, r"`entries` must hold at least one entr.*; got none"),
    "no upload": (
        [ONE, None],
        TypeError,
        r"`entries\[1\]` must be a Weighted\(value, weight\); got None \(NoneType\)",
    ),
    "a plain tensor": (
        [torch.ones(2)],
        TypeError,
        r"`entries\[0\]` must be a Weighted.*got a float32 tensor of shape \(2,\)",
    ),
    "a plain tuple": (
        [(torch.ones(2), torch.ones(2))],
        TypeError,
        r"`entries\[0\]` must be a Weighted",
    ),
    "another shape": (
        [ONE, Weighted(torch.ones(2, 4), torch.ones(2))],
        ValueError,
        r"`entries\[1\]\.value` must have the shape of the first entry \(2, 3\); got \(2, 4\)",
    ),
    "another number of classes": (
        [ONE, Weighted(torch.ones(3, 3), torch.ones(3))],
        ValueError,
        r"`entries\[1\]\.value` must have the shape of the first entry \(2, 3\); got \(3, 3\)",
    ),
    "rows against a whole": (
        [ONE, Weighted(torch.ones(2, 3), torch.tensor(1.0))],
        ValueError,
        r"`entries\[1\]\.weight` must have the shape of the first entry \(2,\); got \(\)",
    ),
    "weights of other rows": (
        [Weighted(torch.ones(2, 3), torch.ones(3))],
        ValueError,
        r"`entries\[0\]\.weight` must have the leading shape of `value` \(2, 3\); got \(3,\)",
    ),
    "more axes of weight": (
        [Weighted(torch.ones(2), torch.ones(2, 1))],
        ValueError,
        r"`entries\[0\]\.weight` must have the leading shape of `value` \(2,\); got \(2, 1\)",
    ),
    "another dtype": (
        [ONE, Weighted(torch.ones(2, 3).double(), torch.ones(2))],
        TypeError,
        r"`entries\[1\]\.value` must have the dtype of the first entry torch\.float32; got torch\.float64",
    ),
    "another dtype of weight": (
        [ONE, Weighted(torch.ones(2, 3), torch.ones(2).double())],
        TypeError,
        r"`entries\[1\]\.weight` must have the dtype of the first entry torch\.float32; got torch\.float64",
    ),
    "integers": (
        [Weighted(torch.ones(2, 3).long(), torch.ones(2))],
        TypeError,
        r"`entries\[0\]\.value` must be a floating-point tensor; got a int64 tensor",
    ),
    "counts as integers": (
        [Weighted(torch.ones(2, 3), torch.ones(2).long())],
        TypeError,
        r"`entries\[0\]\.weight` must be a floating-point tensor; got a int64 tensor of shape \(2,\)",
    ),
    "weights as a list": (
        [Weighted(torch.ones(2), [1.0, 1.0])],
        TypeError,
        r"`entries\[0\]\.weight` must be a floating-point tensor; got \[1",
    ),
    "a negative weight": (
        [ONE, Weighted(torch.ones(2, 3), torch.tensor([1.0, -2.0]))],
        ValueError,
        r"`entries\[1\]\.weight` must be finite and at least 0; got -2\.0",
    ),
    "a negative weight of value 0": (
        [Weighted(torch.zeros(2, 3), torch.tensor([1.0, -2.0]))],
        ValueError,
        r"`entries\[0\]\.weight` must be finite and at least 0; got -2\.0",
    ),
    "a NaN weight": (
        [Weighted(torch.ones(2, 3), torch.tensor([torch.nan, 1.0]))],
        ValueError,
        r"`entries\[0\]\.weight` must be finite and at least 0; got nan",
    ),
    "an infinite weight": (
        [Weighted(torch.ones(2, 3), torch.tensor([1.0, torch.inf]))],
        ValueError,
        r"`entries\[0\]\.weight` must be finite and at least 0; got inf",
    ),
    "NaN in a known row": (
        [
            ONE,
            Weighted(
                torch.tensor([[torch.nan] * 3, [1.0, torch.nan, 1.0]]), torch.tensor([0.0, 2.0])
            ),
        ],
        ValueError,
        r"`entries\[1\]\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[1\]",
    ),
    "infinity in a known row": (
        [Weighted(torch.tensor([[1.0] * 3, [-torch.inf] * 3]), torch.ones(2))],
        ValueError,
        r"`entries\[0\]\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[1\]",
    ),
    "infinities that cancel": (
        [Weighted(torch.tensor([[torch.inf] * 3, [-torch.inf] * 3]), torch.ones(2))],
        ValueError,
        r"`entries\[0\]\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[0, 1\]",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("uploads", "error", "message"), BAD_UPLOADS.values(), ids=BAD_UPLOADS)
def test_bad_uploads_are_refused_by_name(uploads, error, message):
    with pytest.raises(error, match=message):
        weighted_mean(uploads)
    with pytest.raises(error, match=message):
        heterogeneous_means(uploads, [4] * len(uploads))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (
            ([ONE, ONE], [4]),
            {},
            ValueError,
            r"`dims` must hold one latent dimension for each entry; got fewer than entries",
        ),
        (
            ([ONE], [4, 5]),
            {},
            ValueError,
            r"`dims` must hold one latent dimension for each entry; got more than entries",
        ),
        (([ONE], [4.0]), {}, TypeError, r"`dims\[0\]` must be an integer; got 4\.0 \(float\)"),
        (([ONE], [True]), {}, TypeError, r"`dims\[0\]` must be an integer; got True \(bool\)"),
        (([ONE, ONE], [4, 0]), {}, ValueError, r"`dims\[1\]` must be at least 1; got 0"),
        (
            ([ONE], [4]),
            {"smoothing": -0.5},
            ValueError,
            r"`smoothing` must be at least 0; got -0\.5",
        ),
        (
            ([ONE], [4]),
            {"smoothing": torch.nan},
            ValueError,
            r"`smoothing` must be finite; got nan",
        ),
        (
            ([ONE], [4]),
            {"smoothing": "1"},
            TypeError,
            r"`smoothing` must be a number; got '1' \(str\)",
        ),
        (
            ([ONE], [4]),
            {"similarity": lambda dim, other: -1.0},
            ValueError,
            r"`similarity\(4, 4\)` must be at least 0; got -1\.0",
        ),
        (
            ([ONE], [4]),
            {"similarity": lambda dim, other: torch.inf},
            ValueError,
            r"`similarity\(4, 4\)` must be finite; got inf",
        ),
        (
            ([ONE], [4]),
            {"similarity": lambda dim, other: None},
            TypeError,
            r"`similarity\(4, 4\)` must be a number; got None",
        ),
    ],
)
def test_bad_options_of_heterogeneous_means_are_refused_by_name(arguments, options, error, message):
    with pytest.raises(error, match=message):
        heterogeneous_means(*arguments, **options)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("dims", "error", "message"),
    [
        ((0, 4), ValueError, r"`dim` must be at least 1; got 0"),
        ((4, -1), ValueError, r"`other` must be at least 1; got -1"),
        ((4.0, 4), TypeError, r"`dim` must be an integer; got 4\.0"),
        ((4, "4"), TypeError, r"`other` must be an integer; got '4'"),
    ],
)
def test_bad_widths_are_refused_by_name(dims, error, message):
    with pytest.raises(error, match=message):
        dimension_similarity(*dims)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("rules", "payloads", "error", "message"),
    [
        ({}, [], ValueError, r"`payloads` must hold at least one payload; got none"),
        (
            {},
            [{"a": ONE}, ONE],
            TypeError,
            r"`payloads\[1\]` must map names to Weighted; got an entry without a name",
        ),
        (
            {},
            [{"keys": ONE}, {"keys": torch.ones(2)}],
            TypeError,
            r"'keys': `entries\[1\]` must be a Weighted",
        ),
        (
            {},
            [{"head.b": ONE._replace(weight=-torch.ones(2))}],
            ValueError,
            r"'head\.b': `entries\[0\]\.weight` must be finite and at least 0",
        ),
        (
            {"hea": constant(1)},
            [{"head": ONE}],
            ValueError,
            r"`rules` must each match a name or a dotted prefix of \['head'\]; got \['hea'\]",
        ),
        (
            {"head.": constant(1)},
            [{"head.x": ONE}],
            ValueError,
            r"`rules` must each match.*got \['head\.'\]",
        ),
        ({"": constant(1)}, [{"head.x": ONE}], ValueError, r"`rules` must each match.*got \[''\]"),
        (
            {"head.x": constant(1)},
            [{"head": ONE}],
            ValueError,
            r"`rules` must each match.*got \['head\.x'\]",
        ),
    ],
)
def test_bad_payloads_and_rules_are_refused_by_name(rules, payloads, error, message):
    with pytest.raises(error, match=message):
        aggregate_by_name(rules)(payloads)


@pytest.mark.unhooked  # the hook would refuse the types before the library does
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("lift", "arguments", "message"),
    [
        (
            aggregate_by_name,
            {"rules": {"a": 3}},
            r"`rules\['a'\]` must be a function of entries; got 3 \(int\)",
        ),
        (
            aggregate_by_name,
            {"rules": 3},
            r"`rules` must be a mapping from names, each to a function of entries; got int",
        ),
        (
            aggregate_by_name,
            {"rules": {}, "default": 3},
            r"`default` must be a function of entries; got 3 \(int\)",
        ),
        (
            update_by_name,
            {"rules": {"a": 3}},
            r"`rules\['a'\]` must be a server update; got 3 \(int\)",
        ),
        (
            update_by_name,
            {"rules": {"a": weighted_mean}},
            r"`rules\['a'\]` must be a server update; got <function weighted_mean",
        ),
        (
            update_by_name,
            {"rules": [overwrite()]},
            r"`rules` must be a mapping from names, each to a server update; got list",
        ),
        (
            update_by_name,
            {"rules": {}, "default": overwrite},
            r"`default` must be a server update; got <function overwrite",
        ),
    ],
)
def test_wrong_rules_are_refused_where_they_are_given(lift, arguments, message):
    with pytest.raises(TypeError, match=message):
        lift(**arguments)


PREVIOUS = torch.zeros(2, 3)
BAD_MEANS = {
    "no upload": (
        PREVIOUS,
        torch.ones(2, 3),
        TypeError,
        r"`mean` must be a Weighted\(value, weight\); got a float32 tensor of shape \(2, 3\)",
    ),
    "another shape": (
        PREVIOUS,
        Weighted(torch.ones(2, 4), torch.ones(2)),
        ValueError,
        r"`mean\.value` must have the shape of `previous` \(2, 3\); got \(2, 4\)",
    ),
    "a shape that would broadcast": (
        PREVIOUS,
        Weighted(torch.ones(2, 1), torch.ones(2)),
        ValueError,
        r"`mean\.value` must have the shape of `previous` \(2, 3\); got \(2, 1\)",
    ),
    "a negative weight": (
        PREVIOUS,
        ONE._replace(weight=-torch.ones(2)),
        ValueError,
        r"`mean\.weight` must be finite and at least 0; got -1\.0",
    ),
    "NaN in a known row": (
        PREVIOUS,
        ONE._replace(value=torch.full((2, 3), torch.nan)),
        ValueError,
        r"`mean\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[0, 1\]",
    ),
    "integers before": (
        PREVIOUS.long(),
        ONE,
        TypeError,
        r"`previous` must be a floating-point tensor; got a int64 tensor of shape \(2, 3\)",
    ),
    "a list before": (
        [0.0],
        ONE,
        TypeError,
        r"`previous` must be a floating-point tensor; got \[0\.0\] \(list\)",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "update", [overwrite(), ema(decay=0.5), descend(partial(torch.optim.SGD, lr=0.1, momentum=0.9))]
)
@pytest.mark.parametrize(
    ("previous", "mean", "error", "message"), BAD_MEANS.values(), ids=BAD_MEANS
)
def test_bad_means_are_refused_by_name_and_change_nothing(update, previous, mean, error, message):
    state = update.init(PREVIOUS)
    _, state = update.step(PREVIOUS, ONE, state)
    before = str(state)
    with pytest.raises(error, match=message):
        update.step(previous, mean, state)
    assert str(state) == before
    assert_identical(PREVIOUS, torch.zeros(2, 3))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ema(decay=-0.1), ValueError, r"`decay` must be at least 0; got -0\.1"),
        (lambda: ema(decay=1.1), ValueError, r"`decay` must be at most 1; got 1\.1"),
        (lambda: ema(decay=torch.nan), ValueError, r"`decay` must be finite; got nan"),
        (lambda: ema(decay="0.5"), TypeError, r"`decay` must be a number; got '0\.5' \(str\)"),
        (
            lambda: descend(torch.optim.SGD, max_norm=0),
            ValueError,
            r"`max_norm` must be above 0; got 0",
        ),
        (
            lambda: descend(torch.optim.SGD, max_norm=True),
            TypeError,
            r"`max_norm` must be a number; got True \(bool\)",
        ),
    ],
)
def test_bad_options_of_server_updates_are_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.unhooked  # the hook would refuse the types before the library does
@pytest.mark.bad_input
def test_entries_payloads_and_what_is_neither_are_told_apart():
    payload = {"head": ONE}
    for aggregate in (weighted_mean, weighted_median, partial(trimmed_mean, fraction=0.1)):
        for alone in (payload, ONE):
            with pytest.raises(
                TypeError,
                match=r"`entries` must be an iterable of entries or of payloads; got one (dict|Weighted)",
            ):
                aggregate(alone)
        with pytest.raises(
            TypeError,
            match=r"`payloads\[1\]` must map names to Weighted; got an entry without a name",
        ):
            aggregate([payload, ONE])
        with pytest.raises(
            TypeError,
            match=r"`entries\[1\]` must be a Weighted.*, as the first one; got a whole payload",
        ):
            aggregate([ONE, payload])
        with pytest.raises(
            TypeError,
            match=r"`payloads\[0\]\['head'\]` must be a Weighted\(value, weight\); got a float32 tensor",
        ):
            aggregate([{"head": torch.ones(2)}])
    with pytest.raises(
        TypeError,
        match=r"`entries\[0\]` must be one Weighted, the class logits; got a whole payload",
    ):
        heterogeneous_means([payload], [4])


@pytest.mark.unhooked
@pytest.mark.bad_input
def test_krum_refuses_entries_at_the_first_one():
    asked = []

    def stream():
        for number in range(5):
            asked.append(number)
            yield ONE

    for select in (
        partial(krum, num_byzantine=0),
        partial(multi_krum, num_byzantine=0, num_selected=1),
    ):
        with pytest.raises(
            TypeError,
            match=r"`payloads\[0\]` must map names to Weighted, since distances.*; got an entry",
        ):
            select(stream())
        with pytest.raises(
            TypeError, match=r"`payloads` must be an iterable of payloads; got one dict"
        ):
            select({"head": ONE})
    assert asked == [0, 0]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "update", [overwrite(), ema(decay=0.5), descend(partial(torch.optim.SGD, lr=0.1))]
)
def test_bad_means_of_values_are_refused_by_name(update):
    values = {"head": torch.zeros(1), "keys": torch.zeros(1)}
    state = update.init(values)
    with pytest.raises(
        ValueError, match=r"'keys': `mean\.weight` must be finite and at least 0; got -1\.0"
    ):
        update.step(values, {"head": known(1.0), "keys": known(1.0, -1.0)}, state)
    with pytest.raises(
        ValueError,
        match=r"`mean` must have no other names than `previous` \['head', 'keys'\]; got \['header'\]",
    ):
        update.step(values, {"header": known(1.0)}, state)


@pytest.mark.unhooked
@pytest.mark.bad_input
def test_a_mean_of_the_other_form_is_refused():
    values = {"head": torch.zeros(1)}
    for update in (
        overwrite(),
        ema(decay=0.5),
        descend(partial(torch.optim.SGD, lr=0.1)),
        update_by_name({}),
    ):
        with pytest.raises(
            TypeError, match=r"`mean` must map names to Weighted; got an entry without a name"
        ):
            update.step(values, known(1.0), update.init(values))
    with pytest.raises(TypeError, match=r"`mean` must be a Weighted\(value, weight\); got .*dict"):
        overwrite().step(torch.zeros(1), {"head": known(1.0)}, {})
    with pytest.raises(
        TypeError, match=r"`previous` must map names to tensors; got a float32 tensor"
    ):
        update_by_name({}).init(torch.zeros(1))


@pytest.mark.bad_input
def test_bad_input_of_a_lifted_update_is_refused_by_name_and_changes_nothing():
    values = {"head": torch.zeros(1), "keys": torch.zeros(1)}
    update = update_by_name({"keys": ema(decay=0.5)})
    state = update.init(values)
    with pytest.raises(
        ValueError,
        match=r"`mean` must have no other names than `previous` \['head', 'keys'\]; got \['header'\]",
    ):
        update.step(values, {"head": known(1.0), "header": known(1.0)}, state)
    with pytest.raises(
        ValueError, match=r"'keys': `mean\.weight` must be finite and at least 0; got -1\.0"
    ):
        update.step(values, {"head": known(1.0), "keys": known(1.0, -1.0)}, state)
    with pytest.raises(TypeError, match=r"'head': `mean` must be a Weighted"):
        update.step(values, {"head": torch.ones(1)}, state)
    with pytest.raises(
        ValueError,
        match=r"`state` must come from `init` or the last `step`; got nothing for \['keys'\]",
    ):
        update.step(values, {"keys": known(1.0)}, {"head": {}})
    with pytest.raises(
        ValueError,
        match=r"`rules` must each match a name or a dotted prefix of \['head', 'keys'\]; got \['key'\]",
    ):
        update_by_name({"key": overwrite()}).init(values)
    assert {name: value.item() for name, value in values.items()} == {"head": 0.0, "keys": 0.0}
    assert state == {"head": {}, "keys": {}}


@pytest.mark.bad_input
def test_a_refused_upload_in_the_middle_of_a_stream_stops_it():
    asked = []

    def stream():
        for number in range(5):
            asked.append(number)
            yield ONE if number != 2 else ONE._replace(weight=torch.full((2,), torch.nan))

    with pytest.raises(ValueError, match=r"`entries\[2\]\.weight`"):
        weighted_mean(islice(stream(), 5))
    assert asked == [0, 1, 2]


@pytest.mark.bad_input
def test_an_error_among_the_payloads_that_have_a_name_says_what_its_position_counts():
    """The broken entry is that of the third client, but the second one of its name."""
    good, broken = (
        Weighted(torch.tensor([value]), torch.tensor(1.0)) for value in (1.0, torch.nan)
    )
    negative = good._replace(weight=torch.tensor(-1.0))
    for aggregate in (
        weighted_mean,
        partial(krum, num_byzantine=0),
        partial(trimmed_mean, fraction=0),
        weighted_median,
    ):
        sent = [
            {"head": good, "keys": good},
            {"head": good, "keys": good},
            {"head": good, "keys": negative},
        ]
        with pytest.raises(
            ValueError,
            match=r"^`payloads\[2\]\['keys'\]\.weight` must be finite and at least 0; got -1",
        ):
            aggregate(sent)
    with pytest.raises(ValueError, match=r"^`payloads\[2\]\['head'\]\.value` must be finite"):
        weighted_mean([{"head": good}, {"other": good}, {"head": broken}])
    by_name = aggregate_by_name({})
    with pytest.raises(
        ValueError, match=r"'head' \(counting the 2 payloads of 3 that have it\): `entries\[1\]"
    ):
        by_name([{"head": good}, {"other": good}, {"head": broken}])
    with pytest.raises(ValueError, match=r"^'head': `entries\[1\]"):
        by_name([{"head": good}, {"head": broken}])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_claims_that_no_number_can_hold_together_stop_at_the_largest(dtype):
    """Two clients who claim all the weight there is must not end the run of the others."""
    most = torch.finfo(dtype).max
    mean = weighted_mean(
        [Weighted(torch.tensor([value]), torch.tensor(most, dtype=dtype)) for value in (1.0, 3.0)]
    )
    assert mean.weight == most
    if dtype != torch.float64:  # whose sums are themselves out of range
        assert mean.value.item() == 2.0
