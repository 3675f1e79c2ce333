"""Loading writes a message into a module, completely or not at all."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn

from fedprompt import Weighted, collect, load_values, num_bytes, snapshot
from named_model import Model, tensors_of
from same import assert_identical


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_round_trip_makes_an_equal_model(dtype):
    sender = Model(seed=1, dtype=dtype)
    for message in (snapshot(sender), collect(sender, weight=7)):
        receiver = Model(seed=2, dtype=dtype)
        statistics = tensors_of(receiver.norm)
        load_values(receiver, message)
        assert_identical(dict(receiver.named_parameters()), dict(sender.named_parameters()))
        assert receiver.decode.weight is receiver.encode.weight
        assert_identical(receiver.norm.running_mean, statistics["running_mean"])
        assert [
            name for name, parameter in receiver.named_parameters() if not parameter.requires_grad
        ] == ["header.weight"]


def test_loading_copies_the_message_too():
    model, message = (
        Model(),
        {"keys": torch.ones(3, 2), "scale": Weighted(torch.tensor(4.0), torch.tensor(1.0))},
    )
    load_values(model, message)
    message["keys"].zero_()
    message["scale"].value.zero_()
    assert_identical(model.keys.detach(), torch.ones(3, 2))
    assert model.scale.item() == 4.0
    with torch.no_grad():
        model.keys.add_(1)
    assert_identical(message["keys"], torch.zeros(3, 2))


def test_rows_of_weight_zero_and_missing_names_are_bitwise_unchanged():
    model = Model()
    before = tensors_of(model)
    new = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [5.0, 6.0]])
    nothing = Weighted(torch.full((4,), torch.nan), torch.tensor(0.0))
    load_values(model, {"keys": Weighted(new, torch.tensor([1.0, 0.0, 0.5])), "head.bias": nothing})
    assert_identical(
        tensors_of(model), before | {"keys": torch.stack([new[0], before["keys"][1], new[2]])}
    )


def test_buffers_may_be_loaded():
    model = Model()
    load_values(
        model,
        {
            "norm.running_mean": torch.tensor([3.0, 4.0]),
            "norm.num_batches_tracked": torch.tensor(17),
        },
    )
    assert model.norm.running_mean.tolist() == [3.0, 4.0]
    assert model.norm.num_batches_tracked.item() == 17
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_either_name_of_a_tied_parameter_loads_both():
    model = Model()
    for name in ("encode.weight", "decode.weight"):
        value = torch.full((2, 2), float(len(name)) + (name[0] == "d"))
        load_values(model, {name: value})
        assert_identical(model.encode.weight.detach(), value)
        assert_identical(model.decode.weight.detach(), value)


def test_different_values_for_a_tied_parameter_are_refused():
    model = nn.ModuleDict(
        {"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)}
    )
    model["second"].weight = model["first"].weight
    before = model["first"].weight.detach().clone()
    ones = torch.ones(2, 2)
    rule = "`message` must have equal values for 'first.weight' and 'second.weight', which are one"
    with pytest.raises(ValueError, match=rule):
        load_values(model, {"first.weight": ones, "second.weight": 2 * ones})
    assert_identical(model["first"].weight.detach(), before)
    load_values(model, {"first.weight": ones, "second.weight": ones.double()})
    assert_identical(model["first"].weight.detach(), ones)


def test_values_are_cast_to_what_they_overwrite():
    model = Model(dtype=torch.bfloat16)
    load_values(
        model, {"scale": torch.tensor(1.00390625), "keys": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    )
    # 1 + 2^-8 is half-way between the bfloat16 numbers 1 and 1 + 2^-7; it is rounded to even.
    assert model.scale.item() == 1.0
    assert model.scale.dtype == torch.bfloat16
    assert model.keys.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_loading_leaves_no_trace_in_autograd():
    model = Model()
    load_values(
        model,
        {"keys": torch.ones(3, 2, requires_grad=True), "scale": nn.Parameter(torch.tensor(1.0))},
    )
    assert model.keys.is_leaf
    assert model.keys.requires_grad
    assert model.keys.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parameters_without_an_axis_are_sent(dtype):
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(4.5, dtype=dtype))})
    payload = collect(model, weight=2)
    load_values(model, {"scale": payload["scale"]._replace(value=torch.tensor(6.0))})
    assert model["scale"].item() == 6.0


def wrapped():
    """Make modules with wrappers: data-parallel as a whole, in part, and compiled."""
    whole = nn.parallel.DistributedDataParallel(Model())
    part = nn.ModuleDict(
        {"trunk": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "module": nn.Linear(2, 1)}
    )
    return whole, part, torch.compile(Model())


def test_names_are_those_of_the_module_inside_a_wrapper():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        whole, part, compiled = wrapped()
        for module in (whole, compiled):
            assert (
                list(snapshot(module)) == list(snapshot(Model())) == list(collect(module, weight=1))
            )
        # Here the user named a part "module".
        names = ["trunk.weight", "trunk.bias", "module.weight", "module.bias"]
        assert list(snapshot(part)) == names
        assert list(collect(part, weight=1, only=["trunk"])) == names[:2]
        rows = collect(whole, weight=1, rows={"keys": torch.tensor([0.0, 2.0, 0.0])})["keys"].weight
        assert rows.tolist() == [0.0, 2.0, 0.0]
        for module in (whole, compiled):
            broadcast = {
                name: torch.full_like(value, 3.0) for name, value in snapshot(module).items()
            }
            load_values(module, broadcast)
            assert_identical(snapshot(module), broadcast)
    finally:
        torch.distributed.destroy_process_group()


GOOD = {"keys": torch.full((3, 2), 7.0), "norm.running_mean": torch.ones(2)}


BAD_MESSAGES = {
    "an unknown name": (
        {"head.wieght": torch.zeros(4, 2)},
        ValueError,
        r"`message` must name parameters or buffers.*got \['head\.wieght'\]",
    ),
    "a prefix": (
        {"head": torch.zeros(4, 2)},
        ValueError,
        r"`message` must name parameters or buffers.*got \['head'\]",
    ),
    "another shape": (
        {"head.weight": torch.zeros(2, 4)},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape .* \(4, 2\); got \(2, 4\)",
    ),
    "a shape that would broadcast": (
        {"head.weight": torch.zeros(2)},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape.*got \(2,\)",
    ),
    "another shape of rows": (
        {"head.weight": Weighted(torch.zeros(4, 3), torch.ones(4))},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape .* \(4, 2\); got \(4, 3\)",
    ),
    "NaN": (
        {"head.bias": torch.tensor([0.0, torch.nan, 0.0, 0.0])},
        ValueError,
        r"`message\['head\.bias'\]` must be finite; got 1 entries of 4",
    ),
    "infinity": (
        {"scale": torch.tensor(-torch.inf)},
        ValueError,
        r"`message\['scale'\]` must be finite; got 1 entries of 1",
    ),
    "infinity after the cast": (
        {"scale": torch.tensor(1e300, dtype=torch.float64)},
        ValueError,
        r"`message\['scale'\]` must be finite",
    ),
    "NaN in a known row": (
        {
            "head.bias": Weighted(
                torch.tensor([0.0, torch.nan, torch.nan, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
            )
        },
        ValueError,
        r"head\.bias'\]\.value` must be finite wherever .*; got NaN or infinity in rows \[2\]",
    ),
    "a row too large for the dtype": (
        {
            "head.bias": Weighted(
                torch.tensor([0.0, 1e300, 0.0, 0.0], dtype=torch.float64), torch.ones(4)
            )
        },
        ValueError,
        r"head\.bias'\]\.value` must be finite wherever .*; got NaN or infinity in rows \[1\]",
    ),
    "a negative weight": (
        {"head.bias": Weighted(torch.zeros(4), torch.tensor([1.0, -3.0, 1.0, 1.0]))},
        ValueError,
        r"`message\['head\.bias'\]\.weight` must be finite and at least 0; got -3\.0",
    ),
    "a NaN weight": (
        {"scale": Weighted(torch.tensor(1.0), torch.tensor(torch.nan))},
        ValueError,
        r"`message\['scale'\]\.weight` must be finite and at least 0; got nan",
    ),
    "weights of other rows": (
        {"head.bias": Weighted(torch.zeros(4), torch.ones(3))},
        ValueError,
        r"`message\['head\.bias'\]\.weight` must have the leading shape .* \(4,\); got \(3,\)",
    ),
    "floats for a counter": (
        {"norm.num_batches_tracked": torch.tensor(1.5)},
        TypeError,
        r"num_batches_tracked'\]` must have a dtype that casts to torch\.int64; got",
    ),
    "integers with evidence": (
        {"keys": Weighted(torch.ones(3, 2, dtype=torch.int64), torch.ones(3))},
        TypeError,
        r"`message\['keys'\]\.value` must be a floating-point tensor; got a int64 tensor",
    ),
    "a list": (
        {"scale": 1.0},
        TypeError,
        r"`message\['scale'\]` must be a tensor or a Weighted; got 1\.0 \(float\)",
    ),
    "an array": (
        {"keys": np.zeros((3, 2))},
        TypeError,
        r"`message\['keys'\]` must be a tensor or a Weighted; got a float64 array",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("bad", "error", "message"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_refused_message_leaves_the_module_unchanged(bad, error, message):
    model = Model()
    before = tensors_of(model)
    for order in (
        {**GOOD, **bad},
        {**bad, **{name: value for name, value in GOOD.items() if name not in bad}},
    ):
        with pytest.raises(error, match=message):
            load_values(model, order)
        assert_identical(tensors_of(model), before)


@pytest.mark.bad_input
@pytest.mark.parametrize("wrong", [None, [torch.zeros(1)], torch.zeros(1)])
def test_other_types_than_messages_and_modules_are_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"`message` must map names to tensors or Weighted; got "):
        load_values(Model(), wrong)
    with pytest.raises(TypeError, match=r"`message` must map names to tensors or Weighted; got "):
        num_bytes(wrong)
    for function in (
        lambda: load_values(wrong, {}),
        lambda: snapshot(wrong),
        lambda: collect(wrong, weight=1),
    ):
        with pytest.raises(TypeError, match=r"`module` must be an nn\.Module; got "):
            function()


@pytest.mark.bad_input
def test_errors_name_a_few_of_many_parameters():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
    calls = (
        partial(load_values, model, {"weights": torch.zeros(1)}),
        partial(collect, model, weight=1, rows={"weights": torch.zeros(1)}),
        partial(snapshot, model, only=["weights"]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"'0\.bias', .* and 395 more") as caught:
            call()
        assert len(str(caught.value)) < 250
