"""Contexts of low rank: a zero start, and steps that are those of full rank on average."""

import torch

from fedprompt import LowRankContext


def test_three_steps_learn_in_every_parameter_and_keep_the_rank():
    context = LowRankContext(
        7, length=5, rank=2, num_contexts=3, generator=torch.Generator().manual_seed(0)
    )
    assert torch.equal(context(), torch.zeros(3, 5, 7))
    targets = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    sgd = torch.optim.SGD(context.parameters(), 0.3)
    for _ in range(3):
        sgd.zero_grad()
        (0.5 * (context() - targets).square().sum()).backward()
        sgd.step()
    assert (context() - targets).norm() < 0.9 * targets.norm()
    assert all(parameter.grad.any() for parameter in context.parameters())
    ranks = torch.linalg.matrix_rank(context().detach().double(), rtol=1e-5)
    assert ranks.tolist() == [2, 2, 2]
    (slope,) = torch.autograd.grad(context()[1].sum(), context.left)
    assert slope[1].any()
    assert not slope[[0, 2]].any()  # contexts are independent
    assert repr(context) == "LowRankContext(7, length=5, rank=2, num_contexts=3)"


def test_first_steps_average_to_those_of_full_rank():
    """One step of SGD from 0 along a gradient G is L L^T G; its mean over draws is G."""
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    generator, total = torch.Generator().manual_seed(3), torch.zeros(5, 7)
    for _ in range(2000):
        context = LowRankContext(7, length=5, rank=2, generator=generator)
        (context()[0] * gradient).sum().backward()
        with torch.no_grad():
            for parameter in context.parameters():
                parameter += parameter.grad
        total += context()[0].detach()
    # An entry of L L^T has deviation 1 or less (rank 2), so the mean of 2000 has about 0.03.
    assert (total / 2000 - gradient).norm() < 0.1 * gradient.norm()
