"""Laws of centered queries in a federation, and wrong ways to center that the laws reject."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedprompt import load_values, weighted_mean
from fedprompt.selection import CenteredQueries, key_loss, query_mean, select_nearest
from tolerance import assert_near

Queries = list[Tensor]


class Centered(NamedTuple):
    """Queries of each client, as the selector and as the key loss receive them."""

    selected: Queries
    trained: Queries


Center = Callable[[Queries], Centered]


def by_federated_mean(clients: Queries) -> Centered:
    mean = weighted_mean(query_mean(own) for own in clients)
    queries = CenteredQueries(clients[0].shape[1], center=torch.zeros_like(clients[0][0]))
    load_values(queries, {"center": mean})
    centered = [queries(own) for own in clients]
    return Centered(centered, centered)


# Add new ways to center here.
CENTERS = {"CenteredQueries": by_federated_mean}


class Problem(NamedTuple):
    clients: Queries
    keys: Tensor
    usage: Tensor
    constant: Tensor


# Each law takes a way to center and a problem, and raises an AssertionError if it does not hold.


def selection_ignores_a_constant(center: Center, problem: Problem) -> None:
    shifted = [own + problem.constant for own in problem.clients]
    for plain, moved in zip(
        center(problem.clients).selected, center(shifted).selected, strict=True
    ):
        for usage in (None, problem.usage):
            expected = select_nearest(plain, problem.keys, usage=usage)
            actual = select_nearest(moved, problem.keys, usage=usage)
            assert torch.equal(actual.indices, expected.indices)
            torch.testing.assert_close(actual.similarity, expected.similarity, rtol=0, atol=1e-9)


def key_gradients_ignore_a_constant(center: Center, problem: Problem) -> None:
    gradients = []
    for clients in (problem.clients, [own + problem.constant for own in problem.clients]):
        selected, trained = center(clients)
        keys = problem.keys.clone().requires_grad_()
        loss = sum(
            key_loss(query, keys, select_nearest(chosen, keys).indices)
            for chosen, query in zip(selected, trained, strict=True)
        )
        gradients.append(torch.autograd.grad(loss, keys)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-9)


def differences_between_queries_remain(center: Center, problem: Problem) -> None:
    """Also between those of different clients."""
    raw, centered = torch.cat(problem.clients), torch.cat(center(problem.clients).selected)
    assert_near(centered - centered[:1], raw - raw[:1])


def clients_do_not_matter(center: Center, problem: Problem) -> None:
    """Samples have the same centered queries, however they are divided over clients."""
    together = center([torch.cat(problem.clients)]).selected
    assert_near(torch.cat(center(problem.clients).selected), together[0])


def queries_fill_no_cone(center: Center, problem: Problem) -> None:
    """A key on the old axis has no advantage: the directions have no common part left."""
    axis = F.normalize(problem.constant, dim=0)
    far = [own + 9 * axis for own in problem.clients]
    centered = torch.cat(center(far).selected)
    assert abs(float((centered @ axis).mean())) < 1e-9


LAWS = [
    selection_ignores_a_constant,
    key_gradients_ignore_a_constant,
    differences_between_queries_remain,
    clients_do_not_matter,
    queries_fill_no_cone,
]


def problem(seed: int) -> Problem:
    """Draw clients of unequal size, each around its own point, and a constant of length 30."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    clients = [draw(size, 8) + 2 * draw(8) for size in (3, 20, 7)]
    constant = 30 * F.normalize(draw(8), dim=0)
    usage = torch.randint(0, 50, (4,), generator=generator)
    return Problem(clients, draw(4, 8), usage, constant)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", CENTERS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_law_holds(name, law, seed):
    law(CENTERS[name], problem(seed))


# Known-wrong ways to center, each under the law that must reject it.


def leaves_queries_as_they_are(clients):
    return Centered(clients, clients)


def centers_for_selection_only(clients):
    return Centered(by_federated_mean(clients).selected, clients)


def subtracts_each_clients_own_mean(clients):
    centered = [own - own.mean(0) for own in clients]
    return Centered(centered, centered)


def weighs_clients_alike(clients):
    mean = torch.stack([own.mean(0) for own in clients]).mean(0)
    centered = [own - mean for own in clients]
    return Centered(centered, centered)


def subtracts_half_of_the_mean(clients):
    centered = [own - torch.cat(clients).mean(0) / 2 for own in clients]
    return Centered(centered, centered)


WRONG = {
    leaves_queries_as_they_are: selection_ignores_a_constant,
    centers_for_selection_only: key_gradients_ignore_a_constant,
    subtracts_each_clients_own_mean: differences_between_queries_remain,
    weighs_clients_alike: clients_do_not_matter,
    subtracts_half_of_the_mean: queries_fill_no_cone,
}


def rejects(law: Callable[[Center, Problem], None], center: Center) -> bool:
    try:
        law(center, problem(1))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda thing: thing.__name__)
def test_laws_reject_known_wrong_ways_to_center(wrong, law):
    assert rejects(law, wrong)
