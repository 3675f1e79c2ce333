"""Payloads and values are detached copies of parameters, and their bytes are counted."""

import pytest
import torch
import torch.nn as nn

from fedprompt import ShallowPrompts, Weighted, collect, num_bytes, snapshot
from named_model import NAMES, Model, tensors_of
from same import assert_identical


def test_a_frozen_backbone_that_is_sent_causes_a_warning_with_its_bytes():
    """The backbone has 4 x 3 + 4 numbers of 4 bytes, the head 2 x 4 + 2."""
    backbone = nn.Sequential(nn.Linear(3, 4)).requires_grad_(False)
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(4, 2)})
    with pytest.warns(
        UserWarning,
        match=r"`module` has 2 frozen parameters under 'backbone\.0', which are sent, too: "
        r"64 of 104 bytes\. Pass `only`, such as only=\['head'\]",
    ):
        collect(model, weight=1)
    model["head"].bias.requires_grad_(False)
    with pytest.warns(UserWarning, match="has 3 frozen parameters, which are sent, too: 72 of 104"):
        collect(model, weight=1)
    model["backbone"] = nn.Linear(30, 1, bias=False).requires_grad_(False)
    model["head"].bias.requires_grad_(True)
    text = r"has 1 frozen parameters under 'backbone\.weight', which are sent, too: 120 of 160"
    with pytest.warns(UserWarning, match=text):
        collect(model, weight=1)
    # Warnings are errors in tests, so none of these warns.
    model["backbone"] = backbone
    collect(model, weight=1, only=["backbone", "head"])
    collect(backbone, weight=1)
    model["head"] = nn.Linear(7, 2)  # as many bytes as the backbone
    collect(model, weight=1)


def test_all_parameters_are_sent_once_under_their_names_and_buffers_never():
    model = Model()
    assert list(snapshot(model)) == NAMES
    assert list(collect(model, weight=3)) == NAMES


def test_weights_are_float32_and_values_keep_their_dtype():
    rows = {"keys": torch.tensor([1, 2, 1001])}
    payload = collect(Model(dtype=torch.bfloat16), weight=1001, rows=rows)
    assert {entry.value.dtype for entry in payload.values()} == {torch.bfloat16}
    assert {entry.weight.dtype for entry in payload.values()} == {torch.float32}
    assert payload["scale"].weight.item() == 1001.0  # bfloat16 would have made it 1000
    assert payload["keys"].weight.tolist() == [1.0, 2.0, 1001.0]


def test_copies_are_detached_from_the_module_in_both_directions():
    model = Model()
    counts = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    payload, broadcast = collect(model, weight=2, rows={"keys": counts}), snapshot(model)
    assert len({entry.weight.data_ptr() for entry in payload.values()}) == len(payload)
    before = tensors_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
        counts.add_(1)
    for name in NAMES:
        assert_identical(payload[name].value, before[name])
        assert_identical(broadcast[name], before[name])
        assert not payload[name].value.requires_grad
        assert not payload[name].weight.requires_grad
    assert payload["keys"].weight.tolist() == [1.0, 0.0, 2.0]
    before = tensors_of(model)
    for entry in payload.values():
        entry.value.zero_()
    for value in broadcast.values():
        value.zero_()
    assert_identical(tensors_of(model), before)


def test_rows_override_the_weight_of_single_names():
    model = Model()
    rows = {"keys": torch.tensor([4, 0, 1]), "head.weight": torch.arange(8).reshape(4, 2)}
    payload = collect(model, weight=9.5, rows=rows)
    assert payload["keys"].weight.tolist() == [4.0, 0.0, 1.0]
    assert_identical(payload["head.weight"].weight, torch.arange(8.0).reshape(4, 2))
    others = {payload[name].weight.item() for name in NAMES if name not in rows}
    assert others == {9.5}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["head"], ["head.weight", "head.bias"]),  # not header.weight
        (["head.bias", "scale"], ["scale", "head.bias"]),  # in the module's order
        (("header", "head.weight", "header.weight"), ["head.weight", "header.weight"]),
        (iter(["norm"]), ["norm.weight", "norm.bias"]),
    ],
)
def test_only_takes_names_and_dotted_prefixes(only, names):
    only = list(only)
    assert list(snapshot(Model(), only=iter(only))) == names
    assert list(collect(Model(), weight=1, only=iter(only))) == names


def test_the_bytes_of_each_kind_of_entry_are_those_computed_by_hand():
    zeros, one = torch.zeros, torch.tensor(1.0)
    message = {
        "dense": (zeros(3, 5), 15 * 4),
        "half": (zeros(7, dtype=torch.bfloat16), 7 * 2),
        "labels": (zeros(2, 2, dtype=torch.int64), 4 * 8),
        "empty": (zeros(0, 3), 0),
        "whole": (Weighted(zeros(2, 3), one), 6 * 4 + 4),
        "nothing": (Weighted(zeros(2, 3), 0 * one), 4),
        "rows": (Weighted(zeros(4, 3).half(), torch.tensor([0, 2, 0, 0.1])), 2 * 3 * 2 + 4 * 4),
        "grid": (Weighted(zeros(2, 2, 5).double(), 1 - torch.eye(2)), 2 * 5 * 8 + 4 * 4),
        "entries": (Weighted(zeros(3), torch.tensor([1.0, 0, 0])), 1 * 4 + 3 * 4),
    }
    for name, (entry, size) in message.items():
        assert num_bytes({name: entry}) == size
    entries = {name: entry for name, (entry, _) in message.items()}
    assert num_bytes(entries) == sum(size for _, size in message.values())
    assert num_bytes({}) == 0


def test_the_error_of_rows_names_the_shapes_that_fit():
    """It named (1,) for the tokens (1, 8, 48) of shallow prompts, of which eight have weights."""
    prompts = ShallowPrompts(8, 48)
    with pytest.raises(
        ValueError, match=r"shape \(\), \(1,\), \(1, 8\) or \(1, 8, 48\), the first"
    ):
        collect(prompts, weight=3, rows={"tokens": torch.ones(8)})
    assert collect(prompts, weight=3, rows={"tokens": torch.ones(1, 8)})["tokens"].weight.ndim == 2
