"""Trials: fewer images of a shrunk run, cells, and the device of their networks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn

from fedprompt.compare.trials import Images, Trial, line_of, move
from fedprompt.methods import Federation, Setting
from other_device import other_device
from tiny_federations import vit_federation


def trial(rounds=7, steps=11, sizes=(101, 71, 10), tests=301, own=True):
    setting = Setting(num_classes=3, rounds=rounds, steps=steps, clients=[0, 1])
    total = sum(sizes)
    shards = dict(enumerate(torch.randperm(total).split(sizes)))
    federation = Federation(setting, torch.arange(total), torch.arange(total) % 3, shards)
    parts = [torch.tensor([300, 91, 90, 5]), torch.tensor([59, 60]), torch.arange(0)]
    cells = torch.arange(tests) * 5 % 6
    mixes = torch.ones(3, 6, dtype=torch.long)
    return Trial(setting, federation, torch.arange(tests), cells, mixes, own=parts if own else None)


@pytest.mark.parametrize(
    ("share", "rounds", "steps", "sizes", "tests", "own"),
    [
        (0.3, 3, 4, [31, 22, 10], 91, [[90, 5], [59, 60], []]),  # 0.3 of each, rounded up
        (0.01, 2, 2, [20, 20, 10], 60, [[5], [59], []]),  # the fewest of each
    ],
)
def test_a_shrunk_trial_has_a_share_of_everything(share, rounds, steps, sizes, tests, own):
    whole = trial()
    small = whole.shrunk(share)
    assert (small.setting.rounds, small.setting.steps) == (rounds, steps)
    assert small.federation.setting is small.setting
    for (client, shard), size in zip(small.federation.shards.items(), sizes, strict=True):
        assert torch.equal(shard, whole.federation.shards[client][:size])
        assert len(shard) == size
    assert torch.equal(small.test, whole.test[:tests])
    assert torch.equal(small.test_cells, whole.test_cells[:tests])
    assert [part.tolist() for part in small.own] == own
    assert trial(own=False).shrunk(share).own is None
    assert whole.shrunk(1) is whole


def test_clients_without_tests_are_not_tested():
    whole = trial()
    assert whole.tested == [0, 1]
    assert whole._replace(own=[*whole.own[1:]]).tested == [0]
    assert trial(own=False).tested == [0, 1]


def test_cells_are_pairs_of_domain_and_class_and_tests_have_the_shares_of_training_images():
    """Two domains of three classes. Client 0 has all images of a cell, or a third of them."""
    cells = torch.tensor([0, 1, 3, 3, 3, 5])
    side = Images(torch.arange(6), cells % 3, cells // 3)
    assert side.cells(3).tolist() == cells.tolist()
    some = side.at(torch.tensor([5, 2]))
    assert (some.pixels.tolist(), some.labels.tolist(), some.domains.tolist()) == (
        [5, 2],
        [2, 0],
        [1, 1],
    )
    tests = Images(*(part.repeat_interleave(3) for part in side))
    setting = Setting(num_classes=3, rounds=1, clients=[0, 1])
    for names in (("",), ("art", "photo")):
        made = Trial.of(setting, side, tests, [[0, 2], np.array([1, 3, 4, 5])], (7,), names)
        assert made.mixes.tolist() == [[1, 0, 0, 1, 0, 0], [0, 1, 0, 2, 0, 1]]
        assert torch.equal(made.test_cells, cells.repeat_interleave(3))
        assert (made.newcomers, made.domain_names) == ((7,), names)
        assert made.federation.data(0, 0).own()[1].tolist() == [0, 0]
        assert torch.equal(made.test, tests.pixels)
        own = made.divided_tests(np.random.default_rng(0)).own
        counts = [made.test_cells[part].bincount(minlength=6).tolist() for part in own]
        assert counts == [[3, 0, 0, 3, 0, 0], [0, 3, 0, 6, 0, 3]]
    some = made._replace(mixes=torch.tensor([[1, 1, 0, 1, 0, 1], [0] * 6])).divided_tests(
        np.random.default_rng(0)
    )
    assert [*map(len, some.own)] == [18, 0]  # a client without images has no tests
    more = Trial.of(setting, side, tests, [[0]], domain_names=("a", "b", "c"))
    assert more.mixes.shape == (1, 9)  # no image has the third domain


def test_networks_and_public_inputs_are_moved_and_on_the_cpu_nothing_is():
    setting = vit_federation()
    made = Trial(
        setting,
        Federation(setting, setting.inputs, setting.labels, setting.shards),
        *[torch.zeros(1, dtype=torch.long)] * 3,
    )
    assert made.on("cpu") is made
    inner = SimpleNamespace(embed=None, mask=torch.zeros(2))
    frozen = SimpleNamespace(model=nn.Linear(2, 2), around=inner, other=SimpleNamespace(x=3), n=1)
    own = SimpleNamespace(trunks=[frozen], clip=nn.Linear(1, 1))
    with other_device() as device:
        for network in (*own.trunks, own.clip, None):
            move(network, str(device))
        moved = [frozen.model.weight, inner.mask, own.clip.weight]
        assert {part.device for part in moved} == {device}


def test_an_error_is_one_line_without_its_full_stop():
    assert line_of("  one.\n\n two. \nthree") == "one. two"
    assert line_of("x" * 301) == "x" * 300
    named = [KeyError("a"), SystemExit(3), ValueError("b"), ValueError(), KeyError()]
    assert [*map(line_of, named)] == [
        "KeyError: 'a'",
        "SystemExit: 3",
        "b",
        "ValueError",
        "KeyError",
    ]
