"""Control rows: what they send, and how many passes they take."""

import pytest
import torch

from sent_messages import sent_by
from tasks.controls import CONTROLS
from tasks.core import Row
from tasks.tuning import draws
from tiny_federations import federation_of, last


def made(name):
    entry = CONTROLS[name]
    return entry, federation_of(entry, entry.families[0], rounds=1)


@pytest.mark.parametrize("name", CONTROLS)
def test_only_averages_send_something(name):
    entry, federation = made(name)
    messages = sent_by(federation)
    last(entry.make, federation)
    sent = [{part.split(".")[0] for part in payload} for _, _, payload in messages.of("up")]
    expected = {"promptfl_csc": {"context"}, "fednorms": {"head", "tuned"}}.get(name, set())
    assert sent == [expected] * len(sent)
    assert sent


@pytest.mark.parametrize(("name", "times"), [("local_16", 2), ("local_24", 3)])
def test_local_rows_take_several_times_the_batches(name, times, monkeypatch):
    entry, federation = made(name)
    passes, backward = [], torch.Tensor.backward
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: passes.append(1) or backward(loss))
    last(entry.make, federation)
    assert len(passes) == times * federation.steps * federation.cohort_size


def test_a_control_row_has_the_rates_of_the_row_that_it_controls():
    rates = [
        [trial["learning_rate"] for trial in draws(Row("", name, {}), "clip")[1:]]
        for name in ("coop_csc", "fedapt")
    ]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 5
