"""Bitwise equality of nested results."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def assert_same(actual: Any, expected: Any, *, ordered: bool = True, place: str = "") -> None:
    """Require bitwise identical tensors, and the same types, keys, dtypes and shapes, at any depth.

    Here -0 and 0 differ, and equal NaN values are equal. Use ``ordered=False`` for messages and
    states: their names have no order, and they can be any mapping.
    """
    if isinstance(expected, Mapping) and not ordered:
        assert isinstance(actual, Mapping), place
        assert set(actual) == set(expected), place
    else:
        assert type(actual) is type(expected), place
    if isinstance(expected, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), place
        assert torch.equal(
            *(
                tensor.detach().contiguous().flatten().view(torch.uint8)
                for tensor in (actual, expected)
            )
        ), place
    elif isinstance(expected, Mapping):
        if ordered:
            assert [(type(key), key) for key in actual] == [(type(key), key) for key in expected], (
                place
            )
        for key in expected:
            assert_same(actual[key], expected[key], ordered=ordered, place=f"{place}[{key!r}]")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), place
        for position, each in enumerate(expected):
            assert_same(actual[position], each, ordered=ordered, place=f"{place}[{position}]")
    else:
        assert repr(actual) == repr(expected), place
