"""Training alone: its rows, and batches of its longer runs."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.compare import alone
from fedprompt.methods import METHODS, Federation, Setting
from same import assert_same


def test_further_times_have_further_batches():
    setting = Setting(num_classes=2, rounds=3, steps=2, batch_size=3, clients=[0, 1])
    inputs, labels = torch.randn(20, 4), torch.arange(20) % 2
    shards = dict(enumerate(torch.arange(20).split(10)))
    data = Federation(setting, inputs, labels, shards).data(1, 2)
    given, expected = nn.Linear(4, 2), nn.Linear(4, 2)
    fp.load_values(expected, fp.snapshot(given))
    alone.train(given, data, 0.1, times=3)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1)
    for purpose in ("batches", "batches 1", "batches 2"):
        for images, classes in data.batches(purpose=purpose):
            optimizer.zero_grad()
            F.cross_entropy(expected(images), classes).backward()
            optimizer.step()
    assert_same(fp.snapshot(given), fp.snapshot(expected))


@pytest.mark.parametrize(
    ("family", "usual"), [("one model", "local"), ("mixed models", "local"), ("CLIP", "coop")]
)
def test_rows_have_the_defaults_of_the_family_and_their_own_values(family, usual):
    once, longer = alone.row(family), alone.row(family, 3, learning_rate=0.5)
    defaults = METHODS[usual].defaults
    assert (once.title, once.method) == ("Training alone", "longer")
    assert once.values == {**defaults, "times": 1}
    assert longer.title == "Training alone, 3 times as long"
    assert longer.values == {**defaults, "learning_rate": 0.5, "times": 3}
    assert (alone.TITLES[-1], len(alone.TITLES)) == ("Training alone, 99 times as long", 99)
    assert once.personalized
    assert family in once.entry.families
