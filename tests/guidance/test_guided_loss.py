"""Values and gradients of the guided loss."""

import pytest
import torch

from fedprompt import Weighted
from fedprompt.guidance import guided_loss
from guided import LOSSES
from same import assert_identical


def test_guided_loss_by_hand():
    guided, logits = (
        torch.tensor([[1.0, 2.0], [0.0, 0.0]]),
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    )
    guides = torch.tensor([[0.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    value = guided_loss(guided, logits, torch.tensor([1, 2]), guides, guide_weight=2.0)
    # log 3 + 2 * (0 + 1 + 9 + 0) / 4
    torch.testing.assert_close(value, torch.tensor(3.0).log() + 5.0)
    doubled = guided_loss(
        guided,
        logits,
        torch.tensor([1, 2]),
        guides,
        guide_weight=0.5,
        loss=lambda own, row: (own - row).abs().sum(),
    )
    torch.testing.assert_close(doubled, torch.tensor(3.0).log() + 0.5 * 4)


UNKNOWN = Weighted(
    torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [3.0, 0.0]], dtype=torch.float64),
    torch.tensor([2.0, 0.0, 0.5]),
)


def test_samples_without_a_guide_receive_no_gradient_by_hand():
    guided = torch.tensor(
        [[1.0, 2.0], [3.0, 5.0], [1.0, 1.0]], dtype=torch.float64, requires_grad=True
    )
    logits, labels = torch.zeros(3, 3, dtype=torch.float64), torch.tensor([0, 1, 2])
    loss = guided_loss(guided, logits, labels, UNKNOWN, guide_weight=3.0)
    loss.backward()
    # The loss is log 3 + 3 * (1 + 4 + 0 + 0 + 4 + 1) / 6, and slopes are 3 * 2 * difference / 6.
    torch.testing.assert_close(loss.detach(), torch.tensor(3.0, dtype=torch.float64).log() + 5)
    assert guided.grad.tolist() == [[1.0, 2.0], [0.0, 0.0], [-2.0, 1.0]]


def root(guided, rows):
    """Distance with no slope where the two agree, plus a slope everywhere."""
    return (guided - rows).square().sum(1).sqrt().mean() + guided.sum()


@pytest.mark.parametrize("loss", [*LOSSES.values(), root])
def test_samples_without_a_guide_receive_no_gradient_under_any_loss(loss, generator):
    guided = torch.randn(4, 2, generator=generator, dtype=torch.float64).requires_grad_()
    logits, labels = torch.zeros(4, 3, dtype=torch.float64), torch.tensor([1, 0, 1, 2])
    guides = Weighted(
        UNKNOWN.value + 1, UNKNOWN.weight
    )  # the cosine has no slope at a guide of zeros
    (slope,) = torch.autograd.grad(guided_loss(guided, logits, labels, guides, loss=loss), guided)
    assert not slope[labels == 1].any()
    assert bool(slope[labels != 1].isfinite().all())
    assert bool((slope[labels != 1] != 0).any(1).all())
    finite = UNKNOWN.value.nan_to_num()
    known = guided_loss(guided, logits, labels, Weighted(finite, torch.ones(3)), loss=loss)
    assert_identical(known, guided_loss(guided, logits, labels, finite, loss=loss))


def test_an_empty_batch_has_loss_zero_and_zero_gradients():
    guided, logits, guides = (
        torch.ones(size, requires_grad=True) for size in ((0, 2), (0, 3), (3, 2))
    )
    labels = torch.zeros(0, dtype=torch.int64)
    for table in (guides, Weighted(guides, torch.tensor([1.0, 0.0, 1.0]))):
        loss = guided_loss(guided, logits, labels, table)
        loss.backward()
        assert loss.item() == 0
    assert guides.grad.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_compared_in_float32(dtype):
    # Squares of 300 exceed float16 (65,504), and so does the range of the logits.
    guided = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    logits = torch.tensor([[6e4, -6e4]], dtype=dtype)
    loss = guided_loss(
        guided, logits, torch.tensor([1]), torch.full((2, 2), 300.0, dtype=dtype), guide_weight=2.0
    )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.item(), 2 * logits[0, 0].item() + 2 * 300.0**2)
    loss.backward()
    assert guided.grad.tolist() == [[-600.0, -600.0]]  # 2 * 2 * -300 / 2
