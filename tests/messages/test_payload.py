"""Payloads and values are detached copies of parameters, and their bytes are counted."""

import pytest
import torch
import torch.nn as nn

from fedprompt import Weighted, collect, num_bytes, snapshot
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
    # Warnings are errors in tests, so none of these warns.
    collect(model, weight=1, only=["backbone", "head"])
    collect(backbone, weight=1)
    model["head"] = nn.Linear(8, 2)  # more bytes than the backbone
    collect(model, weight=1)


def test_all_parameters_are_sent_once_under_their_names_and_buffers_never():
    model = Model()
    assert list(snapshot(model)) == NAMES
    assert list(collect(model, weight=3)) == NAMES


def test_weights_are_float32_and_values_keep_their_dtype():
    payload = collect(
        Model(dtype=torch.bfloat16), weight=1001, rows={"keys": torch.tensor([1, 2, 1001])}
    )
    assert {entry.value.dtype for entry in payload.values()} == {torch.bfloat16}
    assert {entry.weight.dtype for entry in payload.values()} == {torch.float32}
    assert payload["scale"].weight.item() == 1001.0  # bfloat16 would have made it 1000
    assert payload["keys"].weight.tolist() == [1.0, 2.0, 1001.0]


def test_copies_are_detached_from_the_module_in_both_directions():
    model = Model()
    counts = torch.tensor([1.0, 0.0, 2.0])
    payload, broadcast, before = (
        collect(model, weight=2, rows={"keys": counts}),
        snapshot(model),
        tensors_of(model),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    counts.add_(1)
    for name in NAMES:
        assert_identical(payload[name].value, before[name])
        assert_identical(broadcast[name], before[name])
        assert not payload[name].value.requires_grad
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
    assert payload["head.weight"].weight.tolist() == [
        [0.0, 1.0],
        [2.0, 3.0],
        [4.0, 5.0],
        [6.0, 7.0],
    ]
    assert {
        name: payload[name].weight.item() for name in NAMES if name not in rows
    } == dict.fromkeys(set(NAMES) - set(rows), 9.5)


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
    message = {
        "dense": torch.zeros(3, 5),  # 15 x 4
        "half": torch.zeros(7, dtype=torch.bfloat16),  # 7 x 2
        "labels": torch.zeros(2, 2, dtype=torch.int64),  # 4 x 8
        "empty": torch.zeros(0, 3),  # 0
        "whole": Weighted(torch.zeros(2, 3), torch.tensor(1.0)),  # 6 x 4 + 4
        "nothing": Weighted(torch.zeros(2, 3), torch.tensor(0.0)),  # 4
        "rows": Weighted(
            torch.zeros(4, 3, dtype=torch.float16), torch.tensor([0.0, 2.0, 0.0, 0.1])
        ),  # 2 x 3 x 2 + 4 x 4
        "grid": Weighted(
            torch.zeros(2, 2, 5, dtype=torch.float64), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        ),  # 3 x 5 x 8 + 4 x 4
        "entries": Weighted(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])),  # 1 x 4 + 3 x 4
    }
    by_hand = {
        "dense": 60,
        "half": 14,
        "labels": 32,
        "empty": 0,
        "whole": 28,
        "nothing": 4,
        "rows": 28,
        "grid": 136,
        "entries": 16,
    }
    assert {name: num_bytes({name: entry}) for name, entry in message.items()} == by_hand
    assert num_bytes(message) == sum(by_hand.values()) == 318
    assert num_bytes({}) == 0


def test_the_bytes_of_a_collected_module_are_those_computed_by_hand():
    # keys 6, scale 1, head 8 + 4, header 2, encode 4, norm 2 + 2: 29 numbers.
    # 8 weights, or 7 and 3 if keys have a weight for each row.
    model = Model()
    assert num_bytes(snapshot(model)) == 29 * 4
    assert num_bytes(collect(model, weight=5)) == (29 + 8) * 4
    assert (
        num_bytes(collect(model, weight=5, rows={"keys": torch.tensor([1.0, 0.0, 3.0])}))
        == (29 - 2 + 7 + 3) * 4
    )
    assert num_bytes(collect(Model(dtype=torch.bfloat16), weight=5)) == 29 * 2 + 8 * 4


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": -1}, ValueError, r"`weight` must be at least 0; got -1"),
        ({"weight": torch.nan}, ValueError, r"`weight` must be finite; got nan"),
        ({"weight": torch.inf}, ValueError, r"`weight` must be finite; got inf"),
        ({"weight": "40"}, TypeError, r"`weight` must be a number; got '40' \(str\)"),
        (
            {"weight": torch.tensor(4.0)},
            TypeError,
            r"`weight` must be a number; got a float32 tensor of shape \(\)",
        ),
        (
            {"rows": {"key": torch.ones(3)}},
            ValueError,
            r"`rows` must name collected parameters .*; got \['key'\]",
        ),
        (
            {"rows": {"keys": torch.ones(3)}, "only": ["head"]},
            ValueError,
            r"`rows` must name collected parameters .*; got \['keys'\]",
        ),
        (
            {"rows": {"keys": [1.0, 1.0, 1.0]}},
            TypeError,
            r"`rows\['keys'\]` must be a tensor of real numbers; got a list of length 3",
        ),
        (
            {"rows": {"keys": torch.ones(2)}},
            ValueError,
            r"`payload\['keys'\]\.weight` must have the leading shape .* \(3, 2\); got \(2,\)",
        ),
        (
            {"rows": {"keys": torch.tensor([1.0, -2.0, 0.0])}},
            ValueError,
            r"`payload\['keys'\]\.weight` must be finite and at least 0; got -2\.0",
        ),
        (
            {"rows": {"keys": torch.tensor([1.0, torch.nan, 0.0])}},
            ValueError,
            r"`payload\['keys'\]\.weight` must be finite and at least 0",
        ),
        (
            {"only": ["keys", "prompts"]},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got \['prompts'\]",
        ),
        (
            {"only": ["hea"]},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got \['hea'\]",
        ),
        (
            {"only": []},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got none",
        ),
        (
            {"only": "keys"},
            TypeError,
            r"`only` must be an iterable of names or prefixes, such as \['prompts'\]; got 'keys'",
        ),
    ],
)
def test_bad_options_of_collect_are_refused_by_name(options, error, message):
    model = Model()
    before = tensors_of(model)
    with pytest.raises(error, match=message):
        collect(model, **{"weight": 1, **options})
    assert_identical(tensors_of(model), before)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"weight": 1e-60},
            ValueError,
            r"`weight` must be 0 or within the range of float32; got 1e-60",
        ),
        (
            {"weight": 1e60},
            ValueError,
            r"`weight` must be 0 or within the range of float32; got 1e\+60",
        ),
        (
            {"weight": 1, "rows": {"keys": torch.tensor([1.0, 1e-60, 0.0], dtype=torch.float64)}},
            ValueError,
            r"`rows\['keys'\]` must be 0 or within the range of float32; got 1e-60",
        ),
        (
            {"weight": 1, "rows": {"keys": torch.ones(3, dtype=torch.complex64)}},
            TypeError,
            r"`rows\['keys'\]` must be a tensor of real numbers; got a complex64 tensor",
        ),
    ],
)
def test_weights_that_float32_cannot_hold_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        collect(Model(), **options)
    assert collect(Model(), weight=1e-40)["keys"].weight > 0  # a subnormal number is a weight


@pytest.mark.bad_input
def test_nan_can_be_sent_only_in_rows_of_weight_zero():
    model = Model()
    with torch.no_grad():
        model.keys[1] = torch.nan
    with pytest.raises(
        ValueError, match=r"`payload\['keys'\]\.value` must be finite wherever .* in rows \[0\]"
    ):
        collect(model, weight=1)
    with pytest.raises(
        ValueError, match=r"`payload\['keys'\]\.value` must be finite wherever .* in rows \[1\]"
    ):
        collect(model, weight=1, rows={"keys": torch.ones(3)})
    assert (
        collect(model, weight=1, rows={"keys": torch.tensor([1.0, 0.0, 1.0])})["keys"]
        .value[1]
        .isnan()
        .all()
    )


@pytest.mark.bad_input
def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match=r"`module` must have parameters; got ReLU"):
        snapshot(nn.ReLU())
