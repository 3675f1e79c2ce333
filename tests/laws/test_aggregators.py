"""Laws that every aggregator obeys, and wrong aggregators that the laws reject."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, tee
from operator import attrgetter
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fedprompt as fp
from fedprompt import Weighted, heterogeneous_means, weighted_mean
from fedprompt.robust import aggregate_by_name, trimmed_mean, weighted_median
from generated import examples
from known import known
from references.fedhpl import similarity as dimension_similarity
from same import assert_identical
from tolerance import assert_near

TARGET = 6
"""Latent dimension of the teacher that `at_dimension` returns."""

DIMS = (2, 6, 9)


class Sent(Weighted):
    """An entry with the width of its client's features, which only the FedHPL adapter reads."""

    dim: int = TARGET

    @classmethod
    def by(cls, dim: int, value: Tensor, weight: Tensor) -> "Sent":
        entry = cls(value, weight)
        entry.dim = dim
        return entry

    def but(self, value: Tensor | None = None, weight: Tensor | None = None) -> "Sent":
        """Return an entry of the same client with another value or weight."""
        return Sent.by(
            self.dim,
            self.value if value is None else value,
            self.weight if weight is None else weight,
        )


class Implementation(NamedTuple):
    """Aggregator, with the properties that the laws need.

    Attributes:
        aggregate: Function of the entries of a round.
        evidence: Function from one entry to its part of the total weight.
        prior: Weight of the entry of value 0 that the aggregator adds in every row.
        merges: Whether a mean of means is a mean.
    """

    aggregate: Callable[[Iterable[Sent]], Weighted]
    evidence: Callable[[Sent], Tensor] = attrgetter("weight")
    prior: float = 0.0
    merges: bool = False


def at_dimension(entries: Iterable[Sent], *, smoothing: float) -> Weighted:
    """Make an aggregator of the teacher for one dimension, from `heterogeneous_means`."""
    seen = iter(entries)
    first = next(seen)
    asked = first.but(torch.full_like(first.value, torch.nan), torch.zeros_like(first.weight))
    sent, dims = tee(chain([first], seen))
    return heterogeneous_means(
        chain([asked], sent), chain([TARGET], (entry.dim for entry in dims)), smoothing=smoothing
    )[TARGET]


def similar_evidence(entry: Sent) -> Tensor:
    return dimension_similarity(TARGET, entry.dim) * entry.weight


def of_payloads(
    aggregate: Callable[[Iterable[Mapping[str, Weighted]]], dict[str, Weighted]],
) -> Callable[[Iterable[Sent]], Weighted]:
    """Apply an aggregator of payloads to entries. A second name has other values."""

    def of_entries(entries: Iterable[Sent]) -> Weighted:
        mean = aggregate(
            {"other": entry.but(3 * entry.value + 1), "logits": entry} for entry in entries
        )
        assert list(mean) == ["other", "logits"]
        return mean["logits"]

    return of_entries


# Every public function of entries: its name, then its configuration. Add new ones here.
AGGREGATORS = {
    "weighted_mean": Implementation(weighted_mean, merges=True),
    "heterogeneous_means smoothing=0": Implementation(
        partial(at_dimension, smoothing=0.0), similar_evidence, merges=True
    ),
    "heterogeneous_means smoothing=1": Implementation(
        partial(at_dimension, smoothing=1.0), similar_evidence, prior=1.0
    ),
    "weighted_median": Implementation(weighted_median),
    "trimmed_mean fraction=0": Implementation(partial(trimmed_mean, fraction=0), merges=True),
    "trimmed_mean fraction=0.2": Implementation(partial(trimmed_mean, fraction=0.2)),
    "trimmed_mean fraction=0.45": Implementation(partial(trimmed_mean, fraction=0.45)),
    "heterogeneous_means smoothing=20.5": Implementation(
        partial(at_dimension, smoothing=20.5), similar_evidence, prior=20.5
    ),
    "weighted_mean of payloads": Implementation(of_payloads(weighted_mean), merges=True),
    "weighted_median of payloads": Implementation(of_payloads(weighted_median)),
    "trimmed_mean of payloads": Implementation(of_payloads(partial(trimmed_mean, fraction=0.2))),
    "weighted_mean by name": Implementation(
        of_payloads(aggregate_by_name({"other": weighted_median})), merges=True
    ),
}


def test_every_public_aggregator_is_in_the_table():
    over_entries = {
        name
        for module in (fp, fp.aggregation, fp.robust)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if next(iter(inspect.signature(function).parameters), None) == "entries"
    }
    assert over_entries == {label.split()[0] for label in AGGREGATORS}


# Each law takes an implementation and the entries of a round, and raises an AssertionError if it
# does not hold.


def order_does_not_matter(implementation: Implementation, entries: list[Sent]) -> None:
    expected = implementation.aggregate(entries)
    for order in (entries[::-1], entries[1:] + entries[:1]):
        for actual, tensor in zip(implementation.aggregate(order), expected, strict=True):
            assert_near(actual, tensor)


def weight_zero_changes_nothing(implementation: Implementation, entries: list[Sent]) -> None:
    expected = implementation.aggregate(entries)
    for garbage in (torch.nan, torch.inf, 7.0):
        nothing = entries[0].but(
            torch.full_like(entries[0].value, garbage), torch.zeros_like(entries[0].weight)
        )
        for position in {0, len(entries) // 2, len(entries)}:
            assert_identical(
                implementation.aggregate([*entries[:position], nothing, *entries[position:]]),
                expected,
            )


def a_single_entry_is_unchanged(implementation: Implementation, entries: list[Sent]) -> None:
    """One entry is its own mean, exactly in less than float64. Rules with a prior are excepted."""
    for entry in entries if implementation.prior == 0 else ():
        rows = known(entry)
        actual, expected = implementation.aggregate([entry]).value[rows], entry.value[rows]
        (assert_near if entry.value.dtype == torch.float64 else assert_identical)(actual, expected)


def stays_between_minimum_and_maximum(implementation: Implementation, entries: list[Sent]) -> None:
    value, weight = implementation.aggregate(entries)
    prior = [torch.zeros_like(value)] if implementation.prior else []

    def seen(missing: float) -> Tensor:
        return torch.stack(
            [torch.where(known(each), each.value, missing) for each in entries] + prior
        )

    lowest, highest = seen(torch.inf).amin(0), seen(-torch.inf).amax(0)
    rows = known(Weighted(value, weight))
    slack = 8 * torch.finfo(value.dtype).eps * value.abs().clamp(min=1)
    assert bool((lowest - slack <= value)[rows].all())
    assert bool((value <= highest + slack)[rows].all())


def splitting_a_client_changes_nothing(implementation: Implementation, entries: list[Sent]) -> None:
    """Only the total weight matters, not the number of entries."""
    expected = implementation.aggregate(entries)
    for position, entry in enumerate(entries):
        shards = [entry.but(weight=entry.weight / 4), entry.but(weight=entry.weight * 3 / 4)]
        for actual, tensor in zip(
            implementation.aggregate([*entries[:position], *shards, *entries[position + 1 :]]),
            expected,
            strict=True,
        ):
            assert_near(actual, tensor)


def means_of_means_are_means(implementation: Implementation, entries: list[Sent]) -> None:
    """If `merges`, a mean of means is a mean, as on edge servers."""
    expected = implementation.aggregate(entries)
    for cut in range(1, len(entries)) if implementation.merges else ():
        edges = [
            Sent.by(TARGET, *implementation.aggregate(part))
            for part in (entries[:cut], entries[cut:])
        ]
        for actual, tensor in zip(implementation.aggregate(edges), expected, strict=True):
            assert_near(actual, tensor)


def weight_is_the_total_evidence(implementation: Implementation, entries: list[Sent]) -> None:
    total = sum(implementation.evidence(entry).double() for entry in entries)
    assert_near(implementation.aggregate(entries).weight, total)


def unknown_rows_are_zero(implementation: Implementation, entries: list[Sent]) -> None:
    value, weight = implementation.aggregate(entries)
    unknown = ~torch.stack([entry.weight > 0 for entry in entries]).any(0)
    assert torch.equal(weight == 0, unknown)
    assert torch.equal(value[unknown], torch.zeros_like(value[unknown]))


def dtypes_and_shapes_are_kept(implementation: Implementation, entries: list[Sent]) -> None:
    for actual, sent in zip(implementation.aggregate(entries), entries[0], strict=True):
        assert actual.dtype == sent.dtype
        assert actual.shape == sent.shape
        assert bool(actual.isfinite().all())


def inputs_are_never_mutated(implementation: Implementation, entries: list[Sent]) -> None:
    before = [tuple(tensor.clone() for tensor in entry) for entry in entries]
    implementation.aggregate(entries)
    assert_identical([tuple(entry) for entry in entries], before)


def results_are_not_views_of_inputs(implementation: Implementation, entries: list[Sent]) -> None:
    before = [tuple(tensor.clone() for tensor in entry) for entry in entries]
    for count in (1, len(entries)):
        for tensor in implementation.aggregate(entries[:count]):
            tensor.fill_(5)
    assert_identical([tuple(entry) for entry in entries], before)


def one_pass_suffices(implementation: Implementation, entries: list[Sent]) -> None:
    def stream() -> Iterator[Sent]:
        yield from entries

    assert_identical(implementation.aggregate(stream()), implementation.aggregate(entries))


LAWS = [
    order_does_not_matter,
    weight_zero_changes_nothing,
    a_single_entry_is_unchanged,
    stays_between_minimum_and_maximum,
    splitting_a_client_changes_nothing,
    means_of_means_are_means,
    weight_is_the_total_evidence,
    unknown_rows_are_zero,
    dtypes_and_shapes_are_kept,
    inputs_are_never_mutated,
    results_are_not_views_of_inputs,
    one_pass_suffices,
]


def round_of_entries(
    generator: torch.Generator,
    *,
    clients: int,
    rows: tuple[int, ...],
    event: tuple[int, ...],
    absent: float,
    scale: float = 1.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> list[Sent]:
    """Draw entries with different values and weights. Rows of weight 0 contain garbage."""
    entries = []
    for client in range(clients):
        value = scale * (
            torch.randn((*rows, *event), generator=generator, dtype=torch.float64) + client
        )
        # Weights from 0.1 to 1000.
        weight = 10 ** (4 * torch.rand(rows, generator=generator, dtype=torch.float64) - 1)
        weight = torch.where(torch.rand(rows, generator=generator) < absent, 0.0, weight)
        garbage = (torch.nan, torch.inf, 1e30)[client % 3]
        value = torch.where(known(Weighted(value, weight)), value, garbage)
        entries.append(Sent.by(DIMS[client % 3], value.to(dtypes[0]), weight.to(dtypes[1])))
    return entries


@st.composite
def rounds(draw: st.DrawFn) -> list[Sent]:
    sizes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    return round_of_entries(
        torch.Generator().manual_seed(draw(st.integers(0, 2**32))),
        clients=draw(st.integers(1, 5)),
        rows=draw(sizes),
        event=draw(sizes),
        absent=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        scale=draw(st.sampled_from([1e-3, 1.0, 1e3])),
        dtypes=draw(
            st.sampled_from(
                [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.float64)]
            )
        ),
    )


# A round of four clients, in which some rows are unknown.
TYPICAL = round_of_entries(
    torch.Generator().manual_seed(0), clients=4, rows=(3,), event=(2,), absent=0.3
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("label", AGGREGATORS)
@examples(3)
@given(entries=rounds())
@example(entries=TYPICAL)
def test_law_holds(label, law, entries):
    law(AGGREGATORS[label], entries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", AGGREGATORS)
def test_half_precision_rows_with_float32_evidence(label, dtype, generator):
    entries = round_of_entries(
        generator, clients=4, rows=(3,), event=(2,), absent=0.3, dtypes=(dtype, torch.float32)
    )
    for law in LAWS:
        law(AGGREGATORS[label], entries)


@examples(6)
@given(entries=rounds())
def test_the_teacher_of_every_dimension_is_its_own_weighted_mean(entries):
    """Without smoothing, a teacher is a weighted mean. Its weights are multiplied by similarity."""
    teachers = heterogeneous_means(entries, [entry.dim for entry in entries], smoothing=0.0)
    assert set(teachers) == {entry.dim for entry in entries}
    for dim, teacher in teachers.items():
        scaled = [
            entry.but(weight=dimension_similarity(dim, entry.dim) * entry.weight)
            for entry in entries
        ]
        for actual, expected in zip(teacher, weighted_mean(scaled), strict=True):
            assert_near(actual, expected)


# Known-wrong aggregators. The table below names the law that must reject each.


def stacked(entries: Iterable[Sent]) -> tuple[Tensor, Tensor, Weighted]:
    """Return values without garbage, weights with as many axes, and an entry for the dtypes."""
    entries = list(entries)
    values = torch.stack(
        [torch.where(known(entry), entry.value, 0.0).double() for entry in entries]
    )
    weights = torch.stack([entry.weight.double() for entry in entries])
    return values, weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim)), entries[0]


def finish(total: Tensor, divisor: Tensor, weights: Tensor, like: Weighted) -> Weighted:
    weight = weights.sum(0)
    value = torch.where(weight > 0, total / torch.where(weight > 0, divisor, 1.0), 0.0)
    return Weighted(
        value.to(like.value.dtype), weight.reshape(like.weight.shape).to(like.weight.dtype)
    )


def right(entries: Iterable[Sent]) -> Weighted:
    values, weights, like = stacked(entries)
    return finish((weights * values).sum(0), weights.sum(0), weights, like)


def ignores_weights(entries: Iterable[Sent]) -> Weighted:
    values, weights, like = stacked(entries)
    return finish(values.sum(0), (weights > 0).double().sum(0), weights, like)


def averages_absent_rows_as_zeros(entries: Iterable[Sent]) -> Weighted:
    values, weights, like = stacked(entries)
    # Every client has its largest weight in every row.
    own = weights.flatten(1).max(1).values.sum()
    return finish((weights * values).sum(0), own, weights, like)


def lets_nan_of_weight_zero_through(entries: Iterable[Sent]) -> Weighted:
    entries = list(entries)
    _, weights, like = stacked(entries)
    values = torch.stack([entry.value.double() for entry in entries])
    return finish((weights * values).sum(0), weights.sum(0), weights, like)


def moving_average(entries: Iterable[Sent]) -> Weighted:
    values, weights, like = stacked(entries)
    result, seen = torch.zeros_like(values[0]), torch.zeros_like(weights[0])
    for value, weight in zip(values, weights, strict=True):
        blended = torch.where(seen > 0, 0.5 * result + 0.5 * value, value)
        result, seen = torch.where(weight > 0, blended, result), seen + weight
    return finish(result, torch.ones_like(seen), weights, like)


def returns_weight_one(entries: Iterable[Sent]) -> Weighted:
    result = right(entries)
    return Weighted(result.value, (result.weight > 0).to(result.weight.dtype))


def sums(entries: Iterable[Sent]) -> Weighted:
    values, weights, like = stacked(entries)
    return finish((weights * values).sum(0), torch.ones_like(weights[0]), weights, like)


def midrange(entries: Iterable[Sent]) -> Weighted:
    """Obey every law except one: its means of means are not means."""
    values, weights, like = stacked(entries)
    highest = torch.where(weights > 0, values, -torch.inf).max(0).values
    lowest = torch.where(weights > 0, values, torch.inf).min(0).values
    middle = torch.where(weights.sum(0) > 0, (highest + lowest) / 2, 0.0)
    return finish(middle, torch.ones_like(middle), weights, like)


def zero_by_zero(entries: Iterable[Sent]) -> Weighted:
    result = right(entries)
    return result._replace(value=torch.where(known(result), result.value, torch.nan))


def answers_in_float32(entries: Iterable[Sent]) -> Weighted:
    return Weighted(*(tensor.float() for tensor in right(entries)))


def multiplies_in_place(entries: Iterable[Sent]) -> Weighted:
    entries = list(entries)
    result = right(entries)
    entries[-1].value.mul_(2)
    return result


def returns_the_only_entry_itself(entries: Iterable[Sent]) -> Weighted:
    entries = list(entries)
    return entries[0] if len(entries) == 1 and entries[0].value.isfinite().all() else right(entries)


def reads_twice(entries: Iterable[Sent]) -> Weighted:
    first = list(entries)
    return right(list(entries) or first[:1])  # a stream is empty the second time


WRONG = {
    moving_average: order_does_not_matter,
    lets_nan_of_weight_zero_through: weight_zero_changes_nothing,
    averages_absent_rows_as_zeros: a_single_entry_is_unchanged,
    sums: stays_between_minimum_and_maximum,
    ignores_weights: splitting_a_client_changes_nothing,
    midrange: means_of_means_are_means,
    returns_weight_one: weight_is_the_total_evidence,
    zero_by_zero: unknown_rows_are_zero,
    answers_in_float32: dtypes_and_shapes_are_kept,
    multiplies_in_place: inputs_are_never_mutated,
    returns_the_only_entry_itself: results_are_not_views_of_inputs,
    reads_twice: one_pass_suffices,
}


def examples() -> list[list[Sent]]:
    """Draw rounds in both dtypes. Rows are known, absent, or absent for all clients."""
    generator = torch.Generator().manual_seed(3)
    drawn = [
        round_of_entries(
            generator, clients=clients, rows=rows, event=(2,), absent=absent, dtypes=(dtype, dtype)
        )
        for clients, rows, absent in ((4, (6,), 0.5), (3, (), 0.0), (3, (2, 3), 0.2))
        for dtype in (torch.float32, torch.float64)
    ]
    for entry in drawn[0]:  # no client knows the first row
        entry.weight[0] = 0.0
        entry.value[0] = torch.nan
    return drawn


def rejects(
    law: Callable[[Implementation, list[Sent]], None],
    aggregate: Callable[[Iterable[Sent]], Weighted],
) -> bool:
    for entries in examples():
        try:
            law(Implementation(aggregate, merges=True), entries)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda function: function.__name__)
def test_laws_reject_known_wrong_aggregators(wrong, law):
    assert rejects(law, wrong)
    # `aggregate_by_name` passes a stream, so an aggregator that reads twice fails on lists too.
    laws = LAWS if law is one_pass_suffices else [law]
    assert any(rejects(each, of_payloads(aggregate_by_name({}, default=wrong))) for each in laws)
