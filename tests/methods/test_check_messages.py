"""The audit of messages: every method passes, and those that leak are found."""

import os
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ot  # noqa: F401  (each forked process would import it again)
import peft  # noqa: F401
import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import (
    METHODS,
    ClipSetting,
    Federation,
    VitSetting,
    backdoored,
    check_messages,
    fedprox,
)
from method_runs import RUNS, together
from tiny_federations import federation_of, vit_federation


def separated(made):
    """Return a federation whose setting has no data."""
    kind = VitSetting if isinstance(made, VitSetting) else ClipSetting
    own = {each.name: getattr(made, each.name) for each in fields(kind) if each.init}
    return Federation(kind(**own), made.inputs, made.labels, made.shards)


GROUPS: dict[tuple[Any, ...], list[str]] = {}
for name, family in RUNS:  # FedMix alone has two exchanges
    GROUPS.setdefault((family, METHODS[name].inputs, name == "fedmix"), []).append(name)


def check_together(names, federation):
    """Audit several methods as one, which forks once, and then by itself the one that fails."""
    try:
        check_messages(together(names, newcomers=True), federation)
    except ValueError:
        for name in names:
            check_messages(METHODS[name].make, federation)
        raise


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0]} {group[1]}")
def test_messages_are_all_that_crosses(group):
    """Client 1 trains after client 0. Then both predict, with their state and as newcomers."""
    names, budget = GROUPS[group], {"rounds": 1, "cohort_size": 2, "steps": 1, "clients": [0, 1]}
    made = federation_of(METHODS[names[0]], group[0], **budget)
    assert list(made.cohorts()) == [[0, 1]]
    shards = {client: made.shards[client] for client in (0, 1)}
    check_together(names, replace(separated(made), shards=shards))


def test_a_method_with_a_backdoor_passes_too():
    federation = separated(vit_federation(cohort_size=2, clients=range(2)))
    federation = replace(federation, shards={0: federation.shards[0], 1: federation.shards[1]})
    check_messages(lambda s: backdoored(fedprox(s), malicious=[1], target=0), federation)


def secret(data):
    return data.own()[0].sum().reshape(1)


def sending(value, predict=None):
    """Return a maker of a method whose clients send a value of their data."""

    def make(setting):
        def client(data, answer, state):
            return {"x": fp.Weighted(value(data).detach().reshape(1), torch.tensor(1.0))}, state

        def plain(data, answer, state):
            return lambda images: images.flatten(1)[:, :10] * 0 + answer["x"]

        return fp.Method(client, fp.averaging_server({"x": torch.zeros(1)}), predict or plain)

    return make


def through(write, read):
    """Return a maker whose clients send what others left at a place, and leave their own secret."""

    def value(data):
        found = read(data)
        write(data, secret(data))
        return torch.zeros(1) if found is None else torch.as_tensor(found, dtype=torch.float32)

    return sending(value)


def places(folder):
    """List functions that write a secret to a place, and that read it there."""
    seen, module, file = {}, torch.nn.BatchNorm1d(1), folder / "secret"

    def once(write, read):
        """Write the first secret alone, which stays in the process."""
        return lambda data, value: None if read(data) else write(data, value), read

    def trunk(data):
        return vars(data.setting.trunks[0])

    def public(data):
        return data.setting.public.view(-1)

    def total(data, value):
        seen["total"] = seen.get("total", 0.0) + value.item()

    def kept(key):
        return seen.setdefault(key, seen.get("total", 0.0))

    in_public = (lambda d, v: public(d)[:1].copy_(v), lambda d: public(d)[0].clone())
    return {
        "file": (lambda d, v: file.write_text(str(v.item())),
                 lambda d: float(file.read_text()) if file.exists() else None),
        "seed of PyTorch": (lambda d, v: torch.manual_seed(int(v.item() * 8)),
                            lambda d: torch.initial_seed() % 1009),
        "seed of NumPy": (lambda d, v: np.random.seed(int(v.item()) % 2**31),  # noqa: NPY002
                          lambda d: np.random.rand()),  # noqa: NPY002
        "attribute of the setting": (lambda d, v: setattr(d.setting, "note", v),
                                     lambda d: vars(d.setting).get("note")),
        "public images": in_public,
        "cache by the client's id": (total, lambda d: kept((d.id, d.server_round))),
        "cache by content": (total, lambda d: kept(secret(d).item())),
        "running statistics": (lambda d, v: module.train()(v.reshape(1, 1).expand(2, 1)),
                               lambda d: module.running_mean.clone()),
        "environment, once": once(lambda d, v: os.environ.update(FEDPROMPT_SECRET=str(v.item())),
                                  lambda d: float(os.environ.get("FEDPROMPT_SECRET", "0"))),
        "attribute of the trunk, once": once(lambda d, v: trunk(d).update(note=v),
                                             lambda d: trunk(d).get("note")),
        "public images, once": once(*in_public),
    }  # fmt: skip


def answer_in_place(setting):
    """Return a method whose clients write their secret into the answer of the server."""
    server = fp.averaging_server({"x": torch.zeros(1)})

    def client(data, answer, state):
        answer["x"].data.add_(secret(data))
        return {"x": fp.Weighted(answer["x"].clone(), torch.tensor(1.0))}, state

    return sending(secret)(setting)._replace(client=client, server=server)


def server_reads_data(setting):
    seen = []
    method = sending(lambda data: seen.append(secret(data)) or torch.zeros(1))(setting)

    def step(server_round, payloads, state):
        return {**state, "values": {"x": torch.stack(seen).mean(0)}}

    return method._replace(server=method.server._replace(step=step))


def client_reads_what_the_server_wrote(setting):
    board = [torch.zeros(1)]
    method = sending(lambda data: board[0])(setting)

    def step(server_round, payloads, state):
        board[0] = board[0] + 1
        return state

    return method._replace(server=method.server._replace(step=step))


def predicts_with_the_data_of_another(setting):
    last = [torch.zeros(1)]

    def value(data):
        last[0] = secret(data)
        return torch.zeros(1)

    def predict(data, answer, state):
        found = last[0].clone()
        return lambda images: images.flatten(1)[:, :10] * 0 + found

    return sending(value, predict)(setting)


def module_left_by_another(setting):
    model = setting.new_model()

    def client(data, answer, state):
        for images, labels in data.batches():
            F.cross_entropy(model(images), labels).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return fp.collect(model, weight=1), state

    return fedprox(setting)._replace(client=client)


def reaching(federation):
    """List methods that read the federation's data by another name."""
    images, labels = federation.inputs, federation.labels
    functions = globals()
    functions["_images"], functions["_labels"] = images, labels
    box = SimpleNamespace(images=images)
    default = eval("lambda data, found=_images: found.sum()", functions)
    return {
        "global name": sending(lambda data: _labels.float().mean()),
        "global list": sending(lambda data: [_images][0].sum()),
        "attribute of an object": sending(lambda data: box.images.sum()),
        "default argument": sending(default),
    }  # fmt: skip


WHOLE = [answer_in_place, server_reads_data, client_reads_what_the_server_wrote]
WHOLE += [predicts_with_the_data_of_another, module_left_by_another]
PLACES = list(places(Path()))
REACHED = ["global name", "global list", "attribute of an object", "default argument"]


@pytest.fixture
def small(new_models):
    made = separated(vit_federation(cohort_size=2, clients=range(2)))
    public = torch.zeros(2, *made.inputs.shape[1:])
    shards = {client: made.shards[client] for client in range(2)}
    return replace(made, setting=replace(made.setting, public=public), shards=shards)


@pytest.fixture(autouse=True)
def same_process():
    """Undo what a method leaves in this process."""
    environ = dict(os.environ)
    seeded = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_rng_state(seeded[0])
    np.random.set_state(seeded[1])  # noqa: NPY002


def check_found(make, federation):
    with pytest.raises(ValueError, match=r"`make` must (read nothing of other|have no data of)"):
        check_messages(make, federation)


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_at_a_place_is_found(place, small, tmp_path):
    check_found(through(*places(tmp_path)[place]), small)


@pytest.mark.parametrize("make", WHOLE)
def test_a_method_that_crosses_without_a_message_is_found(make, small):
    check_found(make, small)


@pytest.mark.parametrize("name", REACHED)
def test_data_of_others_under_another_name_is_found(name, small):
    check_found(reaching(small)[name], small)


def test_data_of_others_in_an_augmentation_is_found(small):
    images = small.inputs
    setting = replace(small.setting, augment=lambda batch, generator: batch + images.mean())
    make = sending(lambda data: next(iter(data.batches()))[0].sum())
    check_found(make, replace(small, setting=setting))


def test_dropout_from_the_global_stream_is_honest_and_the_number_of_threads_is_put_back(
    small, monkeypatch
):
    numbers = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)

    def make(setting):
        dropout = torch.nn.Dropout(0.5)
        return sending(lambda data: dropout(data.own()[0]).sum())(setting)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)  # any seed of the loop
        found = check_messages(make, small)
    assert (found.forked, numbers) == (True, [1, 7])
    assert found.repeats > len(small.shards) * 2 * 2 * 2  # two rounds, two clients, both ways


def test_files_that_are_mapped_keep_their_content(small, tmp_path):
    """The images of a memory map are noise in the audit, and the file is as before."""
    before = small.inputs.numpy().tobytes()
    (tmp_path / "images").write_bytes(before)
    size = small.inputs.numel()
    mapped = torch.from_file(str(tmp_path / "images"), shared=True, size=size)
    federation = replace(small, inputs=mapped.view(small.inputs.shape))
    check_messages(fedprox, federation)
    assert (tmp_path / "images").read_bytes() == before
    assert torch.equal(federation.inputs, small.inputs)


def test_without_a_fork_the_result_says_so(small, monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert not check_messages(fedprox, small).forked
    check_found(server_reads_data, small)


@pytest.mark.parametrize("how", ["closure", "argument", "list"])
def test_labels_in_the_constructor_are_named(how, small):
    labels = small.labels
    box = [[labels]]
    box.insert(0, box)  # a circle

    def with_labels(setting, labels=None):
        return fedprox(setting)

    def in_closure(setting):
        return sending(lambda data: labels[0].float())(setting)

    def in_list(setting):
        return sending(lambda data: box[1][0][0].float())(setting)

    cheat = {
        "closure": in_closure,
        "argument": partial(with_labels, labels=labels),
        "list": in_list,
    }
    with pytest.raises(ValueError, match=r"`make` must have no data of clients; got (labels|box)"):
        check_messages(cheat[how], small)


@pytest.mark.bad_input
def test_inputs_that_noise_cannot_replace_are_refused():
    class Zeros:
        def __len__(self):
            return 41

        def __getitem__(self, positions):
            return torch.zeros(len(positions), 1, 8, 8)

    federation = replace(separated(vit_federation()), inputs=Zeros())
    with pytest.raises(TypeError, match=r"`federation.inputs` must be a tensor; got a Zeros"):
        check_messages(fedprox, federation)


def test_a_method_whose_repeats_end_the_process_is_an_error(small):
    here = os.getpid()

    def make(setting):
        return sending(lambda data: secret(data) if os.getpid() == here else os._exit(3))(setting)

    with pytest.raises(RuntimeError, match="The process that repeats the calls has ended"):
        check_messages(make, small)


@pytest.mark.bad_input
def test_a_run_without_rounds_and_a_function_without_a_method_are_refused(small):
    with pytest.raises(ValueError, match=r"`federation\.setting\.rounds` must be at least 1"):
        check_messages(fedprox, replace(small, setting=replace(small.setting, rounds=0)))
    with pytest.raises(TypeError, match=r"`method` must be a Method\(client, server, predict\)"):
        check_messages(lambda setting: None, small)
    for make, federation, named in ((3, small, "make"), (fedprox, 3, "federation")):
        with pytest.raises(TypeError, match=f"`{named}` must be"):
            check_messages(make, federation)
