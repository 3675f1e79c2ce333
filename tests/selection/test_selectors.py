"""Selection rules, key loss and keys, against loops; and errors for bad input."""

from functools import partial

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from fedprompt.selection import (
    SelectionKeys,
    key_loss,
    orthogonal_keys,
    select_balanced,
    select_nearest,
)
from fedprompt.transport import exact, sinkhorn
from references.sgpt import choices, cosine, literal_keys
from tolerance import assert_near


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# Selecting.


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(0, 9),
    groups=st.integers(1, 6),
    offset=st.sampled_from([5e-4, 0.05, 3.0]),
    counted=st.sampled_from(["not at all", "nothing", "some", "all"]),
)
def test_select_nearest_against_a_loop(seed, batch, groups, offset, counted):
    generator = torch.Generator().manual_seed(seed)
    query, keys = draw(generator, batch, 7), draw(generator, groups, 7)
    usage = torch.randint(1, 60, (groups,), generator=generator)
    usage[: {"nothing": groups, "some": groups // 2}.get(counted, 0)] = 0
    usage = None if counted == "not at all" else usage
    counts = None if usage is None else usage.tolist()
    expected = choices(query.tolist(), keys.tolist(), counts, offset=offset)
    selection = select_nearest(query, keys, usage=usage, offset=offset)
    assert selection.indices.tolist() == expected


def test_the_default_offset_is_the_authors():
    # A query at 60 and 30 degrees to two keys has the distances 1 - 1/2 and 1 - 0.866 = 0.134.
    # With shares 0 and q the first key wins if 0.5 * 5e-4 < 0.134 * (q + 5e-4). So it wins above
    # q = 1.366e-3, which is between the counts 1365 and 1367 of a million.
    query = torch.tensor([[0.5, 3**0.5 / 2, 0.0]], dtype=torch.float64)
    for count, expected in ((1365, 1), (1367, 0)):
        usage = torch.tensor([0, count, 10**6 - count])
        found = select_nearest(query, torch.eye(3, dtype=torch.float64), usage=usage)
        assert found.indices.item() == expected


def test_the_literal_rule_sends_every_sample_to_one_unused_group(generator):
    """Known wrong: by Eq. 6 as printed, all queries go to the first unused group."""
    keys = orthogonal_keys(6, 16, generator=generator)
    query, usage = keys[torch.tensor([0, 1, 3, 4, 5] * 4)], torch.tensor([9, 4, 0, 7, 0, 2])
    near = query + 0.05 * torch.randn(20, 16, generator=generator)
    assert literal_keys(near, keys, usage=usage).indices.tolist() == [2] * 20
    assert select_nearest(query, keys, usage=usage).indices.tolist() == [0, 1, 3, 4, 5] * 4


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), each=st.integers(1, 4), groups=st.integers(1, 5))
def test_select_balanced_with_the_exact_solver_is_the_best_even_assignment(seed, each, groups):
    """The reference is SciPy's assignment of samples to `each` places in every group."""
    generator = torch.Generator().manual_seed(seed)
    query, keys = draw(generator, each * groups, 7), draw(generator, groups, 7)
    cost = [
        [1 - cosine(own.tolist(), key.tolist()) for key in keys for _ in range(each)]
        for own in query
    ]
    seats = linear_sum_assignment(cost)[1] // each
    assert select_balanced(query, keys, solver=exact).indices.tolist() == seats.tolist()


def recorded(solver, seen):
    def solve(cost, a, b):
        seen.append((cost, a, b))
        return solver(cost, a, b)

    return solve


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32), groups=st.integers(1, 8))
def test_select_balanced_gives_less_to_used_groups_and_at_most_twice_the_mean_share(seed, groups):
    generator, seen = torch.Generator().manual_seed(seed), []
    usage = torch.randint(0, 9, (groups,), generator=generator).double() ** 4
    query, keys = draw(generator, 12, 9), draw(generator, groups, 9)
    select_balanced(query, keys, usage=usage, solver=recorded(exact, seen))
    ((cost, rows, shares),) = seen
    total = float(usage.sum()) or 1.0
    weights = [1 / (1 + groups * count / total) for count in usage.tolist()]
    assert_near(
        shares, torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    )
    assert_near(rows, torch.full((12,), 1 / 12, dtype=torch.float64))
    assert cost.shape == (12, groups)
    assert float(shares.max()) <= 2 / groups + 1e-12
    assert torch.equal(shares.argsort(stable=True, descending=True), usage.argsort(stable=True))


def test_an_empty_batch_selects_nothing_and_costs_nothing():
    for select in (select_nearest, partial(select_balanced, solver=sinkhorn)):
        selection = select(torch.zeros(0, 3), torch.eye(3), usage=torch.tensor([1, 0, 2]))
        assert selection.indices.shape == selection.similarity.shape == (0,)
    loss = key_loss(torch.zeros(0, 4), torch.eye(4).requires_grad_(), torch.zeros(0, dtype=int))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_queries_are_compared_in_float32(dtype, autocast, generator):
    query, keys = draw(generator, 30, 16).to(dtype), draw(generator, 5, 16).to(dtype)
    usage = torch.tensor([500, 200, 100, 50, 0], dtype=torch.int64)
    expected = select_nearest(query.double(), keys.double(), usage=usage)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = select_nearest(query, keys, usage=usage)
        loss = key_loss(query, keys, actual.indices)
    assert torch.equal(actual.indices, expected.indices)
    assert actual.similarity.dtype == loss.dtype == torch.float32
    assert_near(actual.similarity, expected.similarity)
    assert_near(loss, -expected.similarity.mean())


# The loss.


def test_of_equal_keys_the_lower_one_is_selected_whatever_the_usage():
    """A cosine that is rounded above 1 once made the more used key the closer one."""
    query = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    for one in query:
        keys = torch.stack([one, one])
        found = select_nearest(one[None], keys, usage=torch.tensor([10, 90]))
        assert found.indices.item() == 0


@pytest.mark.bad_input  # the hook refuses unsigned integers, which the library accepts
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_key_loss_against_a_loop_and_its_gradient(dtype, generator):
    """With as many samples as keys, indices of dtype uint8 would be a mask."""
    query, keys = (draw(generator, 4, 5).requires_grad_() for _ in range(2))
    indices = torch.tensor([0, 3, 3, 0])
    loss = key_loss(query, keys, indices.to(dtype))
    pairs = zip(query.tolist(), keys[indices].tolist(), strict=True)
    expected = -torch.tensor([cosine(*pair) for pair in pairs], dtype=torch.float64).mean()
    assert_near(loss.detach(), expected)
    loss.backward()
    assert query.grad is None  # so no gradient reaches the backbone
    assert_near((keys.grad * keys.detach()).sum(1), torch.zeros(4, dtype=torch.float64))
    assert keys.grad.abs().amax(1).ne(0).tolist() == [True, False, False, True]
    assert torch.autograd.gradcheck(lambda keys: key_loss(query.detach(), keys, indices), keys)


# Keys.


@pytest.mark.parametrize(("groups", "dim"), [(1, 1), (1, 5), (5, 5), (20, 768)])
def test_keys_are_initially_orthonormal(groups, dim, generator):
    keys = orthogonal_keys(groups, dim, generator=generator)
    assert_near(keys @ keys.T, torch.eye(groups))


def test_keys_depend_on_the_generator_only_and_not_on_the_global_one():
    state = torch.get_rng_state()
    first, same, other = (
        SelectionKeys(3, 8, generator=torch.Generator().manual_seed(seed)).keys
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert (first != other).any()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        drawn = orthogonal_keys(3, 8)
        torch.manual_seed(5)
        assert torch.equal(drawn, SelectionKeys(3, 8).keys)


class Recorder:
    """Selection rule that records the counts of each call."""

    def __init__(self):
        self.seen = []

    def __call__(self, query, keys, *, usage=None):
        self.seen.append(usage.tolist())
        assert not keys.requires_grad
        return select_nearest(query, keys)


def test_training_counts_selections_and_uses_the_servers_and_the_clients_counts(generator):
    recorder = Recorder()
    selector = SelectionKeys(3, 8, selector=recorder, generator=generator)
    selector.start_round(torch.tensor([10.0, 0.0, 5.0]))
    own = selector.keys.detach()
    selector(own[[0, 0, 1]])
    selector(own[[2, 0]])
    assert recorder.seen == [[10, 0, 5], [12, 1, 5]]
    assert selector.counts.tolist() == [3, 1, 1]
    assert selector.usage.tolist() == [10, 0, 5]
    selector.start_round(torch.tensor([13, 1, 6]))
    assert selector.counts.tolist() == [0, 0, 0]
    assert selector.usage.tolist() == [13, 1, 6]


def test_eval_mode_selects_by_cosine_and_counts_nothing(generator):
    recorder = Recorder()
    selector = SelectionKeys(3, 8, selector=recorder, generator=generator).eval()
    selector.start_round(torch.tensor([10.0, 0.0, 5.0]))
    query = torch.randn(20, 8, generator=generator)
    selection = selector(query)
    assert torch.equal(selection.indices, select_nearest(query, selector.keys).indices)
    assert recorder.seen == []
    assert selector.counts.tolist() == [0, 0, 0]


def test_counts_are_integers_in_half_precision_training(generator):
    """A bfloat16 count would not increase beyond 256."""
    selector = SelectionKeys(2, 4, generator=generator).bfloat16()
    query = selector.keys.detach()[[0] * 300]
    selector.start_round(torch.zeros(2))
    selector(query)
    selector(query)
    assert selector.counts.tolist() == [600, 0]


@pytest.mark.unhooked  # the hook cannot read functorch tensors
def test_values_are_not_checked_inside_a_transform():
    query = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))
    keys, usage = nn.Parameter(torch.eye(3)[:2]), torch.tensor([5.0, 0.0])

    def chosen(query):
        return select_nearest(query, keys, usage=usage).indices

    assert torch.equal(torch.func.vmap(chosen)(query), torch.stack([*map(chosen, query)]))
    indices = torch.tensor([0, 1])
    gradients = torch.func.vmap(
        torch.func.grad(lambda keys, query: key_loss(query, keys, indices)), (None, 0)
    )(keys, query)
    for gradient, own in zip(gradients, query, strict=True):
        assert_near(gradient, torch.autograd.grad(key_loss(own, keys, indices), keys)[0])
