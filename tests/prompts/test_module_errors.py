"""Errors of prompt modules."""

import numpy as np
import pytest
import torch

import fedprompt as fp
from errors import raises

DIM = 12


DRAWN_BY_NUMPY = [
    lambda: fp.LayeredPrompts(2, 8, layers=(0,), generator=np.random.default_rng(0)),
    lambda: fp.ShallowPrompts(2, 8, generator=np.random.default_rng(0)),
    lambda: fp.DeepPrompts(2, 8, 3, generator=np.random.default_rng(0)),
    lambda: fp.GroupPrompts(5, 1, 8, layers=(0,), generator=np.random.default_rng(0)),
    lambda: fp.PadPrompts(8, generator=np.random.default_rng(0)),
    lambda: fp.ContextPrompts(8, generator=np.random.default_rng(0)),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fp.LayeredPrompts(-1, 8, layers=(0,)), ValueError, "`num_prompts` must be at"),
        (lambda: fp.ShallowPrompts(2.0, 8), TypeError, "`num_prompts` must be an integer; got 2.0"),
        (lambda: fp.ShallowPrompts(True, 8), TypeError, "`num_prompts` must be an integer; got"),
        (lambda: fp.ShallowPrompts(2, 0), ValueError, "`dim` must be at least 1; got 0."),
        (lambda: fp.ShallowPrompts(2, "8"), TypeError, "`dim` must be an integer or a Trunk; got"),
        (lambda: fp.DeepPrompts(2, 8, 0), ValueError, "`depth` must be at least 1; got 0."),
        (lambda: fp.DeepPrompts(2, 8, 1.5), TypeError, "`depth` must be an integer; got 1.5"),
        (lambda: fp.LayeredPrompts(2, 8, layers=3), TypeError, "`layers` must be layer indices,"),
        (lambda: fp.LayeredPrompts(2, 8, layers=()), ValueError, "`layers` must contain at least"),
        (lambda: fp.LayeredPrompts(2, 8, layers=(1, 1)), ValueError, "`layers` must contain at"),
        (lambda: fp.LayeredPrompts(2, 8, layers=(0, -1)), ValueError, "`layers` must be at least"),
        (lambda: fp.LayeredPrompts(2, 8, layers=(0, 1.0)), TypeError, "`layers` must be an"),
        (lambda: fp.LayeredPrompts(2, 8, layers=(True,)), TypeError, "`layers` must be an"),
        (lambda: fp.ShallowPrompts(2, 8, patch_size=0), ValueError, "`patch_size` must be at"),
        (lambda: fp.ShallowPrompts(2, 8, patch_size=(4, 0)), ValueError, "`patch_size` must be at"),
        (lambda: fp.ShallowPrompts(2, 8, patch_size=4.0), TypeError, "`patch_size` must be an"),
        (lambda: fp.ShallowPrompts(2, 8, patch_size=b"xx"), TypeError, "`patch_size` must be an"),
        (lambda: fp.ShallowPrompts(2, 8, patch_size=(4,)), ValueError, "`patch_size` must be one"),
        (lambda: fp.GroupPrompts(0, 1, 8, layers=(0,)), ValueError, "`num_groups` must be at"),
        (lambda: fp.GroupPrompts(2.0, 1, 8, layers=(0,)), TypeError, "`num_groups` must be an"),
        (lambda: fp.GroupPrompts(5, -1, 8, layers=(0,)), ValueError, "`num_prompts` must be at"),
        (lambda: fp.GroupPrompts(5, 1, 0, layers=(0,)), ValueError, "`dim` must be at least 1;"),
        (lambda: fp.GroupPrompts(5, 1, 8, layers=()), ValueError, "`layers` must contain at least"),
        (lambda: fp.GroupPrompts(5, 1, 8, layers=(4, 4)), ValueError, "`layers` must contain at"),
        (lambda: fp.GroupPrompts(5, 1, 8, layers=(0,), patch_size=0), ValueError, "`patch_size`"),
        (lambda: fp.LayeredPrompts(2, 8, layers=(0,), replace="x"), TypeError, "`replace` must be"),
        (lambda: fp.GroupPrompts(5, 1, 8, layers=(0,), replace=1), TypeError, "`replace` must be"),
        *(
            (make, TypeError, "`generator` must be a torch.Generator; got Generator(PCG64)")
            for make in DRAWN_BY_NUMPY
        ),
        (lambda: fp.PadPrompts(0), ValueError, "`image_size` must be at least 1; got 0."),
        (lambda: fp.PadPrompts((8, 8.0)), TypeError, "`image_size` must be an integer; got 8.0"),
        (lambda: fp.PadPrompts(None), TypeError, "`image_size` must be an integer; got None"),
        (lambda: fp.PadPrompts((3, 8, 8)), ValueError, "`image_size` must be one number or"),
        (lambda: fp.PadPrompts(8, padding=0), ValueError, "`padding` must be at least 1; got 0."),
        (lambda: fp.PadPrompts(8, padding=1.5), TypeError, "`padding` must be an integer; got 1.5"),
        (lambda: fp.PadPrompts(8, mean=None), TypeError, "`mean` must be a sequence of numbers;"),
        (
            lambda: fp.PadPrompts(8)(torch.zeros(1, 3, 8, 8, device="meta")),
            ValueError,
            "`images` mu",
        ),
        (lambda: fp.ContextPrompts(8, init="a photo of a"), TypeError, "(length, dim), such as"),
        (lambda: fp.PadPrompts(8, mean=(0.5,)), ValueError, "`std` must have one entry for each"),
        (lambda: fp.PadPrompts(8, mean=(), std=()), ValueError, "`std` must have one entry for"),
        (lambda: fp.PadPrompts(8, mean=(0.5,), std=(0.0,)), ValueError, "`std` must be above 0;"),
        (lambda: fp.PadPrompts(8, mean=(float("nan"),), std=(1.0,)), ValueError, "`mean` must be"),
        (lambda: fp.PadPrompts(8, mean=("a",), std=(1.0,)), TypeError, "`mean` must be a number;"),
    ],
)
def test_prompts_refuse_bad_sizes(make, error, message):
    with raises(error, message):
        make()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda trunk: fp.LayeredPrompts(2, trunk, layers=(0, 3)), ValueError, "blocks 0 to 2"),
        (lambda trunk: fp.GroupPrompts(2, 2, trunk, layers=(4,)), ValueError, "`layers` must be"),
        (lambda trunk: fp.DeepPrompts(2, trunk, 4), ValueError, "`layers` must be among the"),
        (lambda trunk: fp.DeepPrompts(2, trunk.dim), TypeError, "`depth` must be an integer,"),
        *(
            (
                make,
                TypeError,
                "`num_prompts` must be an integer; the trunk comes after it; got a _V",
            )
            for make in (
                lambda trunk: fp.DeepPrompts(trunk, 4),
                lambda trunk: fp.ShallowPrompts(trunk, 4),
            )
        ),
        (lambda trunk: fp.GroupPrompts(4, trunk, 1, layers=(0,)), TypeError, "`num_prompts` must"),
        (lambda trunk: fp.ShallowPrompts(2, trunk.model), TypeError, "`dim` must be an integer or"),
    ],
)
def test_prompts_of_a_trunk_refuse_what_does_not_fit_it(make, error, message, trunk):
    with raises(error, message):
        make(trunk)


@pytest.mark.bad_input  # the hook refuses NumPy integers
def test_sizes_may_be_numpy_integers():
    assert fp.PadPrompts(np.int64(8), padding=np.int32(1)).rows.shape == (3, 2, 10)
    assert fp.LayeredPrompts(
        np.int64(2), np.int64(8), layers=np.arange(2), patch_size=np.int64(4)
    ).tokens.shape == (2, 2, 8)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (torch.tensor([0, 4]), ValueError, "`indices` must lie in [0, 4); got values from 0 to 4."),
        (torch.tensor([-1]), ValueError, "`indices` must lie in [0, 4); got values from -1 to -1."),
        (torch.tensor([0.0]), TypeError, "`indices` must be integers of shape (batch,); got a"),
        (torch.tensor([True]), TypeError, "`indices` must be integers of shape (batch,); got a"),
        (torch.tensor([[0]]), TypeError, "`indices` must be integers of shape (batch,); got a"),
        (2, TypeError, "`indices` must be integers of shape (batch,); got 2 (int)."),
        (torch.tensor([1], device="meta"), ValueError, "`indices` must be on the device cpu;"),
    ],
)
def test_group_prompts_refuse_groups_that_do_not_exist(indices, error, message):
    with raises(error, message):
        fp.GroupPrompts(4, 1, DIM, layers=(0,))(indices)
