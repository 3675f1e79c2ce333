"""Border pixels: their places, normalization, gradients and counts."""

import numpy as np
import pytest
import torch

from fedprompt import PadPrompts
from models import num_trainable
from tolerance import assert_near


# FedHPL, Table 8, for a padding of 3.
# By hand, for 32 pixels: columns 3 * 32 * 6 = 576, rows 3 * 6 * 38 = 684. For 224 pixels: columns
# 3 * 224 * 6 = 4032, rows 3 * 6 * 230 = 4140.
@pytest.mark.parametrize(("size", "columns", "rows"), [(32, 576, 684), (224, 4032, 4140)])
def test_numbers_of_border_pixels_equal_table_8_of_fedhpl(size, columns, rows):
    pad = PadPrompts(size)
    assert (pad.columns.numel(), pad.rows.numel()) == (columns, rows)
    assert num_trainable(pad) == columns + rows


def test_border_pixels_surround_the_image():
    pad = PadPrompts((2, 3), padding=1, mean=(0.0,), std=(1.0,))
    with torch.no_grad():
        pad.rows.copy_(torch.tensor([[[1, 2, 3, 4, 5], [10, 11, 12, 13, 14]]]))
        pad.columns.copy_(torch.tensor([[[6, 7], [8, 9]]]))
    image = torch.tensor([[[[21.0, 22, 23], [24, 25, 26]]]])
    expected = [[1, 2, 3, 4, 5], [6, 21, 22, 23, 7], [8, 24, 25, 26, 9], [10, 11, 12, 13, 14]]
    assert pad(image).tolist() == [[expected]]


def test_border_pixels_are_normalized_like_the_data():
    pad = PadPrompts(4, padding=2)
    with torch.no_grad():
        pad.rows.fill_(0.5)
        pad.columns.fill_(0.5)
    padded = pad(torch.full((1, 3, 4, 4), 7.0))
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[2:6, 2:6] = True
    # Normalized gray of 0.5: (0.5 - 0.485) / 0.229, (0.5 - 0.456) / 0.224, (0.5 - 0.406) / 0.225.
    for channel, gray in enumerate((0.065502183406, 0.196428571429, 0.417777777778)):
        assert_near(padded[0, channel][~inside], torch.full((48,), gray))
    assert (padded[0, :, inside] == 7).all()


def test_border_pixels_start_uniform_between_0_and_1(generator):
    pad = PadPrompts(64, padding=16, generator=generator)
    for pixels in (pad.rows, pad.columns):
        assert 0 <= pixels.min() < 0.01
        assert 0.99 < pixels.max() <= 1
        assert abs(pixels.mean() - 0.5) < 5 / np.sqrt(12 * pixels.numel())  # five standard errors


def test_the_gradient_of_a_border_pixel_is_summed_over_the_batch_and_divided_by_std():
    pad = PadPrompts(4, padding=1, mean=(0.1, 0.2), std=(0.5, 0.25))
    images = torch.zeros(3, 2, 4, 4, requires_grad=True)
    pad(images).sum().backward()
    for pixels in (pad.rows, pad.columns):  # d sum / d pixel = batch / std: 3 / 0.5 and 3 / 0.25
        assert_near(pixels.grad, torch.tensor([6.0, 12.0])[:, None, None].expand_as(pixels))
    assert torch.equal(images.grad, torch.ones_like(images))
