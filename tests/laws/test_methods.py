"""Laws of a method, over the whole gallery, and wrong methods that the laws reject.

A method is written for one process. These laws make it run anywhere: every call has a new method,
every message and every state goes through bytes, and the data of other clients is out of reach.
"""

import inspect
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedprompt as fp
import method_runs
import two_processes
from fedprompt.methods import METHODS, fedprox
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
from method_runs import CHANGES, MAKERS, RUNS, predicted
from same import assert_same
from tiny_federations import federation_of

pytestmark = pytest.mark.usefixtures("float64")
MAX_BYTES = 2**22

plain = cache(method_runs.run)
"""Outcome of a run in one process, with which all laws compare."""


class Read(Mapping[str, Any]):
    """Message that notes which of its names are read."""

    def __init__(self, message: fp.interfaces.Message, names: set[str]) -> None:
        self.message, self.names = message, names

    def __getitem__(self, name: str) -> Any:
        value = self.message[name]
        self.names.add(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.message)

    def __len__(self) -> int:
        return len(self.message)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}


def through_bytes(
    message: fp.interfaces.Message, form: fp.interfaces.Message
) -> fp.interfaces.Message:
    """Encode a message, and decode it by its form. Rows of weight 0 are not sent."""
    blob = encode_payload(message, header=Header({}, 0, "0"))
    return decode_payload(blob, expect=Expected(form), max_bytes=MAX_BYTES)[0]


def untouched(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; its arguments must stay as they are."""
    before = deepcopy(arguments)
    result = call(*arguments)
    assert_same(list(arguments), list(before), ordered=False)
    return result


def strict(make: Callable[[], fp.Method], seen: Mapping[str, set[str]]) -> fp.Method:
    """Make a new method for each call, check its arguments and results, and note what is seen.

    All answers of a round are those of one method.

    These are names that are "read", names that are "answered", and directions that are "crossed".
    """
    first = make()

    @torch.random.fork_rng([])  # the form of an answer may draw
    def received(client, answer):
        seen["answered"].update(answer)
        if first.form is None:  # then messages need no form
            return deepcopy(answer)
        return through_bytes(answer, first.server.answer(client, first.server.state))

    def client(data, answer, state):
        answer = received(data.id, answer)
        payload, state = untouched(
            lambda *own: make().client(data, Read(own[0], seen["read"]), own[1]), answer, state
        )
        assert not holds(payload or {}, data.own()[0]), "a message holds a row of an input"
        counts = {"Down": fp.num_bytes(answer), "Up": fp.num_bytes(payload or {})}
        seen["crossed"].update(direction for direction, count in counts.items() if count)
        if payload is not None and first.form is not None:
            payload = through_bytes(payload, first.form(data.id))
        return payload, state

    def predict(data, answer, state):
        answer = received(data.id, answer)
        return untouched(
            lambda *own: make().predict(data, Read(own[0], seen["read"]), own[1]), answer, state
        )

    def answer(client, state):
        return untouched(lambda state: first.server.answer(client, state), state)

    def step(server_round, payloads, state):
        return untouched(lambda *all: make().server.step(server_round, *all), payloads, state)

    server = fp.Server(first.server.state, answer, step)
    return first._replace(client=client, server=server, predict=predict)


def holds(message: fp.interfaces.Message, inputs: Tensor) -> bool:
    """Tell whether a message contains a row of an input, at any place of a tensor."""
    rows = inputs.flatten(0, -2)
    for entry in message.values():
        numbers = (entry.value if isinstance(entry, fp.Weighted) else entry).flatten()
        if numbers.numel() >= rows.shape[1] and numbers.is_floating_point():
            windows, found = numbers.unfold(0, rows.shape[1], 1), rows.to(numbers)
            windows = windows[torch.isin(windows[:, 0], found[:, 0])]
            if (windows[:, None] == found).all(-1).any():
                return True
    return False


def check(make: Callable[..., fp.Method], name: str, family: str, folder: Path) -> set[str]:
    """Require a run of new methods, resumed from bytes after each round, to equal the plain one.

    Return the directions in which something is sent.
    """
    torch.set_default_dtype(torch.float64)
    expected, seen, start = plain(make, name, family), defaultdict(set), None
    federation = federation_of(METHODS[name], family, **CHANGES)
    cohorts = [list(reversed(cohort)) for cohort in federation.cohorts()]
    for rounds in range(1, CHANGES["rounds"] + 1):
        method = strict(torch.random.fork_rng([])(lambda: make(federation)), seen)
        (now,) = fp.run_rounds(method, federation.data, cohorts[:rounds], start=start)
        fp.save_checkpoint(now, folder)
        start = fp.load_checkpoint(folder)
    assert_same(tuple(start), tuple(expected.now), ordered=False)
    for client, logits in expected.logits.items():
        assert_same(predicted(method, federation, start, client), logits)
        assert logits.shape == (len(federation.shards[client]), federation.num_classes)
        assert logits.dtype == torch.get_default_dtype()
        assert not logits.isnan().any()
    assert seen["answered"] <= seen["read"], "names of an answer are not read"
    return seen["crossed"]


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_every_call_may_have_a_new_method_and_every_message_goes_through_bytes(
    name, family, tmp_path
):
    crossed = check(MAKERS[name], name, family, tmp_path)
    text = inspect.getdoc(inspect.getmodule(METHODS[name].make))
    assert crossed == {each for each in ("Up", "Down") if not re.search(f"{each}: nothing", text)}


@pytest.mark.parametrize("runs", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process_and_draw_the_same_random_numbers(runs, tmp_path):
    two_processes.run(getattr(method_runs, f"run_{runs}"), tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    torch.set_default_dtype(torch.float64)
    wrong = []
    for name, family, way in ranks[0]:
        expected = plain(MAKERS[name], name, family, way.split(",")[0])
        found = [outcomes[name, family, way] for outcomes in ranks]
        clients = {**found[0].now.clients, **found[1].now.clients}
        try:
            for each in found:
                assert_same(dict(each.now.server), dict(expected.now.server), ordered=False)
                assert each.figures == expected.figures()
            assert_same(clients, dict(expected.now.clients), ordered=False)
            assert_same(found[0].logits | found[1].logits, expected.logits, ordered=False)
        except AssertionError as error:
            wrong.append((name, family, way, str(error)[:200]))
    assert not wrong


# Wrong methods: FedProx with one fault each.


def changed(**functions: Callable[..., Any]) -> Callable[..., fp.Method]:
    """Make FedProx with functions (whole method, *arguments) in place of its own."""

    def make(setting):
        whole = fedprox(setting)
        wrapped = {
            name: lambda *all, function=function: function(whole, *all)
            for name, function in functions.items()
        }
        parts = {name: wrapped.pop(name) for name in ("answer", "step") if name in wrapped}
        return whole._replace(**wrapped, server=whole.server._replace(**parts))

    return make


def moved(payload, shift):
    name = next(iter(payload))
    return payload | {name: payload[name]._replace(value=payload[name].value + shift)}


def with_a_hidden_counter(setting):
    whole, calls = fedprox(setting), itertools.count()

    def client(data, answer, state):
        payload, state = whole.client(data, answer, state)
        return moved(payload, next(calls)), state

    return whole._replace(client=client)


def that_changes_its_answer(whole, data, answer, state):
    result = whole.client(data, answer, state)
    answer["head.bias"].add_(1)
    return result


def that_changes_its_state(whole, data, answer, state):
    payload, _ = whole.client(data, answer, state)
    count = state.get("count", torch.zeros(()))
    return payload, {"count": count.add_(1)}


def that_sends_more(whole, client, state):
    return whole.server.answer(client, state) | {"unread": torch.ones(1)}


def of_few_names(function):
    """Call a function of FedProx with the names of a model."""

    def call(whole, data, answer, state):
        model = {name: answer[name] for name in whole.server.state["values"]}
        return getattr(whole, function)(data, model, state)

    return call


def that_sends_a_row(whole, data, answer, state):
    payload, state = whole.client(data, answer, state)
    payload["head.weight"].value[0] = data.own()[0][-1, 0, -1]
    return payload, state


def that_sends_another_form(whole, data, answer, state):
    payload, state = whole.client(data, answer, state)
    if data.server_round:
        payload["head.bias"] = payload["head.bias"]._replace(value=torch.zeros(1))
    return payload, state


def that_changes_payloads(whole, server_round, payloads, state):
    for payload in payloads.values():
        payload["head.bias"].value.add_(1)
    return whole.server.step(server_round, payloads, state)


def that_answers_otherwise_later(whole, client, state):
    values = whole.server.answer(client, state)
    return values | ({"round": torch.ones(1)} if values["head.bias"].any() else {})


WRONG = {
    "counts calls": (with_a_hidden_counter, r"\['values'\]"),
    "changes its answer": (changed(client=that_changes_its_answer), "head.bias"),
    "changes its state": (changed(client=that_changes_its_state), "count"),
    "unread name": (
        changed(
            answer=that_sends_more, client=of_few_names("client"), predict=of_few_names("predict")
        ),
        "names of an answer",
    ),
    "sends a row": (changed(client=that_sends_a_row), "holds a row"),
    "another form": (changed(client=that_sends_another_form), "head.bias"),
    "changes payloads": (changed(step=that_changes_payloads), "head.bias"),
    "another answer": (changed(answer=that_answers_otherwise_later), "round"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_laws_reject_wrong_methods(wrong, tmp_path):
    make, text = WRONG[wrong]
    with pytest.raises((AssertionError, ValueError), match=text):
        check(make, "fedprox", "one model", tmp_path)
