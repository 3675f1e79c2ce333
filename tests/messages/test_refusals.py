"""Arguments of messages are refused by name, edges are taken, and a module is unchanged."""

import pytest
import torch
import torch.nn as nn
from torch import nan, ones, tensor, zeros

from fedprompt import (
    Weighted,
    collect,
    delta,
    describe,
    load_values,
    named,
    num_bytes,
    part,
    samples,
    snapshot,
    vit_trunk,
)  # fmt: skip
from named_model import Model, tensors_of
from refusals import refused_and_taken
from same import assert_identical

ONE, BROADCAST = {"a": Weighted(ones(2), tensor(1.0))}, {"a": ones(2)}
HUGE = {"a": Weighted(3e38 * ones(2), tensor(1.0))}
UNKNOWN = {"a": Weighted(zeros(2) / 0, zeros(2))}
FOUR, TINY = ones(4), torch.full((3,), 1e-60, dtype=torch.float64)
MODEL = nn.ModuleDict({"a": nn.Linear(1, 2, bias=False), "ab": nn.Linear(1, 1)})
BYTES = nn.Module()
BYTES.register_buffer("usage", zeros(1, dtype=torch.uint8))
TIED = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 2)})
TIED["second"].weight = TIED["first"].weight
NO_MESSAGES = [None, [ones(1)], 5]
EVERY = {"a": 1.0}, {"a": Weighted(zeros(2), -ones(2))}


def load(message, module=None):
    module = Model() if module is None else module
    before = tensors_of(module)
    good = (
        {}
        if module in (BYTES, TIED)
        else {"keys": torch.full((3, 2), 7.0), "norm.running_mean": ones(2)}
    )
    for arranged in (
        (good | message, message | (good | message)) if isinstance(message, dict) else [message]
    ):
        try:
            load_values(module, arranged)
        except (ValueError, TypeError):
            assert_identical(tensors_of(module), before)
            raise


def loads(place, *wrong):
    name = place.split("'")[1]
    return load, {"message": {}}, {place: ([{name: each} for each in wrong], [])}


ROWS = [
    (collect, {"module": Model(), "weight": 1, "rows": None, "only": None, "buffers": False}, {
        "module": ([None, nn.ReLU()], []), "weight": ([-1, nan, tensor(4.0), 1e-60, 1e60], [0,
        1e-40, 3e38]), "rows": ([{"key": ones(3)}, {3: ones(3)}, 5], [{}, {"keys": zeros(3)}]),
        "rows['keys']": ( [{"keys": x} for x in (ones(3).to(torch.complex64), TINY, ones(2),
        -ones(3), 3.0)], []), "only": ([[], ["hea"], ["keys", "prompts"], "keys", 5], [["head"],
        iter(["keys"])]), "only[0]": ([[3]], []), "buffers": ([1, None], [True]),
        "payload['keys'].value": ([], [])}),
    (lambda only: collect(nn.BatchNorm1d(2), weight=1, buffers=True, only=only), {"only": None}, {
        "only": ([["num_batches_tracked"]], [None])}),
    (snapshot, {"module": Model(), "only": None, "buffers": False}, {"module": ([None, nn.ReLU()],
        []), "only": ([[], ["hea"], ["keys", "prompts"], "keys"], [["head"]]), "buffers": ([1],
        [True])}),
    (load_values, {"module": Model(), "message": {}}, {"module": ([None, 5], [])}),
    (load, {"message": {}}, {"message": ([*NO_MESSAGES, {3:
        ones(1)}, {"head": zeros(4, 2)}, {"head.wieght": zeros(4, 2)}], [{}, {"head.bias":
        Weighted(FOUR / 0, zeros(4))}])}),
    loads("message['head.weight']", zeros(2, 4), Weighted(zeros(4, 3), FOUR)),
    loads("message['head.bias']", tensor([0.0, nan, 0.0, 0.0]), 1.0, FOUR.to_sparse()),
    loads("message['head.bias'].value", Weighted(FOUR / 0, FOUR), Weighted(1e300 * FOUR.double(),
        FOUR)),
    loads("message['head.bias'].weight", Weighted(FOUR, -FOUR), Weighted(FOUR, FOUR / 0)),
    loads("message['scale']", tensor(1e300, dtype=torch.float64), 1.0),
    loads("message['norm.num_batches_tracked']", tensor(1.5)),
    (lambda message: load(message, BYTES), {"message": {}}, {"message['usage']": ([{"usage": x} for
        x in ( tensor([300]), tensor([-1]), ones(1).byte().to_sparse())], [{"usage":
        tensor([255])}])}),
    (lambda message: load(message, TIED), {"message": {}}, {"message": ([{"first.weight": ones(2,
        2), "second.weight": zeros(2, 2)}], [{"first.weight": ones(2, 2), "second.weight": ones(2,
        2).double()}])}),
    (delta, {"payload": ONE, "values": BROADCAST}, {"payload": ([ONE["a"], [ONE]], []), "values":
        ([{}, [ones(2)]], []), "values['a']": ([{"a": x} for x in (ones(3), ones(2).double(),
        ones(2).to_sparse(), 1.0)], []), "payload['a'].value": ([{"a": Weighted(zeros(2) / 0,
        tensor(1.0))}], [UNKNOWN]), "payload['a'].weight": ([{"a": Weighted(ones(2),
        -tensor(1.0))}], [])}),
    (lambda values: delta(HUGE, values), {"values": BROADCAST}, {"payload['a'] minus values['a']":
        ([{"a": -3e38 * ones(2)}], [])}),
    (num_bytes, {"message": {}}, {"message": ([*NO_MESSAGES, {3: ones(1)}], [{}]), "message['a']":
        (EVERY[:1], [UNKNOWN]), "message['a'].weight": (EVERY[1:], [])}),
    (describe, {"model": MODEL, "message": {}, "trunk": None}, {"model": ([3, None], []), "message":
        (NO_MESSAGES, []), "message['a']": (EVERY[:1], []), "trunk": (["vit", 3], [nn.Linear(1, 1),
        vit_trunk(samples.vit("S"))])}),
    (part, {"message": ONE, "name": "a"}, {"message": (NO_MESSAGES, [{}]), "name": ([3, None],
        ["b"])}),
    (named, {"name": "a", "entries": ONE}, {"name": ([3], []), "entries": ([*NO_MESSAGES, {3:
        ones(1)}], [{}])}),
]  # fmt: skip
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken(ROWS)


@pytest.mark.bad_input
def test_nan_can_be_sent_only_in_rows_of_weight_zero():
    model = Model()
    with torch.no_grad():
        model.keys[1] = nan
    for rows, row in ((None, 0), ({"keys": ones(3)}, 1)):
        rule = rf"`payload\['keys'\]\.value` must be finite wherever .* in rows \[{row}\]"
        with pytest.raises(ValueError, match=rule):
            collect(model, weight=1, rows=rows)
    payload = collect(model, weight=1, rows={"keys": tensor([1.0, 0.0, 1.0])})
    assert payload["keys"].value[1].isnan().all()


@pytest.mark.bad_input
def test_errors_name_a_few_of_many_parameters():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
    with pytest.raises(ValueError, match=r"'0\.bias', .* and 395 more") as caught:
        snapshot(model, only=["weights"])
    assert len(str(caught.value)) < 250
