"""Laws that every prompt selector obeys, and wrong selectors that the laws reject."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fedprompt.selection
from fedprompt.interfaces import PromptSelector, Selection
from fedprompt.selection import select_balanced, select_nearest
from fedprompt.transport import exact, newton, sinkhorn
from generated import examples
from references.sgpt import cosine, literal_keys
from tolerance import assert_near

# Every public function from queries, keys and counts to a selection: name and configuration. Add
# new ones here.
SELECTORS = {
    "select_nearest": select_nearest,
    "select_nearest offset=0.1": partial(select_nearest, offset=0.1),
    "select_balanced sinkhorn": partial(select_balanced, solver=partial(sinkhorn, epsilon=0.05)),
    "select_balanced newton": partial(select_balanced, solver=partial(newton, epsilon=0.05)),
    "select_balanced exact": partial(select_balanced, solver=exact),
}


def test_every_public_selector_is_in_the_table():
    public = {name: getattr(fedprompt.selection, name) for name in fedprompt.selection.__all__}
    selectors = {
        name
        for name, thing in public.items()
        if inspect.signature(thing, eval_str=True).return_annotation is Selection
    }
    assert selectors == {label.split()[0] for label in SELECTORS}
    assert all(isinstance(selector, PromptSelector) for selector in SELECTORS.values())


class Problem(NamedTuple):
    query: Tensor
    keys: Tensor
    usage: Tensor


# Each law takes a selector and a problem, and raises an AssertionError if it does not hold.


def answers_with_a_group_and_its_cosine(select: PromptSelector, problem: Problem) -> None:
    for usage in (None, problem.usage):
        indices, similarity = select(problem.query, problem.keys, usage=usage)
        assert indices.dtype == torch.int64
        assert indices.shape == similarity.shape == problem.query.shape[:1]
        expected = [
            cosine(own.tolist(), problem.keys[group].tolist())
            for own, group in zip(problem.query, indices, strict=True)
        ]
        assert_near(similarity, torch.tensor(expected, dtype=torch.float64))


def only_directions_matter(select: PromptSelector, problem: Problem) -> None:
    """Law G-d."""
    longer = torch.linspace(0.1, 9, len(problem.query), dtype=torch.float64)[:, None]
    uneven = torch.linspace(7, 0.2, len(problem.keys), dtype=torch.float64)[:, None]
    for usage in (None, problem.usage):
        expected = select(problem.query, problem.keys, usage=usage).indices
        assert torch.equal(
            select(longer * problem.query, uneven * problem.keys, usage=usage).indices, expected
        )


def equal_counts_are_no_counts(select: PromptSelector, problem: Problem) -> None:
    """Laws G-b and G-c: equal counts give bitwise identical results, in float32 as well."""
    for dtype in (torch.float64, torch.float32):
        query, keys = problem.query.to(dtype), problem.keys.to(dtype)
        expected = select(query, keys)
        for count in (0, 1, 7):
            actual = select(query, keys, usage=torch.full(problem.usage.shape, count))
            assert torch.equal(actual.indices, expected.indices)
            assert torch.equal(actual.similarity, expected.similarity)
        close = keys[:1] + 1e-7 * keys  # choices that depend on the last bits
        choice = select(query, close).indices
        assert all(
            torch.equal(
                select(query, close, usage=torch.full(problem.usage.shape, count)).indices, choice
            )
            for count in (0, 1, 7)
        )


def the_unit_of_counts_does_not_matter(select: PromptSelector, problem: Problem) -> None:
    expected = select(problem.query, problem.keys, usage=problem.usage).indices
    for unit in (2.0**6, 2.0**-12):
        assert torch.equal(
            select(problem.query, problem.keys, usage=problem.usage * unit).indices, expected
        )


def groups_have_no_order(select: PromptSelector, problem: Problem) -> None:
    """With whole shares, because a sample that is split evenly goes to the first of its groups."""
    problem = problem._replace(query=problem.query[: len(problem.keys) * (40 // len(problem.keys))])
    order = torch.arange(len(problem.keys)).roll(2)
    for usage in (None, problem.usage):
        turned = select(
            problem.query, problem.keys[order], usage=None if usage is None else usage[order]
        ).indices
        assert torch.equal(order[turned], select(problem.query, problem.keys, usage=usage).indices)


def samples_have_no_order(select: PromptSelector, problem: Problem) -> None:
    order = torch.arange(len(problem.query)).flip(0)
    for usage in (None, problem.usage):
        turned = select(problem.query[order], problem.keys, usage=usage).indices
        assert torch.equal(turned, select(problem.query, problem.keys, usage=usage).indices[order])


def clusters_go_to_their_own_keys(select: PromptSelector, problem: Problem) -> None:
    groups = len(problem.keys)
    own = torch.arange(3 * groups) % groups
    query = (
        F.normalize(problem.keys)[own]
        + 0.02 * torch.arange(3 * groups, dtype=torch.float64)[:, None].sin()
    )
    assert torch.equal(select(query, problem.keys).indices, own)


def a_crowded_group_gets_less(select: PromptSelector, problem: Problem) -> None:
    before = select(problem.query, problem.keys).indices.bincount(minlength=len(problem.keys))
    favorite = before.argmax()
    usage = torch.ones_like(problem.usage)
    usage[favorite] = 1000
    after = select(problem.query, problem.keys, usage=usage).indices.bincount(
        minlength=len(problem.keys)
    )
    assert after[favorite] < before[favorite]


def cosines_decide_among_unused_groups(select: PromptSelector, problem: Problem) -> None:
    usage = torch.full_like(problem.usage, 50.0)
    usage[[0, 2]] = 0
    own = torch.tensor([0, 2]).repeat(10)
    query = (
        F.normalize(problem.keys)[own] + 0.02 * torch.arange(20, dtype=torch.float64)[:, None].sin()
    )
    indices = select(query, problem.keys, usage=usage).indices
    unused = usage[indices] == 0
    assert torch.equal(indices[unused], own[unused])
    assert {0, 2} <= set(indices.tolist())


def inputs_are_never_mutated(select: PromptSelector, problem: Problem) -> None:
    before = [tensor.clone() for tensor in problem]
    select(*problem[:2], usage=problem.usage)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(problem, before, strict=True))


def results_carry_no_graph(select: PromptSelector, problem: Problem) -> None:
    query, keys = problem.query.clone().requires_grad_(), problem.keys.clone().requires_grad_()
    assert not select(query, keys, usage=problem.usage).similarity.requires_grad


def equal_inputs_give_identical_results(select: PromptSelector, problem: Problem) -> None:
    first, second = (select(*problem[:2], usage=problem.usage) for _ in range(2))
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.similarity, second.similarity)


LAWS = [
    answers_with_a_group_and_its_cosine,
    only_directions_matter,
    equal_counts_are_no_counts,
    the_unit_of_counts_does_not_matter,
    groups_have_no_order,
    samples_have_no_order,
    clusters_go_to_their_own_keys,
    a_crowded_group_gets_less,
    cosines_decide_among_unused_groups,
    inputs_are_never_mutated,
    results_carry_no_graph,
    equal_inputs_give_identical_results,
]


def problem(generator: torch.Generator, *, groups: int = 5, dim: int = 9) -> Problem:
    """Draw many different queries, and different counts, some of them 0."""
    query = torch.randn(40, dim, generator=generator, dtype=torch.float64)
    keys = torch.linalg.qr(torch.randn(dim, groups, generator=generator, dtype=torch.float64))[
        0
    ].T.contiguous()
    usage = torch.randint(1, 100, (groups,), generator=generator).double()
    usage[torch.randperm(groups, generator=generator)[:2]] = 0
    return Problem(query, keys, usage)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("label", SELECTORS)
@examples(3)
@given(seed=st.integers(0, 2**32), groups=st.integers(4, 8))
def test_law_holds(label, law, seed, groups):
    law(SELECTORS[label], problem(torch.Generator().manual_seed(seed), groups=groups))


# Known-wrong selectors, each under the law that must reject it.


def similarities(query, keys):
    return F.normalize(query).detach() @ F.normalize(keys).detach().T


def chosen(similarity, indices):
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0])


def right(query, keys, *, usage=None, offset=5e-4):
    """Select correctly; the wrong selectors below are variations of this one."""
    usage = torch.zeros(len(keys)) if usage is None else usage
    share = usage / usage.sum().clamp(min=1e-9) + offset
    similarity = similarities(query, keys)
    return chosen(similarity, ((1 - similarity) * (share / share.max())).argmin(1))


def ignores_counts(query, keys, *, usage=None):
    return right(query, keys)


def compares_by_dot_product(query, keys, *, usage=None):
    similarity = similarities(query, keys)
    distance = 100 - query.detach() @ keys.detach().T
    return chosen(similarity, (distance * (1 if usage is None else usage + 1)).argmin(1))


def takes_counts_for_shares(query, keys, *, usage=None):
    usage = torch.zeros(len(keys)) if usage is None else usage
    similarity = similarities(query, keys)
    return chosen(similarity, ((1 - similarity) * (usage + 1)).argmin(1))


def starts_with_group_zero(query, keys, *, usage=None):
    """Select by Eq. 6 as printed if there are no counts."""
    result = right(query, keys, usage=usage)
    return (
        chosen(similarities(query, keys), result.indices * 0)
        if usage is not None and not usage.any()
        else result
    )


def votes_by_batch(query, keys, *, usage=None):
    indices = right(query, keys, usage=usage).indices
    return chosen(similarities(query, keys), indices.mode().values.expand(len(indices)))


def answers_with_distances(query, keys, *, usage=None):
    result = right(query, keys, usage=usage)
    return result._replace(similarity=1 - result.similarity)


def prefers_low_groups(query, keys, *, usage=None):
    similarity = similarities(query, keys)
    own = right(query, keys, usage=usage).indices
    return chosen(similarity, torch.where(similarity.amax(1) < 0.3, own * 0, own))


def serves_the_first_first(query, keys, *, usage=None):
    """Assign queries one by one, each to the nearest group that is not full."""
    similarity, capacity = similarities(query, keys), [1 + len(query) // len(keys)] * len(keys)
    indices = []
    for row in similarity if usage is None else similarity / (1 + usage / usage.sum().clamp(min=1)):
        order = row.argsort(descending=True).tolist()
        indices.append(next(group for group in order if capacity[group]))
        capacity[indices[-1]] -= 1
    return chosen(similarity, torch.tensor(indices))


def counts_in_place(query, keys, *, usage=None):
    result = right(query, keys, usage=usage)
    if usage is not None:
        usage += result.indices.bincount(minlength=len(keys)).to(usage.dtype)
    return result


def keeps_the_graph(query, keys, *, usage=None):
    indices = right(query, keys, usage=usage).indices
    return Selection(indices, F.cosine_similarity(query, keys[indices]))


def draws_noise(query, keys, *, usage=None):
    similarity = similarities(query, keys)
    return chosen(similarity, (similarity + torch.randn(similarity.shape)).argmax(1))


WRONG = {
    answers_with_distances: answers_with_a_group_and_its_cosine,
    compares_by_dot_product: only_directions_matter,
    starts_with_group_zero: equal_counts_are_no_counts,
    takes_counts_for_shares: the_unit_of_counts_does_not_matter,
    prefers_low_groups: groups_have_no_order,
    serves_the_first_first: samples_have_no_order,
    votes_by_batch: clusters_go_to_their_own_keys,
    ignores_counts: a_crowded_group_gets_less,
    literal_keys: cosines_decide_among_unused_groups,
    counts_in_place: inputs_are_never_mutated,
    keeps_the_graph: results_carry_no_graph,
    draws_noise: equal_inputs_give_identical_results,
}


def rejects(law: Callable[[PromptSelector, Problem], None], select: PromptSelector) -> bool:
    try:
        law(select, problem(torch.Generator().manual_seed(1)))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda thing: thing.__name__)
def test_laws_reject_known_wrong_selectors(wrong, law):
    assert rejects(law, wrong)
