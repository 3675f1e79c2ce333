"""Descriptions of arguments in errors."""

import numpy as np
import pytest
import torch

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from errors import raises
from fedprompt import Weighted
from refusals import check_refused, refusals


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (torch.ones(2, 3), "a float32 tensor of shape (2, 3)"),
        (np.ones(2), "a float64 array of shape (2,)"),
        ([1.0, 2.0], "a list of length 2"),
        (Weighted(torch.ones(1), torch.ones(1)), "a Weighted"),
        ("name", "'name' (str)"),
        (None, "None (NoneType)"),
        ("x" * 100, "a str"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), "a Sequential"),
    ],
)
def test_errors_print_short_values_but_no_collection_and_no_tensor(thing, text):
    assert check.kind(thing) == text


@pytest.mark.parametrize("wrong", [np.complex64(1j), np.complex128(1), 1j, True, np.bool_(True)])
def test_complex_numbers_and_booleans_are_not_numbers(wrong):
    with pytest.raises(TypeError, match="`rate` must be a number; got "):
        check.number("rate", wrong)
    for right in (np.float16(1), np.float64(1), np.int8(1), np.uint64(1)):
        check.number("rate", right, at_least=1, at_most=1)


PLAIN = torch.ones(2)
SHARDED = torch.ones(2)
SHARDED.placements = ()  # as of a DTensor
LAYERS = {0: torch.ones(1, 2)}


REFUSED = """
count('it', 2**63) -> ValueError: `it` must be below 2**63
number('it', 2**63) -> ValueError: `it` must be a float, or below 2**63 in magnitude
divisor('it', 1e-39) -> ValueError: `it` must be at least 1.17549e-38
divisor('it', 1e39) -> ValueError: `it` must be at most 3.40282e+38
factor('it', -1.0) -> ValueError: `it` must be at least 0
function('it', 3) -> TypeError: `it` must be a function
flag('it', 1) -> TypeError: `it` must be True or False
text('it', b'x') -> TypeError: `it` must be a string
module('it', torch.nn.Linear) -> TypeError: `it` must be an nn.Module
names('it', {3: PLAIN}) -> TypeError: `it` must have strings as names
tensors('it', {}) -> ValueError: `it` must hold at least one name
tensors('it', {'a': PLAIN / 0}) -> ValueError: `it['a']` must be finite
tensors('it', {'a': PLAIN.to('meta')}, sync=False) -> TypeError: `it['a']` must be a dense tensor
tensors('it', {'a': PLAIN.long()}) -> TypeError: `it['a']` must be a floating-point tensor
sequence('it', 'abc', 'names') -> TypeError: `it` must be a sequence of names
iterable('it', {'a': 3}, 'names') -> TypeError: `it` must be an iterable of names
number_tensor('it', PLAIN.to_sparse()) -> TypeError: `it` must be a dense tensor
number_tensor('it', SHARDED) -> TypeError: `it` must be a tensor of this process; gather it first
number_tensor('it', PLAIN * torch.nan, read=True) -> ValueError: `it` must be finite
labels('it', PLAIN.long().to_sparse(), 2) -> TypeError: `it` must be a dense tensor; got one with
labels('it', PLAIN.long().to('meta'), 2) -> TypeError: `it` must be a dense tensor with numbers
images(torch.ones(1, 3, 2, 2).to_sparse()) -> TypeError: `images` must be a dense tensor; got one
tensor('it', PLAIN.to_sparse(), torch.float32, (2,)) -> TypeError: `it` must be a dense tensor
finite('it', (PLAIN * torch.nan).to(torch.float8_e5m2)) -> ValueError: `it` must be finite; got 2
finite('it', PLAIN.to('meta')) -> TypeError: `it` must be a dense tensor with numbers
stream('it', PromptStream(LAYERS), 3) -> ValueError: must have shape (prompts, 3) or
"""


@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_shared_checks_name_the_argument_and_the_rule(call, error, message):
    check_refused(call, error, message, vars(nouns) | vars(check) | globals())


def test_on_another_device_than_the_cpu_numbers_are_not_read():
    check.number_tensor("it", (PLAIN * torch.nan).to("meta"), read=True)
    check.comparable("it", PLAIN.half(), "other", PLAIN)
    with raises(TypeError, "`it` must have the dtype of `other`, torch.float64"):
        check.comparable("it", PLAIN, "other", PLAIN.double())
