"""The papers' calls: their page has what they differ in from the defaults, and their own block."""

import dataclasses
import inspect
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt import methods
from fedprompt.methods import papers
from refusals import refused
from tiny_federations import clip_federation, trunk

PAGES = Path(__file__).parents[2] / "docs" / "methods"
KINDS = {
    "fedhpl": (methods.VitSetting, methods.fedhpl),
    "sgpt": (methods.VitSetting, methods.sgpt),
    "fedl2g": (methods.NetworkSetting, methods.fedl2g_l),
    "fedotp": (methods.ClipSetting, methods.fedotp),
}


def shown(value):
    if isinstance(value, partial):
        options = [f"{name.replace('_', ' ')} {value:g}" for name, value in value.keywords.items()]
        return ", ".join([value.func.__name__, *options])
    return (
        f"{len(value)} clients" if isinstance(value, range) else getattr(value, "__name__", value)
    )


MEANT = {
    "epochs": 1,
    "cohort_size": "all",
    "clients": "all",
    "key_decay": "`decay`",
    "solver": "Newton's method",
}


def table(paper):
    """Return the rows of values that differ from the defaults."""
    kind, make = KINDS[paper]
    options = inspect.signature(make).parameters
    defaults = {name: option.default for name, option in options.items()}
    defaults |= {each.name: each.default for each in dataclasses.fields(kind)}
    rows = ["| argument | paper | our default |", "|---|---|---|"]
    printed: papers.Printed = papers.PRINTED[paper]
    for name, value in (printed.fields | printed.arguments).items():
        default = "none" if defaults[name] is dataclasses.MISSING else defaults[name]
        default = MEANT.get(name, default) if default in (None, ()) else default
        if default != value:
            default = "by depth" if default == () else shown(default)
            rows.append(f"| `{name}` | {shown(value)} | {default} |")
    return "\n".join(rows)


@pytest.mark.parametrize("paper", KINDS)
def test_the_page_of_a_paper_has_the_values_that_differ_from_our_defaults(paper):
    assert table(paper) in (PAGES / f"{paper}.md").read_text(), table(paper)


IMAGES, LABELS = torch.rand(33, 3, 8, 8), torch.arange(33) % 3
SHARDS = {0: torch.arange(7), 1: torch.arange(7, 19), 2: torch.arange(19, 33)}


def small(width=8):
    return nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def uses(method, federation, client=1):
    """Count how often a client's training reads each of its images in a round."""
    data, seen = federation.data(method.setting, client, 0), Counter()

    def inputs_at(chosen):
        seen.update(chosen.tolist())
        return data.inputs_at(chosen)

    return data, dataclasses.replace(data, inputs_at=inputs_at), seen


@pytest.mark.parametrize("changes", [{}, {"epochs": 3}, {"batch_size": 5, "epochs": 2}])
def test_an_epoch_of_fedhpl_uses_each_image_once(changes):
    one = {"num_classes": 3, "clients": range(3), "rounds": 1}
    frozen = partial(fp.PadPrompts, 8, padding=1, mean=[0.0] * 3, std=[1.0] * 3)
    method = papers.fedhpl([small()], border=frozen, num_features=8, **one, **changes)
    data, counted, seen = uses(method, methods.Federation(IMAGES, LABELS, SHARDS))
    assert len([*counted.batches()]) == data.steps
    assert len(seen) == 12
    assert set(seen.values()) == {changes.get("epochs", 1)}


def test_each_block_of_sgpt_uses_each_image_as_often_as_the_setting_says():
    layers = {"shared_layers": [0], "group_layers": [1], "num_groups": 2, "batch_size": 5}
    method = papers.sgpt(trunk(8), num_classes=3, clients=range(3), cohort_size=3, **layers)
    data, counted, seen = uses(method, methods.Federation(IMAGES, LABELS, SHARDS))
    for block, batches in enumerate(counted.phases(2), start=1):
        assert len([*batches]) == data.steps == 15
        assert set(seen.values()) == {5 * block}


def test_the_last_batch_is_dropped_unless_it_is_the_only_one():
    method = papers.fedl2g([small], num_classes=3, clients=range(3), num_features=8, epochs=2)
    federation = methods.Federation(IMAGES, LABELS, SHARDS)
    steps = [federation.data(method.setting, client, 0).steps for client in range(3)]
    assert steps == [2, 2, 2]  # of 7, 12 and 14 images in batches of 10
    _, counted, seen = uses(method, federation, client=2)
    assert [len(labels) for _, labels in counted.batches()] == [10, 10]
    assert max(seen.values()) <= 2
    among = [*federation.data(method.setting, 2, 0).batches(among=torch.arange(3))]
    assert [len(labels) for _, labels in among] == [3, 3]


def test_a_call_has_the_printed_values_and_takes_others():
    made = clip_federation()
    call = partial(papers.fedotp, made.tower, class_names=list(made.class_names), scale=10.0)
    assert call().setting.epochs == 5
    assert call(steps=3).setting.epochs is None
    assert papers.sgpt(
        trunk(8), num_classes=3, domains=4, shared_layers=[0], group_layers=[1], query_depth=1
    ).setting.clients == range(4)
    assert papers.fedl2g([small], num_classes=3, by_features=True).server.state["guides"].shape == (
        3,
        512,
    )


@pytest.mark.parametrize("epsilon", [1.0, 2.0])
def test_epsilon_of_fedotp_reaches_the_solver_of_the_paper(epsilon):
    made = clip_federation(clients=[0])
    call = partial(papers.fedotp, made.tower, class_names=list(made.class_names), scale=10.0)
    solver = partial(fp.transport.dykstra, epsilon=epsilon, tolerance=1e-3, max_iterations=99)
    budget = {"clients": [0], "rounds": 1, "epochs": 1, "length": 4}
    federation = methods.Federation(made.inputs, made.labels, made.shards)
    pair = [
        [*fp.run_rounds(call(**budget, **given), federation)][-1].clients["0"]
        for given in ({"epsilon": epsilon}, {"solver": solver})
    ]
    assert all(torch.equal(value, pair[1][name]) for name, value in pair[0].items())


test_wrong_values_are_refused_by_name = refused(globals())("""
papers.fedhpl([TRUNK], num_classes=3, lr=1) -> ValueError: `changes` must be fields of the setting
papers.sgpt(TRUNK, num_classes=3, domains=0) -> ValueError: `domains` must be at least 1; got 0
papers.fedl2g([small], num_classes=3, by_features=1) -> TypeError: `by_features` must be True or F
papers.fedl2g([small], num_classes=3, steps=2, epochs=2) -> ValueError: `steps` must be None with
papers.fedhpl([TRUNK], num_classes=3, epochs=0) -> ValueError: `epochs` must be at least 1; got 0
papers.sgpt(trunk(8), num_classes=3) -> ValueError: `shared_layers` and `group_layers` must be below
papers.fedl2g([small()], num_classes=3) -> TypeError: `networks[0]` must be functions that make one
papers.fedl2g([small], num_classes=3, by_features=True, num_features=None) -> ValueError: `num_f
papers.fedhpl([small], num_classes=3, border=small) -> TypeError: `networks[0]` must be networks
methods.head_tuning(WHOLE) -> ValueError: `setting` must have frozen networks, and so a `border`
methods.fedper(TWO) -> ValueError: `networks` must have one network, for a model that all c
methods.fedlora(WHOLE) -> ValueError: `setting` must be a VitSetting for `tune`; got a NetworkS
methods.fedvpt(WHOLE) -> ValueError: `setting` must be a VitSetting for a method whose prompts are
""")
TRUNK = trunk(8)
WHOLE = methods.NetworkSetting(networks=[small], num_features=8, num_classes=3, rounds=1)
TWO = dataclasses.replace(WHOLE, networks=[small, small])
