"""Loading writes a message into a module, completely or not at all."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fedprompt import Weighted, collect, load_values, snapshot
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
        frozen = [name for name, each in receiver.named_parameters() if not each.requires_grad]
        assert frozen == ["header.weight"]


def test_loading_copies_the_message_too():
    model, scale = Model(), Weighted(torch.tensor(4.0), torch.tensor(1.0))
    message = {"keys": torch.ones(3, 2), "scale": scale}
    load_values(model, message)
    message["keys"].zero_()
    message["scale"].value.zero_()
    assert_identical(model.keys.detach(), torch.ones(3, 2))
    assert model.scale.item() == 4.0
    with torch.no_grad():
        model.keys.add_(1)
    assert_identical(message["keys"], torch.zeros(3, 2))


def test_a_module_loads_its_own_tensors_in_another_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = (layer.weight.detach() for layer in model)
    expected = second.clone(), first.T.clone()
    load_values(model, {"0.weight": second, "1.weight": first.T})
    assert_identical(first, expected[0])
    assert_identical(second, expected[1])


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
    mean, count = torch.tensor([3.0, 4.0]), torch.tensor(17)
    load_values(model, {"norm.running_mean": mean, "norm.num_batches_tracked": count})
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
    model.twin = model.norm
    load_values(model, {"twin.running_mean": torch.ones(2)})
    assert_identical(model.norm.running_mean, torch.ones(2))


def test_values_are_cast_to_what_they_overwrite():
    model = Model(dtype=torch.bfloat16)
    keys = torch.tensor([[1, 2], [3, 4], [5, 6]])
    load_values(model, {"scale": torch.tensor(1.00390625), "keys": keys})
    # 1 + 2^-8 is half-way between the bfloat16 numbers 1 and 1 + 2^-7; it is rounded to even.
    assert model.scale.item() == 1.0
    assert model.scale.dtype == torch.bfloat16
    assert model.keys.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_parameters_that_are_sharded_or_have_no_numbers_are_refused_in_a_sentence():
    sharded = nn.Linear(1, 1)
    sharded.weight.placements = ()  # as of a DTensor
    for module, rule in ((sharded, "of this process; gather it"), (Model().to("meta"), "dense")):
        name = next(name for name, _ in module.named_parameters())
        with pytest.raises(TypeError, match=rf"`module\.{name}` must be a .*{rule}"):
            load_values(module, {name: torch.ones(1)})


def test_loading_leaves_no_trace_in_autograd():
    model = Model()
    load_values(model, {"keys": torch.ones(3, 2, requires_grad=True)})
    assert model.keys.is_leaf
    assert model.keys.requires_grad
    assert model.keys.grad_fn is None


@pytest.mark.bad_input
def test_a_number_in_place_of_a_tensor_is_refused():
    with pytest.raises(TypeError, match=r"`message\['scale'\]` must be a tensor or a Weighted"):
        load_values(Model(), {"scale": 4.0})


def wrapped():
    """Make modules with wrappers: data-parallel as a whole, in part, and compiled."""
    whole = nn.parallel.DistributedDataParallel(Model())
    part = nn.ModuleDict(
        {"trunk": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "module": nn.Linear(2, 1)}
    )
    return whole, part, torch.compile(Model(), backend="eager")


def test_names_are_those_of_the_module_inside_a_wrapper():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        whole, part, compiled = wrapped()
        for module in (whole, compiled):
            names = list(snapshot(Model()))
            assert list(snapshot(module)) == list(collect(module, weight=1)) == names
        # Here the user named a part "module".
        names = ["trunk.weight", "trunk.bias", "module.weight", "module.bias"]
        assert list(snapshot(part)) == names
        assert list(collect(part, weight=1, only=["trunk"])) == names[:2]
        rows = collect(whole, weight=1, rows={"keys": torch.tensor([0.0, 2.0, 0.0])})["keys"].weight
        assert rows.tolist() == [0.0, 2.0, 0.0]
        for module in (whole, compiled):
            broadcast = {name: 0 * value + 3 for name, value in snapshot(module).items()}
            load_values(module, broadcast)
            assert_identical(snapshot(module), broadcast)
    finally:
        dist.destroy_process_group()
