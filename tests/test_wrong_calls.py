"""A sample of the wrong calls of ``wrong_calls.py``, and what that program counts as refused."""

import os
import warnings

import pytest
import torch

from good_calls import good_calls
from wrong_calls import outcome, outcomes

QUICK = ("transport.scores", "codecs", "aggregation.by_name", "metrics", "sampling", "messages")
"""Modules whose examples run in milliseconds."""

pytestmark = pytest.mark.bad_input


def test_of_a_sample_of_wrong_calls_none_is_silent_and_few_are_foreign(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, for complex numbers
        made = [one for call in good_calls(QUICK) for one in outcomes(call, every=7)]
    kinds = [one.kind for one in made]
    assert len(made) > 500
    assert [str(one) for one in made if one.kind == "silent"] == []
    assert kinds.count("foreign") <= 0.02 * len(made)
    assert not os.listdir(tmp_path)


def test_errors_of_torch_and_errors_that_do_not_name_the_argument_are_foreign():
    (call,) = (call for call in good_calls(("sampling",)) if call.name == "sample_clients")

    def torch_error(clients, *, size, generator):
        return torch.ones(2) @ torch.ones(size)

    def other_error(clients, *, size, generator):
        raise ValueError("`clients` must be known")

    for function, kind in ((torch_error, "foreign"), (other_error, "foreign")):
        assert outcome(call._replace(function=function), "size", "object()").kind == kind
    taken = call._replace(function=lambda clients, *, size, generator: size)
    assert outcome(taken, "size", "object()").kind == "silent"
    assert outcome(taken, "size", "2").kind == "legal"
    call.arguments.arguments["size"] = -1
    assert outcome(call, "size", "-1").kind == "refused"
