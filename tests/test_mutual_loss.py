"""The mutual loss, against the distillation loss, which has a reference."""

import pytest
import torch

from fedprompt import Weighted, distillation_loss, mutual_loss
from same import assert_identical


def pair(generator, *, dtype=torch.float64):
    return (3 * torch.randn(6, 4, generator=generator, dtype=dtype) for _ in range(2))


def test_it_is_the_distillation_loss_whose_teacher_has_one_class_for_each_sample(generator):
    logits, other = (each[:4] for each in pair(generator))
    teacher = Weighted(other, torch.ones(4))
    expected = distillation_loss(logits, torch.arange(4), teacher, temperature=3.0)
    assert_identical(mutual_loss(logits, other, temperature=3.0), expected)


def test_its_gradient_is_the_difference_of_probabilities(generator):
    """The gradient of KL(p || softmax(z / T)) with respect to z is (softmax(z / T) - p) / T."""
    logits, other = (each.requires_grad_() for each in pair(generator))
    mutual_loss(logits, other, temperature=2.0).backward()
    expected = ((logits / 2).softmax(1) - (other / 2).softmax(1)) / 2 / len(logits)
    torch.testing.assert_close(logits.grad, expected.detach())
    assert other.grad is None


def test_an_empty_batch_has_loss_zero_and_zero_gradients():
    logits = torch.zeros(0, 3, requires_grad=True)
    loss = mutual_loss(logits, torch.zeros(0, 3), temperature=1.0)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_compared_in_float32(dtype, generator):
    logits, other = pair(generator, dtype=torch.float32)
    logits, other = logits.to(dtype), other.to(dtype)
    loss = mutual_loss(logits, other, temperature=1.0)
    assert loss.dtype == torch.float32
    assert_identical(loss, mutual_loss(logits.float(), other.float(), temperature=1.0))
