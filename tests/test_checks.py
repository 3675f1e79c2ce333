"""Descriptions of arguments in errors."""

import numpy as np
import pytest
import torch

from fedprompt import Weighted
from fedprompt._checks import check_number, kind


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (torch.ones(2, 3), "a float32 tensor of shape (2, 3)"),
        (np.ones(2), "a float64 array of shape (2,)"),
        ([1.0, 2.0], "a list of length 2"),
        ((torch.ones(2),), "a tuple of length 1"),
        ({"head": 1.0}, "a dict of length 1"),
        ({}, "a dict of length 0"),
        ({"a", "b"}, "a set of length 2"),
        (range(3), "a range of length 3"),
        (Weighted(torch.ones(1), torch.ones(1)), "a Weighted"),
        ("name", "'name' (str)"),
        (b"blob", "b'blob' (bytes)"),
        (0.5, "0.5 (float)"),
        (None, "None (NoneType)"),
        ("x" * 100, "a str"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "a Sequential"),
    ],
)
def test_errors_print_short_values_but_no_collection_and_no_tensor(thing, text):
    assert kind(thing) == text


@pytest.mark.parametrize("wrong", [np.complex64(1j), np.complex128(1), 1j, True, np.bool_(True)])
def test_complex_numbers_and_booleans_are_not_numbers(wrong):
    with pytest.raises(TypeError, match="`rate` must be a number; got "):
        check_number("rate", wrong)
    for right in (np.float16(1), np.float64(1), np.int8(1), np.uint64(1)):
        check_number("rate", right, at_least=1, at_most=1)
