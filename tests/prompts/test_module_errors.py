"""Errors of prompt modules."""

import numpy as np
import pytest
import torch

from errors import raises
from fedprompt import (
    ContextPrompts,
    DeepPrompts,
    GroupPrompts,
    LayeredPrompts,
    PadPrompts,
    ShallowPrompts,
)

DIM = 12


DRAWN_BY_NUMPY = [
    lambda: LayeredPrompts(2, 8, layers=(0,), generator=np.random.default_rng(0)),
    lambda: ShallowPrompts(2, 8, generator=np.random.default_rng(0)),
    lambda: DeepPrompts(2, 8, 3, generator=np.random.default_rng(0)),
    lambda: GroupPrompts(5, 1, 8, layers=(0,), generator=np.random.default_rng(0)),
    lambda: PadPrompts(8, generator=np.random.default_rng(0)),
    lambda: ContextPrompts(8, generator=np.random.default_rng(0)),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: LayeredPrompts(-1, 8, layers=(0,)),
            ValueError,
            "`num_prompts` must be at least 0; got -1.",
        ),
        (
            lambda: ShallowPrompts(2.0, 8),
            TypeError,
            "`num_prompts` must be an integer; got 2.0 (float).",
        ),
        (
            lambda: ShallowPrompts(True, 8),
            TypeError,
            "`num_prompts` must be an integer; got True (bool).",
        ),
        (lambda: ShallowPrompts(2, 0), ValueError, "`dim` must be at least 1; got 0."),
        (
            lambda: ShallowPrompts(2, "8"),
            TypeError,
            "`dim` must be an integer or a Trunk; got '8' (str).",
        ),
        (lambda: DeepPrompts(2, 8, 0), ValueError, "`depth` must be at least 1; got 0."),
        (lambda: DeepPrompts(2, 8, 1.5), TypeError, "`depth` must be an integer; got 1.5 (float)."),
        (
            lambda: LayeredPrompts(2, 8, layers=3),
            TypeError,
            "`layers` must be layer indices, such as range(4) or (0, 3); got 3 (int).",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=()),
            ValueError,
            "`layers` must contain at least one layer, and none twice; got ().",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=(1, 1)),
            ValueError,
            "`layers` must contain at least one layer, and none twice; got (1, 1).",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=(0, -1)),
            ValueError,
            "`layers` must be at least 0; got -1.",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=(0, 1.0)),
            TypeError,
            "`layers` must be an integer; got 1.0 (float).",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=(True,)),
            TypeError,
            "`layers` must be an integer; got True (bool).",
        ),
        (
            lambda: ShallowPrompts(2, 8, patch_size=0),
            ValueError,
            "`patch_size` must be at least 1; got 0.",
        ),
        (
            lambda: ShallowPrompts(2, 8, patch_size=(4, 0)),
            ValueError,
            "`patch_size` must be at least 1; got 0.",
        ),
        (
            lambda: ShallowPrompts(2, 8, patch_size=4.0),
            TypeError,
            "`patch_size` must be an integer; got 4.0 (float).",
        ),
        (
            lambda: ShallowPrompts(2, 8, patch_size=b"xx"),
            TypeError,
            "`patch_size` must be an integer; got b'xx' (bytes).",
        ),
        (
            lambda: ShallowPrompts(2, 8, patch_size=(4,)),
            ValueError,
            "`patch_size` must be one number or (height, width); got a tuple of length 1.",
        ),
        (
            lambda: GroupPrompts(0, 1, 8, layers=(0,)),
            ValueError,
            "`num_groups` must be at least 1; got 0.",
        ),
        (
            lambda: GroupPrompts(2.0, 1, 8, layers=(0,)),
            TypeError,
            "`num_groups` must be an integer; got 2.0 (float).",
        ),
        (
            lambda: GroupPrompts(5, -1, 8, layers=(0,)),
            ValueError,
            "`num_prompts` must be at least 0; got -1.",
        ),
        (
            lambda: GroupPrompts(5, 1, 0, layers=(0,)),
            ValueError,
            "`dim` must be at least 1; got 0.",
        ),
        (
            lambda: GroupPrompts(5, 1, 8, layers=()),
            ValueError,
            "`layers` must contain at least one layer, and none twice; got ().",
        ),
        (
            lambda: GroupPrompts(5, 1, 8, layers=(4, 4)),
            ValueError,
            "`layers` must contain at least one layer, and none twice; got (4, 4).",
        ),
        (
            lambda: GroupPrompts(5, 1, 8, layers=(0,), patch_size=0),
            ValueError,
            "`patch_size` must be at least 1; got 0.",
        ),
        (
            lambda: LayeredPrompts(2, 8, layers=(0,), replace="x"),
            TypeError,
            "`replace` must be True or False; got 'x' (str).",
        ),
        (
            lambda: GroupPrompts(5, 1, 8, layers=(0,), replace=1),
            TypeError,
            "`replace` must be True or False; got 1 (int).",
        ),
        *(
            (make, TypeError, "`generator` must be a torch.Generator; got Generator(PCG64)")
            for make in DRAWN_BY_NUMPY
        ),
        (lambda: PadPrompts(0), ValueError, "`image_size` must be at least 1; got 0."),
        (
            lambda: PadPrompts((8, 8.0)),
            TypeError,
            "`image_size` must be an integer; got 8.0 (float).",
        ),
        (
            lambda: PadPrompts(None),
            TypeError,
            "`image_size` must be an integer; got None (NoneType).",
        ),
        (
            lambda: PadPrompts((3, 8, 8)),
            ValueError,
            "`image_size` must be one number or (height, width); got a tuple of length 3.",
        ),
        (lambda: PadPrompts(8, padding=0), ValueError, "`padding` must be at least 1; got 0."),
        (
            lambda: PadPrompts(8, padding=1.5),
            TypeError,
            "`padding` must be an integer; got 1.5 (float).",
        ),
        (
            lambda: PadPrompts(8, mean=None),
            TypeError,
            "`mean` must be a sequence of numbers; got None (NoneType).",
        ),
        (
            lambda: PadPrompts(8)(torch.zeros(1, 3, 8, 8, device="meta")),
            ValueError,
            "`images` must be on the prompts' device cpu; got meta.",
        ),
        (
            lambda: ContextPrompts(8, init="a photo of a"),
            TypeError,
            "(length, dim), such as tower.words('a photo of a'); got 'a photo of a' (str).",
        ),
        (
            lambda: PadPrompts(8, mean=(0.5,)),
            ValueError,
            "`std` must have one entry for each of the 1 channels of `mean`",
        ),
        (
            lambda: PadPrompts(8, mean=(), std=()),
            ValueError,
            "`std` must have one entry for each of the 0 channels of `mean`, at least one",
        ),
        (
            lambda: PadPrompts(8, mean=(0.5,), std=(0.0,)),
            ValueError,
            "`std` must be above 0; got 0.0.",
        ),
        (
            lambda: PadPrompts(8, mean=(float("nan"),), std=(1.0,)),
            ValueError,
            "`mean` must be finite; got nan.",
        ),
        (
            lambda: PadPrompts(8, mean=("a",), std=(1.0,)),
            TypeError,
            "`mean` must be a number; got 'a' (str).",
        ),
    ],
)
def test_prompts_refuse_bad_sizes(make, error, message):
    with raises(error, message):
        make()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda trunk: LayeredPrompts(2, trunk, layers=(0, 3)),
            ValueError,
            "`layers` must be among the trunk's 3 blocks 0 to 2; got 3.",
        ),
        (
            lambda trunk: GroupPrompts(2, 2, trunk, layers=(4,)),
            ValueError,
            "`layers` must be among the trunk's 3 blocks 0 to 2; got 4.",
        ),
        (
            lambda trunk: DeepPrompts(2, trunk, 4),
            ValueError,
            "`layers` must be among the trunk's 3 blocks 0 to 2; got 3.",
        ),
        (
            lambda trunk: DeepPrompts(2, trunk.dim),
            TypeError,
            "`depth` must be an integer, unless `dim` is a trunk; got None (NoneType).",
        ),
        *(
            (
                make,
                TypeError,
                "`num_prompts` must be an integer; the trunk comes after it; got a _V",
            )
            for make in (
                lambda trunk: DeepPrompts(trunk, 4),
                lambda trunk: ShallowPrompts(trunk, 4),
            )
        ),
        (
            lambda trunk: GroupPrompts(4, trunk, 1, layers=(0,)),
            TypeError,
            "`num_prompts` must be an integer; the trunk comes after it; got a _ViTTrunk.",
        ),
        (
            lambda trunk: ShallowPrompts(2, trunk.model),
            TypeError,
            "`dim` must be an integer or a Trunk; got a VisionTransformer.",
        ),
    ],
)
def test_prompts_of_a_trunk_refuse_what_does_not_fit_it(make, error, message, trunk):
    with raises(error, message):
        make(trunk)


@pytest.mark.bad_input  # the hook refuses NumPy integers
def test_sizes_may_be_numpy_integers():
    assert PadPrompts(np.int64(8), padding=np.int32(1)).rows.shape == (3, 2, 10)
    assert LayeredPrompts(
        np.int64(2), np.int64(8), layers=np.arange(2), patch_size=np.int64(4)
    ).tokens.shape == (2, 2, 8)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (torch.tensor([0, 4]), ValueError, "`indices` must lie in [0, 4); got values from 0 to 4."),
        (torch.tensor([-1]), ValueError, "`indices` must lie in [0, 4); got values from -1 to -1."),
        (
            torch.tensor([0.0]),
            TypeError,
            "`indices` must be integers of shape (batch,); got a float32 tensor of shape (1,).",
        ),
        (
            torch.tensor([True]),
            TypeError,
            "`indices` must be integers of shape (batch,); got a bool tensor of shape (1,).",
        ),
        (
            torch.tensor([[0]]),
            TypeError,
            "`indices` must be integers of shape (batch,); got a int64 tensor of shape (1, 1).",
        ),
        (2, TypeError, "`indices` must be integers of shape (batch,); got 2 (int)."),
        (
            torch.tensor([1], device="meta"),
            ValueError,
            "`indices` must be on the device cpu; got meta.",
        ),
    ],
)
def test_group_prompts_refuse_groups_that_do_not_exist(indices, error, message):
    with raises(error, message):
        GroupPrompts(4, 1, DIM, layers=(0,))(indices)
