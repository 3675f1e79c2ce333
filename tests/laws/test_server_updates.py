"""Laws that every server update obeys, and wrong updates that the laws reject."""

import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple, get_origin

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fedprompt as fp
from fedprompt.interfaces import ServerRule, ServerUpdate
from generated import examples
from known import known
from same import assert_identical


class OneName:
    """View of one name of an update of dicts, to which the laws of tensors apply."""

    def __init__(self, lifted: ServerUpdate) -> None:
        self.lifted = lifted

    def init(self, previous):
        return self.lifted.init({"group.keys": previous, "head": previous})

    def step(self, previous, mean, state):
        new, state = self.lifted.step(
            {"group.keys": previous, "head": previous}, {"group.keys": mean}, state
        )
        assert_identical(new["head"], previous)
        return new["group.keys"], state


# Every public function that returns a server update: its name, then its configuration. Add new
# ones here.
ON_TENSORS = {
    "overwrite": fp.overwrite(),
    "ema decay=0": fp.ema(decay=0),
    "ema decay=0.5": fp.ema(decay=0.5),
    "ema decay=0.9": fp.ema(decay=0.9),
    "ema decay=1": fp.ema(decay=1),
    "descend SGD": fp.descend(partial(torch.optim.SGD, lr=0.1)),
    "descend SGD momentum": fp.descend(
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), max_norm=1.0
    ),
    "descend Adam": fp.descend(partial(torch.optim.Adam, lr=0.1, weight_decay=0.1)),
    "fedopt SGD": fp.aggregation.fedopt(
        partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    ),
    "fedopt Adam": fp.aggregation.fedopt(
        partial(torch.optim.Adam, lr=0.1, weight_decay=0.1), max_norm=1.0
    ),
    "adam": fp.aggregation.adam(learning_rate=0.1),
    "yogi": fp.aggregation.yogi(learning_rate=0.1, betas=(0.5, 0.9), tau=0.1),
}
UPDATES = {
    **ON_TENSORS,
    **{f"{label} on values": OneName(update) for label, update in ON_TENSORS.items()},
    "update_by_name ema": OneName(fp.update_by_name({"group": fp.ema(decay=0.3)})),
    "update_by_name Adam": OneName(
        fp.update_by_name(
            {"head": fp.overwrite()}, default=fp.descend(partial(torch.optim.AdamW, lr=0.1))
        )
    ),
}


def test_every_public_server_update_is_in_the_table():
    returned = {
        name: inspect.signature(inspect.unwrap(function), eval_str=True).return_annotation
        for name, function in inspect.getmembers(fp.aggregation, inspect.isfunction)
        if not name.startswith("_")
    }
    makers = {
        name
        for name, made in returned.items()
        if made is ServerRule or get_origin(made) is ServerUpdate
    }
    assert makers == {label.split()[0] for label in UPDATES}


class Problem(NamedTuple):
    previous: Tensor
    means: list[fp.Weighted]  # one for each round


# Each law takes an update and a problem, and raises an AssertionError if it does not hold.


def same(first: Any, second: Any) -> bool:
    """Return whether two nested states are bitwise identical."""
    if isinstance(first, Tensor):
        return torch.equal(first.isnan(), second.isnan()) and torch.equal(
            first.nan_to_num(), second.nan_to_num()
        )
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def trajectory(
    update: ServerUpdate, previous: Tensor, means: Sequence[fp.Weighted], state: Any
) -> list[tuple[Tensor, Any]]:
    steps = []
    for mean in means:
        previous, state = update.step(previous, mean, state)
        steps.append((previous, state))
    return steps


def rows_without_evidence_stay(update: ServerUpdate, problem: Problem) -> None:
    steps = trajectory(update, problem.previous, problem.means, update.init(problem.previous))
    before = problem.previous
    for mean, (new, _) in zip(problem.means, steps, strict=True):
        assert_identical(new[~known(mean)], before[~known(mean)])
        before = new


def inputs_are_never_mutated(update: ServerUpdate, problem: Problem) -> None:
    previous = problem.previous
    copy = previous.clone()
    state = update.init(previous)
    assert_identical(previous, copy)
    for mean in problem.means:
        before = deepcopy((previous, tuple(mean), state))
        new, next_state = update.step(previous, mean, state)
        assert same((previous, tuple(mean), state), before)
        previous, state = new, next_state


def same_inputs_give_identical_results(update: ServerUpdate, problem: Problem) -> None:
    """Old states can be used again after later rounds, so an update has no hidden state."""
    steps = trajectory(update, problem.previous, problem.means, update.init(problem.previous))
    assert same(
        trajectory(update, problem.previous, problem.means, update.init(problem.previous)), steps
    )
    for server_round in range(1, len(problem.means)):
        value, state = steps[server_round - 1]
        assert same(
            trajectory(update, value, problem.means[server_round:], state), steps[server_round:]
        )


def a_saved_run_resumes(update: ServerUpdate, problem: Problem) -> None:
    """Saving and loading a state (``weights_only``) does not change the next rounds."""
    steps = trajectory(update, problem.previous, problem.means, update.init(problem.previous))
    for server_round in range(1, len(problem.means)):
        file = io.BytesIO()
        torch.save(steps[server_round - 1], file)
        file.seek(0)
        value, state = torch.load(file, weights_only=True)
        assert same(
            trajectory(update, value, problem.means[server_round:], state), steps[server_round:]
        )


def dtype_and_shape_are_kept(update: ServerUpdate, problem: Problem) -> None:
    for new, _ in trajectory(
        update, problem.previous, problem.means, update.init(problem.previous)
    ):
        assert new.dtype == problem.previous.dtype
        assert new.shape == problem.previous.shape
        assert bool(new.isfinite().all())


def results_carry_no_graph(update: ServerUpdate, problem: Problem) -> None:
    previous = problem.previous.clone().requires_grad_()
    means = [mean._replace(value=mean.value.clone().requires_grad_()) for mean in problem.means]
    for new, _ in trajectory(update, previous, means, update.init(previous)):
        assert not new.requires_grad
    assert previous.grad is None


def results_are_not_views_of_inputs(update: ServerUpdate, problem: Problem) -> None:
    state = update.init(problem.previous)
    for mean in problem.means:
        before = deepcopy((problem.previous, tuple(mean), state))
        new, _ = update.step(problem.previous, mean, state)
        new.fill_(7)
        assert same((problem.previous, tuple(mean), state), before)


LAWS = [
    rows_without_evidence_stay,
    inputs_are_never_mutated,
    same_inputs_give_identical_results,
    a_saved_run_resumes,
    dtype_and_shape_are_kept,
    results_carry_no_graph,
    results_are_not_views_of_inputs,
]


def problem(
    generator: torch.Generator,
    *,
    rounds: int,
    rows: tuple[int, ...],
    event: tuple[int, ...],
    absent: float,
    dtype: torch.dtype,
) -> Problem:
    """Draw rounds that never repeat a mean or a weight. Rows of weight 0 contain garbage."""
    means = []
    for server_round in range(rounds):
        value = torch.randn((*rows, *event), generator=generator, dtype=dtype) + server_round
        weight = 1 + 100 * torch.rand(rows, generator=generator)
        mean = fp.Weighted(
            value, torch.where(torch.rand(rows, generator=generator) < absent, 0.0, weight)
        )
        means.append(
            mean._replace(
                value=torch.where(
                    known(mean), value, (torch.nan, torch.inf, 1e30)[server_round % 3]
                )
            )
        )
    return Problem(torch.randn((*rows, *event), generator=generator, dtype=dtype), means)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    sizes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    return problem(
        torch.Generator().manual_seed(draw(st.integers(0, 2**32))),
        rounds=draw(st.integers(1, 4)),
        rows=draw(sizes),
        event=draw(sizes),
        absent=draw(st.sampled_from([0.0, 0.4, 0.8, 1.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
    )


# Three rounds, in which some rows are unknown.
TYPICAL = problem(
    torch.Generator().manual_seed(0),
    rounds=3,
    rows=(3,),
    event=(2,),
    absent=0.4,
    dtype=torch.float32,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("label", UPDATES)
@examples(2)
@given(problem=problems())
@example(problem=TYPICAL)
def test_law_holds(label, law, problem):
    law(UPDATES[label], problem)


@pytest.mark.parametrize("label", UPDATES)
def test_laws_hold_in_bfloat16(label, generator):
    for law in LAWS:
        law(
            UPDATES[label],
            problem(generator, rounds=3, rows=(3,), event=(2,), absent=0.3, dtype=torch.bfloat16),
        )


@pytest.mark.bad_input
@pytest.mark.parametrize("label", UPDATES)
def test_a_state_that_is_not_a_mapping_is_refused_by_name(label):
    with pytest.raises((TypeError, ValueError), match=r"`state` must (come from `init`|map names)"):
        UPDATES[label].step(TYPICAL.previous, TYPICAL.means[0], None)


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
@examples(4)
@given(problem=problems())
def test_means_that_equal_the_previous_value_are_a_fixed_point(decay, problem):
    for mean in problem.means:
        agreeing = fp.Weighted(torch.where(known(mean), problem.previous, mean.value), mean.weight)
        assert_identical(
            fp.ema(decay=decay).step(problem.previous, agreeing, {})[0], problem.previous
        )


# Known-wrong updates. The table below names the law that must reject each.


class Right:
    """Gradient descent with momentum by hand. The wrong updates below are variations of it."""

    def init(self, previous):
        return {"speed": torch.zeros_like(previous)}

    def step(self, previous, mean, state):
        speed = 0.9 * state["speed"] + torch.where(known(mean), mean.value, 0.0).to(previous.dtype)
        return self.finish(
            previous.detach(), previous.detach() - 0.1 * speed, mean, {"speed": speed}
        )

    def finish(self, previous, moved, mean, state):
        return torch.where(known(mean), moved, previous), state


class MomentumMovesUnknownRows(Right):
    def finish(self, previous, moved, mean, state):
        return moved, state


class WritesIntoPrevious(Right):
    def finish(self, previous, moved, mean, state):
        previous[known(mean)] += 1
        return torch.where(known(mean), moved, previous), state


class HidesItsState(Right):
    def init(self, previous):
        self.speed = torch.zeros_like(previous)
        return {}

    def step(self, previous, mean, state):
        new, state = super().step(previous, mean, {"speed": self.speed})
        self.speed = state["speed"]
        return new, {}


class CountsRoundsOnItself(Right):
    """Update with a hidden counter of rounds. Only a resumed run differs."""

    def init(self, previous):
        self.rounds = 0
        return super().init(previous)

    def finish(self, previous, moved, mean, state):
        self.rounds += 1
        return torch.where(known(mean), moved / self.rounds, previous), state


class AnswersInFloat64(Right):
    def finish(self, previous, moved, mean, state):
        return torch.where(known(mean), moved, previous).double(), state


class KeepsTheGraph(Right):
    def step(self, previous, mean, state):
        return torch.where(known(mean), 0.5 * previous + 0.5 * mean.value, previous), state


class HandsBackItsInput(Right):
    def step(self, previous, mean, state):
        return (mean.value if known(mean).all() else super().step(previous, mean, state)[0]), state


WRONG = {
    MomentumMovesUnknownRows: rows_without_evidence_stay,
    WritesIntoPrevious: inputs_are_never_mutated,
    HidesItsState: same_inputs_give_identical_results,
    CountsRoundsOnItself: a_saved_run_resumes,
    AnswersInFloat64: dtype_and_shape_are_kept,
    KeepsTheGraph: results_carry_no_graph,
    HandsBackItsInput: results_are_not_views_of_inputs,
}


def rejects(
    law: Callable[[ServerUpdate, Problem], None], make_update: Callable[[], ServerUpdate]
) -> bool:
    for absent in (0.0, 0.5):
        generator = torch.Generator().manual_seed(1)
        try:
            law(
                make_update(),
                problem(
                    generator, rounds=4, rows=(6,), event=(2,), absent=absent, dtype=torch.float32
                ),
            )
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda thing: thing.__name__)
def test_laws_reject_known_wrong_updates(wrong, law):
    assert rejects(law, wrong)
    assert rejects(law, lambda: OneName(fp.update_by_name({}, default=wrong())))


@pytest.mark.parametrize("label", ON_TENSORS)
@examples(4)
@given(problem=problems())
def test_the_step_of_a_dict_is_the_step_of_each_tensor(label, problem):
    update, values = ON_TENSORS[label], {"a": problem.previous, "b": 2 * problem.previous}
    states = {name: update.init(value) for name, value in values.items()}
    expected, state = dict(values), update.init(values)
    for mean in problem.means:
        other = fp.Weighted(-3 * mean.value, mean.weight)
        for name, sent in (("a", mean), ("b", other)):
            expected[name], states[name] = update.step(expected[name], sent, states[name])
        values, state = update.step(values, {"b": other, "a": mean}, state)
        assert same(values, expected)
        assert same(state, states)
