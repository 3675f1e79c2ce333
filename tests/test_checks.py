"""Descriptions of arguments in errors."""

import numpy as np
import pytest
import torch

from errors import raises
from fedprompt import Weighted
from fedprompt._checks import (
    check_count,
    check_divisor,
    check_factor,
    check_finite,
    check_flag,
    check_floats,
    check_function,
    check_iterable,
    check_module,
    check_names,
    check_number,
    check_precision,
    check_sequence,
    check_stream,
    check_tensors,
    check_text,
    kind,
)
from fedprompt.interfaces import PromptStream


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


PLAIN = torch.ones(2)
LAYERS = {0: torch.ones(1, 2)}


@pytest.mark.parametrize(
    ("check", "arguments", "error", "message"),
    [
        (check_count, (2**63,), ValueError, "be below 2**63"),
        (check_number, (2**63,), ValueError, "be a float, or below 2**63 in magnitude"),
        (check_divisor, (1e-39,), ValueError, "be at least 1.17549e-38"),
        (check_divisor, (1e39,), ValueError, "be at most 3.40282e+38"),
        (check_factor, (-1.0,), ValueError, "be at least 0"),
        (check_function, (3,), TypeError, "be a function"),
        (check_flag, (1,), TypeError, "be True or False"),
        (check_text, (b"x",), TypeError, "be a string"),
        (check_module, (torch.nn.Linear,), TypeError, "be an nn.Module"),
        (check_names, ({3: PLAIN},), TypeError, "have strings as names"),
        (check_tensors, ({},), ValueError, "hold at least one name"),
        (check_tensors, ({"a": PLAIN / 0},), ValueError, "be finite"),
        (check_tensors, ({"a": PLAIN.long()},), TypeError, "be a floating-point tensor"),
        (check_sequence, ("abc", "names"), TypeError, "be a sequence of names"),
        (check_iterable, ({"a": 3}, "names"), TypeError, "be an iterable of names"),
        (check_floats, (PLAIN.to_sparse(),), TypeError, "be a dense tensor"),
        (check_floats, (PLAIN * torch.nan,), ValueError, "be finite"),
        (check_finite, (PLAIN.to("meta"),), TypeError, "be a dense tensor with numbers"),
        (check_stream, (PromptStream(LAYERS, 1),), TypeError, "be True or False"),
        (check_stream, (PromptStream(LAYERS), 3), ValueError, "have shape (prompts, 3) or"),
    ],
)
def test_shared_checks_name_the_argument_and_the_rule(check, arguments, error, message):
    with raises(error, "`it") as caught:
        check("it", *arguments)
    assert f" must {message}" in str(caught.value)


def test_on_another_device_than_the_cpu_numbers_are_not_read():
    check_floats("it", (PLAIN * torch.nan).to("meta"))
    check_precision("it", PLAIN.half(), "other", PLAIN)
    with raises(TypeError, "`it` must have the dtype of `other`, torch.float64"):
        check_precision("it", PLAIN, "other", PLAIN.double())
