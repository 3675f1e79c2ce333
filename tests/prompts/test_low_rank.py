"""Contexts of low rank: their laws, and proof that the laws bite."""

import pytest
import torch

from errors import raises
from fedprompt import ContextPrompts, LowRankContext, collect
from same import assert_identical

SIZES = {"length": 5, "rank": 2, "num_contexts": 3}


def trained(make):
    """A context after three steps towards random targets, one for each context."""
    context = make(7, **SIZES, generator=torch.Generator().manual_seed(0))
    targets = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    sgd = torch.optim.SGD(context.parameters(), 0.3)
    for _ in range(3):
        sgd.zero_grad()
        (0.5 * (context() - targets).square().sum()).backward()
        sgd.step()
    return context, targets


def is_zero_at_the_start(make):
    context = make(7, **SIZES)()
    assert context.shape == (3, 5, 7)
    assert not context.any()


def learns_in_every_parameter(make):
    context, targets = trained(make)
    assert (context() - targets).norm() < 0.9 * targets.norm()
    assert all(parameter.grad.any() for parameter in context.parameters())


def keeps_its_rank(make):
    ranks = torch.linalg.matrix_rank(trained(make)[0]().detach().double(), rtol=1e-5)
    assert ranks.tolist() == [2, 2, 2]


def contexts_are_independent(make):
    context = trained(make)[0]
    (slope,) = torch.autograd.grad(context()[1].sum(), next(iter(context.parameters())))
    assert slope[1].any()
    assert not slope[[0, 2]].any()


def first_steps_average_to_those_of_full_rank(make):
    """One step of SGD from 0 along a gradient G is L L^T G; its mean over draws is G."""
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    generator, total = torch.Generator().manual_seed(3), torch.zeros(5, 7)
    for _ in range(2000):
        context = make(7, length=5, rank=2, generator=generator)
        (context()[0] * gradient).sum().backward()
        with torch.no_grad():
            for parameter in context.parameters():
                parameter += parameter.grad
        total += context()[0].detach()
    # An entry of L L^T has deviation 1 or less (rank 2), so the mean of 2000 has about 0.03.
    assert (total / 2000 - gradient).norm() < 0.1 * gradient.norm()


LAWS = [
    is_zero_at_the_start,
    learns_in_every_parameter,
    keeps_its_rank,
    contexts_are_independent,
    first_steps_average_to_those_of_full_rank,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_low_rank_contexts_obey_their_laws(law):
    law(LowRankContext)


def test_adding_one_to_a_shared_context_changes_nothing_at_first(generator):
    shared = ContextPrompts(8, length=4, generator=generator)
    private = LowRankContext(8, length=4, rank=2)
    assert_identical((shared() + private()).detach(), shared().detach())
    assert list(collect(private, weight=3)) == ["left", "right"]


def test_a_generator_determines_the_start_and_the_global_one_is_not_used():
    before = torch.get_rng_state()
    one, other = (
        LowRankContext(8, length=4, rank=2, generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert_identical(one.left.detach(), other.left.detach())
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(one) == "LowRankContext(8, length=4, rank=2, num_contexts=1)"


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LowRankContext(0, length=4, rank=2), ValueError, "`dim` must be at least 1;"),
        (lambda: LowRankContext(8, length=-1, rank=2), ValueError, "`length` must be at least"),
        (lambda: LowRankContext(8, length=4, rank=0), ValueError, "`rank` must be at least 1;"),
        (lambda: LowRankContext(8, length=4, rank=1.5), TypeError, "`rank` must be an integer;"),
        (lambda: LowRankContext(8, length=4, rank=2, num_contexts=0), ValueError, "`num_contexts"),
        (lambda: LowRankContext(8, length=4, rank=2, generator=3), TypeError, "`generator` must"),
    ],
)
def test_bad_sizes_are_refused_by_name(make, error, message):
    with raises(error, message):
        make()
