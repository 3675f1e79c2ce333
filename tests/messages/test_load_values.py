"""Loading writes a message into a module, completely or not at all."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fedprompt import Weighted, collect, load_values, snapshot
from named_model import Model, tensors_of
from refusals import check_refused, refusals
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


def test_different_values_for_a_tied_parameter_are_refused():
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("first", "second")})
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
    keys = torch.tensor([[1, 2], [3, 4], [5, 6]])
    load_values(model, {"scale": torch.tensor(1.00390625), "keys": keys})
    # 1 + 2^-8 is half-way between the bfloat16 numbers 1 and 1 + 2^-7; it is rounded to even.
    assert model.scale.item() == 1.0
    assert model.scale.dtype == torch.bfloat16
    assert model.keys.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_loading_leaves_no_trace_in_autograd():
    model = Model()
    load_values(model, {"keys": torch.ones(3, 2, requires_grad=True)})
    assert model.keys.is_leaf
    assert model.keys.requires_grad
    assert model.keys.grad_fn is None


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


GOOD = {"keys": torch.full((3, 2), 7.0), "norm.running_mean": torch.ones(2)}
FOUR = torch.ones(4)
BYTES = nn.Module()
BYTES.register_buffer("usage", torch.zeros(1, dtype=torch.uint8))
REFUSED = """
load({'head.wieght': torch.zeros(4, 2)}) -> ValueError: `message` must name parameters or buffers
load({'head': torch.zeros(4, 2)}) -> ValueError: `message` must name parameters or buffers
load({'head.weight': torch.zeros(2, 4)}) -> ValueError: `message['head.weight']` must have the shape
load({'head.weight': Weighted(torch.zeros(4, 3), FOUR)}) -> ValueError: must have the shape
load({'head.bias': torch.tensor([0.0, torch.nan, 0.0, 0.0])}) -> ValueError: must be finite; got 1
load({'scale': torch.tensor(1e300, dtype=torch.float64)}) -> ValueError: `message['scale']` must be
load({'head.bias': Weighted(torch.tensor([0.0, torch.nan, torch.nan, 0.0]), FOUR)}) \
-> ValueError: `message['head.bias'].value` must be finite wherever its weight is positive; got NaN
load({'head.bias': Weighted(1e300 * FOUR.double(), FOUR)}) -> ValueError: '].value` must be finite
load({'head.bias': Weighted(FOUR, -FOUR)}) -> ValueError: `message['head.bias'].weight` must be
load({'scale': Weighted(torch.tensor(1.0), torch.tensor(torch.nan))}) -> ValueError: must be finite
load({'head.bias': Weighted(FOUR, torch.ones(3))}) -> ValueError: have the shape of the leading axes
load({'norm.num_batches_tracked': torch.tensor(1.5)}) -> TypeError: must have a dtype that casts to
load_values(BYTES, {'usage': torch.tensor([300])}) -> ValueError: must fit into torch.uint8; got
load_values(BYTES, {'usage': torch.ones(1).byte().to_sparse()}) -> TypeError: must be a dense tensor
load({'keys': Weighted(torch.ones(3, 2).long(), torch.ones(3))}) -> TypeError: must be a
load({'scale': 1.0}) -> TypeError: `message['scale']` must be a tensor or a Weighted; got 1.0
load_values(Model(), [torch.zeros(1)]) -> TypeError: `message` must map names to tensors or Weighted
num_bytes(None) -> TypeError: `message` must map names to tensors or Weighted; got
load_values(None, {}) -> TypeError: `module` must be an nn.Module; got
collect(None, weight=1) -> TypeError: `module` must be an nn.Module; got
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_a_refused_message_leaves_the_module_unchanged(call, error, message):
    model = Model()
    before = tensors_of(model)
    for arrange in (lambda bad: GOOD | bad, lambda bad: bad | (GOOD | bad)):
        load = lambda bad, arrange=arrange: load_values(model, arrange(bad))  # noqa: E731
        check_refused(call, error, message, globals() | {"load": load})
        assert_identical(tensors_of(model), before)


@pytest.mark.bad_input
def test_errors_name_a_few_of_many_parameters():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
    with pytest.raises(ValueError, match=r"'0\.bias', .* and 395 more") as caught:
        snapshot(model, only=["weights"])
    assert len(str(caught.value)) < 250
