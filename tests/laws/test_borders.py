"""What a function receives is its own: idioms that write in place, kept rounds, and kept models."""

import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.nn.utils import vector_to_parameters

import fedprompt as fp
from same import assert_same

ONE = torch.tensor(1.0)


def stepped(parameter, **options):
    """Take a step of SGD that adds 1."""
    optimizer = torch.optim.SGD([parameter], lr=1.0, **options)
    (-parameter).sum().backward()
    optimizer.step()
    return parameter.detach()


def assigned(module, received):
    module.load_state_dict({"weight": received.view(1, 1)}, assign=True)
    return stepped(module.weight).flatten()


def data_of(received):
    parameter = nn.Parameter(torch.empty(1))
    parameter.data = received
    return stepped(parameter)


def vector(received):
    model = nn.Linear(1, 1, bias=False)
    vector_to_parameters(received, model.parameters())
    return stepped(model.weight).flatten()


def through_numpy(received):
    received.numpy()[:] += 1
    return received


def through_data(received):
    received.data.add_(1)
    return received


def through_dlpack(received):
    torch.from_dlpack(received.detach()).add_(1)
    return received


def through_a_view(received):
    received.view(-1)[0] += 1
    return received


def through_swap(received):
    parameter = nn.Parameter(torch.zeros(1))
    with torch.no_grad():
        parameter.set_(received)
    return stepped(parameter)


def in_inference(received):
    with torch.inference_mode():
        return received.add_(1).clone()


def with_storage(received):
    other = torch.empty(0).set_(received.untyped_storage(), 0, (1,))
    return other.add_(1)


def resized(received):
    new = received + 1
    received.resize_(7).fill_(9).untyped_storage().resize_(0)
    return new


def swapped(received):
    torch.utils.swap_tensors(received, received + 1)
    return received


def functional(received):
    model = nn.Linear(1, 1, bias=False)
    torch.func.functional_call(model, {"weight": received.view(1, 1).add_(1)}, torch.ones(1, 1))
    return received


def with_an_alias(received):
    model = nn.ModuleDict({"one": nn.Linear(1, 1, bias=False)})
    model["two"] = model["one"]
    model["one"].weight.data = received.view(1, 1)
    return stepped(model["two"].weight).flatten()


IDIOMS = {
    "resize_": resized,
    "swap_tensors": swapped,
    "functional_call": functional,
    "alias": with_an_alias,
    "as_strided": lambda x: x.as_strided((1,), (1,)).add_(1),
    "add_": lambda x: x.add_(1),
    "+=": lambda x: x.__iadd__(1),
    "copy_": lambda x: x.copy_(x + 1),
    "fill": lambda x: x.fill_(x.item() + 1),
    "out=": lambda x: torch.add(x, 1, out=x),
    "index": lambda x: x.__setitem__(0, x[0] + 1) or x,
    "requires_grad_": lambda x: stepped(x.requires_grad_()),
    "parameter": lambda x: stepped(nn.Parameter(x)),
    "parameter.data": data_of,
    "fused": lambda x: stepped(nn.Parameter(x), fused=True),
    "foreach": lambda x: stepped(nn.Parameter(x), foreach=True),
    "momentum": lambda x: stepped(nn.Parameter(x), momentum=0.9),
    "lists": lambda x: torch._foreach_add_([x], 1)[0],
    "assign": lambda x: assigned(nn.Linear(1, 1, bias=False), x),
    "vector_to_parameters": vector,
    "numpy": through_numpy,
    ".data": through_data,
    "dlpack": through_dlpack,
    "view": through_a_view,
    "set_": through_swap,
    "storage": with_storage,
    "inference mode": in_inference,
    "memoryview": lambda x: np.add(x, 1, out=np.asarray(memoryview(x.numpy()))) is None or x,
    "init": lambda x: nn.init.constant_(x, x.item() + 1),
    "detach": lambda x: x.detach().add_(1),
}


def data(client, server_round):
    return SimpleNamespace(id=client, server_round=server_round)


def as_client(write):
    """Add 1 to the answer and to the state, both in place."""

    def train(data, answer, state):
        own = write(state["x"]) if state else torch.ones(1)
        return {"x": fp.Weighted(write(answer["x"]), ONE)}, {"x": own}

    return fp.Method(train, fp.averaging_server({"x": torch.zeros(1)}), lambda *all: nn.Identity())


def as_server(write):
    """Answer with the state plus 1, and take a step that adds 1 to payloads and state in place."""

    def train(data, answer, state):
        return {"x": fp.Weighted(answer["x"], ONE)}, {
            "x": torch.full((1,), data.server_round + 1.0)
        }

    def answer(client, state):
        return {"x": write(state["x"])}

    def step(server_round, payloads, state):
        sent = [write(payload["x"].value) for payload in payloads.values()]
        write(state["x"])
        return {"x": torch.stack(sent).mean(0) - 1}

    server = fp.Server({"x": torch.zeros(1)}, answer, step)
    return fp.Method(train, server, lambda *all: nn.Identity())


def as_prediction(write):
    """Predict with the answer and the state, written in place."""
    plain = as_client(lambda x: x + 1)

    def predict(data, answer, state):
        model = nn.Linear(1, 1)
        model.weight.data, model.bias.data = write(answer["x"]).view(1, 1), write(state["x"])
        return model

    return plain._replace(predict=predict)


@pytest.mark.parametrize("role", [as_client, as_server, as_prediction])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_a_function_may_write_into_all_that_it_received(role, idiom):
    method, kept, before = role(IDIOMS[idiom]), [], []
    start = method.server.state
    for now in fp.run_rounds(method, data, [[0, 1, 2]] * 3):
        models = [now.model(method, data(client, 0)) for client in range(3)]
        if role is as_prediction:
            expected = [now.server_round + 2.0] * 2
            assert [[each.item() for each in m.parameters()] for m in models] == [expected] * 3
        kept.append(now)
        before.append(copy.deepcopy(tuple(now)))
    values = [now.server.get("values", now.server)["x"].item() for now in kept]
    assert values == [1, 2, 3]
    assert [now.clients["1"]["x"].item() for now in kept] == [1, 2, 3]
    assert_same([tuple(now) for now in kept], before)
    assert start.get("values", start)["x"].item() == 0


SHARED = torch.zeros(1)


def test_clients_that_send_one_tensor_and_a_server_that_keeps_it_get_what_each_sent():
    def train(data, answer, state):
        return {"x": fp.Weighted(SHARED.fill_(data.id), ONE)}, {"x": SHARED}

    def step(server_round, payloads, state):
        sent.append([payload["x"].value.item() for payload in payloads.values()])
        return {"x": SHARED}

    sent = []
    server = fp.Server({"x": SHARED}, lambda client, state: {}, step)
    rounds = [*fp.run_rounds(fp.Method(train, server, max), data, [[0, 1, 2], [3]])]
    assert sent == [[0, 1, 2], [3]]
    assert [now.server["x"].item() for now in rounds] == [2, 3]
    assert {c: state["x"].item() for c, state in rounds[1].clients.items()} == {
        "0": 0, "1": 1, "2": 2, "3": 3,
    }  # fmt: skip


def test_a_loop_that_changes_its_rounds_changes_no_later_one():
    method = as_client(lambda x: x + 1)
    rounds = fp.run_rounds(method, data, [[0]] * 2)
    first = next(rounds)
    first.clients["0"] = {}
    first.clients["9"] = {}
    assert next(rounds).clients["0"]["x"].item() == 1


LAYOUTS = {
    "channels last": lambda x: x.reshape(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1].expand(8),
    "transposed": lambda x: x.reshape(2, 4).T,
    "parameter": nn.Parameter,
    "a graph": lambda x: nn.Parameter(x) * 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_received_is_dense_contiguous_unshared_and_without_a_graph(layout):
    """As after sending, so that one process and two ranks see the same."""
    made, seen = LAYOUTS[layout], []

    def look(*trees):
        for tree in trees:
            seen.extend([tree["x"], tree["tied"]])

    def train(data, answer, state):
        look(answer, *([state] if state else []))
        sent = made(torch.arange(8.0))
        payload = {name: fp.Weighted(sent, ONE) for name in ("x", "tied")}
        return payload, {"x": sent, "tied": sent}

    def step(server_round, payloads, state):
        look({name: entry.value for name, entry in payloads[0].items()}, state)
        return state

    first = made(torch.arange(8.0))
    server = fp.Server({"x": first, "tied": first}, lambda client, state: state, step)
    for now in fp.run_rounds(fp.Method(train, server, max), data, [[0]] * 2):
        look(now.server, now.clients["0"])
    for tensor in seen:
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert torch.equal(tensor, first)
    addresses = [tensor.data_ptr() for tensor in seen]
    assert all(one != other for one, other in zip(addresses[::2], addresses[1::2], strict=True))


class Net(nn.Module):
    """A frozen network, a head, and values that are no parameters."""

    def __init__(self):
        super().__init__()
        self.frozen = fp.freeze(nn.Linear(500, 500))
        self.head, self.norm = nn.Linear(500, 2), nn.BatchNorm1d(2)
        self.text = None

    def forward(self, inputs):
        return self.norm(self.head(self.frozen(inputs))) + self.text.sum()


@pytest.mark.parametrize("load", ["load_values", "load_state_dict", "assign", "data"])
def test_models_that_are_kept_stay_those_of_their_clients_and_rounds(load):
    net = Net()

    def train(data, answer, state):
        names = [name for name, _ in net.named_parameters() if not name.startswith("norm")]
        like = fp.snapshot(net, only=names)
        values = {n: torch.full_like(v, 1.0 + data.id + data.server_round) for n, v in like.items()}
        return {}, values

    def predict(data, answer, state):
        if load == "load_values":
            fp.load_values(net, state)
        elif load == "data":
            for name, value in state.items():
                net.get_parameter(name).data.copy_(value)
        else:
            net.load_state_dict(state, strict=False, assign=load == "assign")
        net.norm.running_mean.fill_(data.id)
        net.text = nn.Parameter(torch.ones(1)) * data.id
        return net.requires_grad_(False) if data.id == 2 else net.requires_grad_()

    method, kept = fp.Method(train, fp.averaging_server({}), predict), []
    for now in fp.run_rounds(method, data, [range(3)] * 2):
        kept += [(now.server_round, c, now.model(method, data(c, 0))) for c in range(3)]
    assert len({id(model) for *_, model in kept}) == 6
    for server_round, client, model in kept:
        assert all(
            value.eq(1.0 + client + server_round).all()
            for name, value in model.named_parameters() if not name.startswith("norm")
        )  # fmt: skip
        assert model.norm.running_mean.eq(client).all()
        assert model.text.item() == client


def test_kept_models_have_the_memory_of_one_frozen_network():
    net = Net()
    method = fp.Method(max, fp.averaging_server({}), lambda *all: net)
    now = fp.Round(0, method.server.state, {})
    models = [now.model(method, data(client, 0)) for client in range(3)]
    for model in models:
        assert torch._C._data_address(model.frozen.weight) == torch._C._data_address(
            net.frozen.weight
        )
        assert model.head.weight.data_ptr() != net.head.weight.data_ptr()


@pytest.mark.parametrize("kind", ["subclass", "parameter", "graph", "inference", "strided", "neg"])
def test_what_is_sent_and_kept_is_a_plain_tensor(kind):
    def made(value):
        if kind == "inference":
            with torch.inference_mode():
                return value + 1
        kinds = {
            "subclass": lambda: (value + 1).as_subclass(type("Own", (torch.Tensor,), {})),
            "parameter": lambda: nn.Parameter(value + 1),
            "graph": lambda: value + torch.ones(1, requires_grad=True),
            "strided": lambda: (value + 1).repeat(4)[::4],
            "neg": lambda: torch.complex(value, -value - 1).conj().imag,
        }
        return kinds[kind]()

    def train(data, answer, state):
        return {"x": fp.Weighted(made(answer["x"]), ONE)}, {"x": made(answer["x"])}

    method = fp.Method(train, fp.averaging_server({"x": torch.zeros(1)}), max)
    for now in fp.run_rounds(method, data, [[0, 1], [1, 0]]):  # added at once, and sorted
        for found in (now.server["values"]["x"], now.clients["0"]["x"]):
            assert type(found) is torch.Tensor
            assert not any((found.requires_grad, found.is_inference(), found.is_neg()))
            assert found.item() == now.server_round + 1


def test_a_prediction_may_train():
    """PFedMe and others take steps when they predict."""
    net = nn.Linear(1, 1, bias=False)

    def predict(data, answer, state):
        fp.load_values(net, {"weight": answer["x"].view(1, 1)})
        net.zero_grad()
        stepped(net.weight)
        return net

    method = as_client(lambda x: x + 1)._replace(predict=predict)
    (now,) = fp.run_rounds(method, data, [[0]])
    assert [now.model(method, data(0, 0)).weight.item() for _ in range(2)] == [2, 2]


def test_own_kinds_of_leaves_in_an_answer_are_copied_too():
    array = np.zeros(1)

    def train(data, answer, state):
        answer["array"] += 1
        return {}, {"seen": float(answer["array"][0])}

    server = fp.Server({}, lambda client, state: {"array": array}, max)
    made = fp.Method(train, server._replace(step=lambda r, p, s: s), partial(max))
    *_, now = fp.run_rounds(made, data, [[0, 1], [0]])
    assert (array.item(), now.clients) == (0, {"0": {"seen": 1.0}, "1": {"seen": 1.0}})
