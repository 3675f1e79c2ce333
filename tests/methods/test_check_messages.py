"""The audit of messages: every method passes, and eleven planted cheats are caught."""

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import METHODS, ClipSetting, Federation, VitSetting, check_messages, fedprox
from method_runs import RUNS
from tiny_federations import federation_of, vit_federation


def separated(made):
    """Return a federation whose setting has no data."""
    kind = VitSetting if isinstance(made, VitSetting) else ClipSetting
    own = {each.name: getattr(made, each.name) for each in fields(kind) if each.init}
    return Federation(kind(**own), made.inputs, made.labels, made.shards)


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_messages_are_all_that_crosses(name, family):
    made = federation_of(METHODS[name], family, rounds=2, cohort_size=2, steps=1, clients=[0, 1])
    shards = {client: made.shards[client] for client in (0, 1, 5)}
    check_messages(METHODS[name].make, replace(separated(made), shards=shards))


def wrapped(setting, client=None, predict=None, step=None):
    """Return FedProx with other functions, which get its own one first."""
    whole = fedprox(setting)
    server = whole.server
    if step is not None:
        server = server._replace(step=partial(step, whole.server.step))
    return whole._replace(
        client=whole.client if client is None else partial(client, whole.client),
        predict=whole.predict if predict is None else partial(predict, whole.predict),
        server=server,
    )


def moved(payload, shift):
    entry = payload["head.bias"]
    return payload | {"head.bias": entry._replace(value=entry.value + shift)}


def cheating(shift):
    """Return a maker whose clients shift a bias by what they see and should not."""

    def make(setting):
        seen = []

        def client(train, data, answer, state):
            payload, state = train(data, answer, state)
            return moved(payload, shift(seen, data, payload["head.bias"].value, setting)), state

        return wrapped(setting, client)

    return make


def added(seen, value):
    """Keep a value for other clients, and return the mean of all values."""
    seen.append(value)
    return sum(seen) / len(seen)


def counted(setting, number):
    setting.sizes = getattr(setting, "sizes", 0) + number
    return setting.sizes


def cached(seen, data):
    seen[:] = seen or [next(iter(data.batches()))[0].mean()]
    return seen[0]


SHIFTS = {
    "state of another": lambda seen, data, bias, setting: added(seen, bias),
    "pool of unsent values": lambda seen, data, *_: added(seen, data.own()[0].mean()),
    "counts of all clients": lambda seen, data, *_: added(seen, data.class_counts),
    "global stream": lambda *_: torch.rand(()),
    "cache on data": lambda seen, data, *_: cached(seen, data),
    "message in shard sizes": lambda seen, data, _, setting: counted(setting, data.num_examples),
}


def module_left_by_another(setting):
    model = setting.new_model()

    def client(train, data, answer, state):
        for images, labels in data.batches():
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return fp.collect(model, weight=1), state

    return wrapped(setting, client)


def server_reads_data(setting):
    seen = []

    def client(train, data, answer, state):
        seen.append(data.own()[0].mean())
        return train(data, answer, state)

    def step(own, server_round, payloads, state):
        after = own(server_round, payloads, state)
        bias = after["values"]["head.bias"] + torch.stack(seen).mean()
        return after | {"values": after["values"] | {"head.bias": bias}}

    return wrapped(setting, client, step=step)


def client_reads_what_the_server_wrote(setting):
    board = []

    def step(own, server_round, payloads, state):
        board[:] = [own(server_round, payloads, state)["values"]["head.bias"]]
        return state

    def client(train, data, answer, state):
        payload, state = train(data, answer, state)
        return moved(payload, sum(board)), state

    return wrapped(setting, client, step=step)


def predicts_with_the_shard_of_another(setting):
    last = []

    def client(train, data, answer, state):
        last[:] = [data.own()]
        return train(data, answer, state)

    def predict(own, data, answer, state):
        model = own(data, answer, state)
        with torch.no_grad():
            model.head.bias += last[0][0].mean()
        return model

    return wrapped(setting, client, predict)


CHEATS = {name: cheating(shift) for name, shift in SHIFTS.items()}
CHEATS |= {
    "module left by another": module_left_by_another,
    "server reads data": server_reads_data,
    "client reads what the server wrote": client_reads_what_the_server_wrote,
    "predicts with the shard of another": predicts_with_the_shard_of_another,
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_caught(cheat):
    federation = separated(vit_federation(rounds=2, cohort_size=3))
    with pytest.raises(ValueError, match=r"`make` must read nothing of other clients but messages"):
        check_messages(cheat, federation)


@pytest.mark.parametrize("how", ["closure", "argument"])
def test_labels_in_the_constructor_are_caught(how):
    federation = separated(vit_federation())
    labels = federation.labels

    def with_labels(setting, labels=None):
        return wrapped(setting)

    def in_closure(setting):
        return wrapped(setting, lambda train, *own: (moved(train(*own)[0], labels[0]), {}))

    cheat = in_closure if how == "closure" else partial(with_labels, labels=labels)
    with pytest.raises(
        ValueError, match="`make` must have no data of clients; got labels has them"
    ):
        check_messages(cheat, federation)


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
