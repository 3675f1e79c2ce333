"""Nouns keep their law when they are built, so no aggregator, codec or encoder tests it again."""

import copy
import pickle

import pytest
import torch
from torch import ones, zeros

import fedprompt as fp
import fedprompt._nouns as nouns  # noqa: F401 - for the table
from refusals import refused

ENTRY = fp.Weighted(torch.tensor([[1.0, 2.0], [torch.nan, 4.0]]), torch.tensor([3.0, 0.0]))


def test_it_is_a_value_and_a_weight_for_each_row():
    value, weight = ENTRY
    assert value.shape == (2, 2)
    assert weight.tolist() == [3.0, 0.0]


def test_one_weight_may_stand_for_the_whole_value():
    assert fp.Weighted(ones(2, 3), torch.tensor(1.0)).weight.shape == ()


def test_known_has_zeros_in_the_rows_of_weight_0_whatever_they_hold():
    assert ENTRY.known.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert ENTRY.rows.tolist() == [[True], [False]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda entry: pickle.loads(pickle.dumps(entry))])
def test_a_copy_is_one_too(copied):
    again = copied(ENTRY)
    assert type(again) is fp.Weighted
    assert torch.equal(again.known, ENTRY.known)


def test_parts_that_were_just_computed_are_not_checked_again():
    assert fp.Weighted._make(("value", "weight")).value == "value"


REFUSED = """
fp.Weighted(ones(2, 3), ones(3)) -> ValueError: `weight` must have shape (), (2,) or (2, 3), the
fp.Weighted(ones(4, 1, 2, 3), ones(1, 2)) -> ValueError: `weight` must have shape (), (4,), (4, 1),
fp.Weighted(ones(()), ones(1)) -> ValueError: `weight` must have shape (), the first axes of
fp.Weighted(ones(2).long(), ones(2)) -> TypeError: `value` must be a floating-point tensor; got a
fp.Weighted([1.0], ones(1)) -> TypeError: `value` must be a floating-point tensor; got a list
fp.Weighted(ones(2).to_sparse(), ones(2)) -> TypeError: `value` must be a dense tensor; got one with
fp.Weighted(zeros(2), zeros(2, device='meta')) -> ValueError: `weight` must be on the device of
fp.Weighted(zeros(2), 1) -> TypeError: `weight` must be a floating-point tensor; got 1 (int)
stream(zeros(2, 3), 1) -> TypeError: `replace` must be True or False; got 1 (int)
stream(zeros(3)) -> ValueError: `layers[0]` must have shape (prompts, dim), with axes in front
stream(zeros(2, 3).long()) -> TypeError: `layers[0]` must be a floating-point tensor
stream(zeros(2, 3), layer=-1) -> ValueError: `layers` must be at least 0; got -1
stream(zeros(2, 3), layer=0.5) -> TypeError: `layers` must be an integer; got 0.5
fp.interfaces.PromptStream([zeros(2, 3)]) -> TypeError: `layers` must map layers to tokens
names(pad=zeros(8) / 0) -> ValueError: `pad` must be finite; got 8 entries of 8 that are not.
names(pad=zeros(2)) -> ValueError: `pad` must be as wide and where `tokens` is
names(length=(3,)) -> ValueError: `length` must be a tuple for 2 names
names(ending=(-1, 2)) -> ValueError: `ending` must be at least 0; got -1
names(context_length=0) -> ValueError: `context_length` must be at least 1; got 0
names(causal=1) -> TypeError: `causal` must be True or False
server(state=[]) -> TypeError: `state` must be a tree of a dict; got a list of length 0
server(answer=1) -> TypeError: `answer` must be a function; got 1 (int)
server(step=None) -> TypeError: `step` must be a function; got None (NoneType)
server(changes='no') -> TypeError: `changes` must be a bool or None; got 'no' (str)
method(client={}) -> TypeError: `client` must be a function; got a dict of length 0
method(server={}) -> TypeError: `server` must be a Server(state, answer, step); got a dict
method(predict=1) -> TypeError: `predict` must be a function; got 1 (int)
method(exchanges=0) -> ValueError: `exchanges` must be at least 1; got 0
method(form={}) -> TypeError: `form` must be a function, by which messages are decoded; got a dict
nouns.stream('s', stream(zeros(1, 1, 2, 8))) -> ValueError: `s.layers[0]` must have shape (prompts,
nouns.stream('s', stream(zeros(2, 8)), 9) -> ValueError: `s.layers[0]` must have shape (prompts, 9)
nouns.stream('s', stream([0.0])) -> TypeError: `s.layers[0]` must be a floating-point tensor
nouns.class_names(fp.interfaces.ClassNames(*range(8))) -> TypeError: `names.tokens` must be a float
nouns.value_of('v', {}, 'a', ENTRY) -> ValueError: `v` must have the name 'a'; got []
nouns.value_of('v', {'a': zeros(2, 3)}, 'a', ENTRY) -> ValueError: `v['a']` must have the shape of
method(wrappers='coded') -> TypeError: `wrappers` must be a tuple of names; got 'coded' (str)
"""


def server(**parts):
    return fp.Server(**{"state": {}, "answer": max, "step": max} | parts)


def method(**parts):
    return fp.Method(**{"client": max, "server": server(), "predict": max} | parts)


def stream(tokens, replace=False, layer=0):
    return fp.interfaces.PromptStream({layer: tokens}, replace)


def names(**parts):
    made = {"start": zeros(1, 8), "tokens": zeros(2, 4, 8), "length": (3, 4), "pad": zeros(8)}
    made |= {"context_length": 77, "causal": True, "names": ("a", "b"), "ending": (2, 2)}
    return fp.interfaces.ClassNames(**made | parts)


def test_a_class_may_have_no_tokens_at_its_end():
    assert names(length=(0, 4), ending=(0, 2)).ending == (0, 2)


def test_an_entry_without_tensors_may_stand_for_axes_or_shapes():
    assert fp.Weighted(0, None) == (0, None)
    found = torch.func.vmap(lambda entry: entry.known, in_dims=(fp.Weighted(0, 0),))(ENTRY)
    assert torch.equal(found, ENTRY.known)
    with pytest.raises(TypeError, match="must be a floating-point tensor; got 0"):
        fp.weighted_mean([fp.Weighted(0, 0)])


test_parts_that_do_not_fit_are_refused_when_it_is_made = refused(globals())(REFUSED)
