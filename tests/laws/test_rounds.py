"""Laws of an engine that runs rounds, and wrong engines that the laws reject."""

import random
import signal
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedprompt as fp
import small_method
import two_processes
from fedprompt.codecs import float16, int8, top_k
from fedprompt.methods import Federation, Setting
from fedprompt.wire import Header, encode_payload
from fedprompt.wire.gather import ranks_of
from refusals import refused
from same import assert_same
from small_method import COHORTS, GUESTS, Data, method


def printed_loop(method, data, cohorts):
    """Run rounds as on the page about rounds, with exchanges."""
    server, clients = method.server.state, {}
    for server_round, cohort in enumerate(cohorts):
        for _ in range(method.exchanges):
            payloads = {}
            for client in sorted(cohort):
                answer = method.server.answer(client, server)
                state = clients.get(str(client), {})
                payload, state = method.client(data(client, server_round), answer, state)
                clients = clients | {str(client): state}
                payloads |= {} if payload is None else {client: payload}
            if payloads:
                server = method.server.step(server_round, payloads, server)
        yield fp.Round(server_round, server, clients)


def assert_equal_rounds(found, expected):
    """Require bitwise equal rounds; their dicts may have another order."""
    assert_same(list(map(tuple, found)), list(map(tuple, expected)), ordered=False)


def check_equals_the_loop(run):
    for exchanges in (1, 2):
        found = list(run(method(exchanges), Data, COHORTS))
        expected = list(printed_loop(method(exchanges), Data, COHORTS))
        assert_same(
            [tuple(each) for each in found], [tuple(each) for each in expected], ordered=False
        )


def check_resumes(run, folder):
    unbroken = list(run(method(), Data, COHORTS))
    for rounds in range(1, len(COHORTS)):
        fp.save_checkpoint(unbroken[rounds - 1], folder)
        rest = list(run(method(), Data, iter(COHORTS), start=fp.load_checkpoint(folder)))
        assert_equal_rounds(rest, unbroken[rounds:])


def check_keeps_nothing_after_an_error(run):
    rounds = run(small_method.broken(0), Data, COHORTS)
    now = next(rounds)
    before = {client: dict(state) for client, state in now.clients.items()}
    with pytest.raises(ZeroDivisionError) as error:
        next(rounds)
    assert error.value.__notes__ == ["client 3, round 1"]
    assert_same(dict(now.clients), before)  # client 2 trained, and is not in it


LAWS = [check_equals_the_loop, check_resumes, check_keeps_nothing_after_an_error]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_law(law, on_disk, tmp_path):
    options = {"states": tmp_path / "states"} if on_disk else {}
    run = partial(fp.run_rounds, **options)
    law(run, *([tmp_path / "checkpoint"] if law is check_resumes else []))


def with_order_of_cohort(method, data, cohorts, *, start=None):
    """Give payloads to the step in the order of the cohort."""
    order = {}

    def step(server_round, payloads, state):
        ids = [client for client in order["now"] if client in payloads]
        return method.server.step(server_round, {c: payloads[c] for c in ids}, state)

    def watched():
        for cohort in cohorts:
            order["now"] = cohort
            yield cohort

    wrong = method._replace(server=method.server._replace(step=step))
    return fp.run_rounds(wrong, data, watched(), start=start)


def without_skipping(method, data, cohorts, *, start=None):
    """Begin with the first cohort again after a resume."""
    first = start and start._replace(server_round=-1)
    return fp.run_rounds(method, data, cohorts, start=first)


def with_shared_states(method, data, cohorts, *, start=None):
    """Write states into one dict, which a round that fails has changed."""
    states = {}

    def train(own, answer, state):
        payload, states[str(own.id)] = method.client(own, answer, state)
        return payload, states[str(own.id)]

    for now in fp.run_rounds(method._replace(client=train), data, cohorts, start=start):
        yield now._replace(clients=states)


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (check_equals_the_loop, with_order_of_cohort),
        (check_resumes, without_skipping),
        (check_keeps_nothing_after_an_error, with_shared_states),
    ],
)
def test_laws_reject_wrong_engines(law, wrong, tmp_path):
    with pytest.raises(AssertionError):
        law(wrong, *([tmp_path] if law is check_resumes else []))


def killed_and_resumed(folder, seed, *states):
    """Kill a run with -9 at random moments until it ends."""
    moments, program = (
        random.Random(seed),
        "import small_method, sys; small_method.resume(*sys.argv[1:])",
    )
    for number in range(20):
        command = [sys.executable, "-c", program, str(folder), *map(str, states)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(moments.randrange(5, 60)):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        now = fp.load_checkpoint(folder)
        if now.server_round == 20 * len(COHORTS) - 1:
            return number, now
    raise AssertionError("the run did not end")


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_run_that_is_killed_and_resumed_equals_an_unbroken_one(tmp_path, monkeypatch, on_disk):
    monkeypatch.setenv("PYTHONPATH", str(Path(small_method.__file__).parent))
    checkpoint, states = tmp_path / "checkpoint", tmp_path / "states"
    kills, found = killed_and_resumed(checkpoint, 0, *([states] if on_disk else []))
    *_, expected = fp.run_rounds(method(), Data, COHORTS * 20)
    assert kills > 1
    assert_equal_rounds([found], [expected])
    if on_disk:  # a file for each of six clients, and those of the round from which it went on
        assert 6 <= len(list(checkpoint.glob("client-*"))) <= 12
        assert 6 <= len(list(states.glob("client-*"))) <= 12


def test_counted_bytes_are_the_bytes_of_the_encoded_messages():
    ledger, sizes = fp.Ledger(), {"up": 0, "down": 0}
    made = method()

    def train(data, answer, state):
        payload, state = made.client(data, answer, state)
        for direction, message in (("down", answer), ("up", payload)):
            if message is not None:
                blob = encode_payload(message, header=Header())
                sizes[direction] += len(blob) - 8 - int.from_bytes(blob[:8], "little")
        return payload, state

    plain = list(fp.run_rounds(made, Data, COHORTS))
    found = list(
        fp.run_rounds(fp.rounds.counted(made._replace(client=train), ledger), Data, COHORTS)
    )
    assert_equal_rounds(found, plain)
    assert {way: ledger.total(direction=way) for way in sizes} == sizes
    assert ledger.total(client=5, direction="up") == 0 < ledger.total(client=5)
    assert {server_round for _, server_round, _ in ledger.sent} == {0, 1, 3, 4, 5}


@pytest.mark.parametrize("codec", [float16(), int8(), top_k(fraction=0.3)], ids=["16", "8", "top"])
def test_a_coded_method_sends_what_the_codec_encodes_with_the_memory_of_each_client(
    codec, tmp_path
):
    made, memories, sent = method(), {}, []

    def train(data, answer, state):
        payload, state = made.client(data, answer, state)
        if payload is not None:
            memory = memories.get(data.id) or codec.init(payload)
            message, memories[data.id] = codec.encode(payload, memory)
            sent.append(message)
            payload = codec.decode(message, like=made.form(data.id))
        return payload, state

    made = made._replace(server=made.server._replace(changes=True))  # encoded as they are
    expected = list(fp.run_rounds(made._replace(client=train), Data, COHORTS))
    ledger, coded = fp.Ledger(), fp.rounds.coded(made, codec)
    for rounds in range(len(COHORTS)):  # each in a new run, so memory survives a checkpoint
        start = fp.load_checkpoint(tmp_path, default=None)
        *_, now = islice(
            fp.run_rounds(fp.rounds.counted(coded, ledger), Data, COHORTS, start=start), 1
        )
        fp.save_checkpoint(now, tmp_path)
        assert_same(dict(now.server), dict(expected[rounds].server), ordered=False)
        for client in range(6):
            data = Data(client, rounds)
            models = now.model(coded, data), expected[rounds].model(made, data)
            assert torch.equal(*(model.value for model in models))
    assert ledger.total(direction="up") == sum(map(fp.num_bytes, sent))
    assert fp.num_bytes(coded.form(0)) <= fp.num_bytes(sent[0])
    unread = {
        name: fp.Weighted(*(part * torch.nan for part in entry))
        for name, entry in made.form(0).items()
    }
    again = fp.rounds.coded(made._replace(form=lambda client: unread), codec).form(0)
    assert_same(again, coded.form(0))


def answering(payload, state):
    """Return arguments for clients with this payload and this state."""
    made = method()._replace(client=lambda data, answer, own: (payload, state))
    return made, Data, [[2]]


def stepping(state):
    """Return arguments for a server with this state after a step."""
    made = method()
    made = made._replace(server=made.server._replace(step=lambda *arguments: state))
    return made, Data, [[2]]


def known(client, server_round):
    return {0: Data(0, server_round)}[client]


ONE = {"x": fp.Weighted(torch.ones(3), torch.ones(3))}
REFUSED = {
    "round 1: `cohorts` must have a client at most once in a round; got [1]": (
        lambda: (method(), Data, [[0], [1, 1]])
    ),
    "round 0: `cohorts[0][0]` must be at least 0; got -1": lambda: (method(), Data, [[-1]]),
    "round 0: `cohorts[0][0]` must be an integer": lambda: (method(), Data, [["a"]]),
    "`cohorts` must have clients that `data` knows; got client 7 in round 1": (
        lambda: (method(), known, [[0], [0, 7]])
    ),
    "`method.client` must return a payload and a state; got None": (
        lambda: (method()._replace(client=lambda data, answer, state: None), Data, [[2]])
    ),
    "client 2, round 0: `payload` must map names to tensors": lambda: answering([1], {}),
    "client 2, round 0: `payload['x']` must be a tensor or": lambda: answering({"x": 1.0}, {}),
    "client 2, round 0: `payload` must have strings as": lambda: answering({3: torch.ones(1)}, {}),
    "client 2, round 0: `state['a']` must be a dict, list": lambda: answering(ONE, {"a": object()}),
    "client 2, round 0: `state` must be a dict; got None": lambda: answering(ONE, None),
    "server, round 0: `state['a']` must have strings and": lambda: stepping({"a": {1.5: 0}}),
    "server, round 0: `state` must be a dict; got a list": lambda: stepping([1]),
    "`method` must be a Method(client, server, predict)": lambda: (small_method, Data, [[2]]),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_with_client_round_and_rule(message):
    with pytest.raises((TypeError, ValueError)) as error:
        list(fp.run_rounds(*REFUSED[message]()))
    assert message in str(error.value)


@pytest.mark.bad_input
def test_a_start_that_is_no_round_and_a_codec_without_a_form_are_refused():
    for start, message in (
        ((0, {}, {}), "`start` must be a Round or None; got a tuple"),
        (fp.Round(-2, {}, {}), "`start.server_round` must be at least -1; got -2"),
        (fp.Round(0, {}, {1: {}}), "`start.clients` must have strings as names; got 1"),
        (fp.Round(0, {}, {"a": {}}), "`start.clients` must have ids of clients as keys; got 'a'"),
        (fp.Round(0, {}, {}, ["3"]), "`start` must have the state of each client that has one"),
        (fp.Round(0, {}, {"3": {"client": {"a": 1}, "codec": {}}}), "`method` must have 1 codecs"),
        (fp.Round(0, {}, {"3": 5}), r"`clients\['3'\]` must be a dict; got 5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            next(fp.run_rounds(method(), Data, COHORTS, start=start))
    coded, start = fp.rounds.coded(method(), int8()), fp.Round(0, {}, {"3": {"own": 1}})
    with pytest.raises(ValueError, match=r"`method` must have 0 codecs, .* client 3; got 1"):
        next(fp.run_rounds(coded, Data, COHORTS, start=start))
    for ids in ([3], "3"):
        with pytest.raises(TypeError, match="`stateful"):
            fp.Round(0, {}, {}, ids)
    with pytest.raises(TypeError, match=r"`method\.form` must be a function, by which"):
        fp.rounds.coded(method()._replace(form=None), int8())


def test_an_error_of_a_step_has_the_payloads_and_the_round_as_notes():
    def step(server_round, payloads, state):
        raise ValueError("of the step")

    made = method()._replace(server=method().server._replace(step=step))
    with pytest.raises(ValueError, match="of the step") as error:
        next(fp.run_rounds(made, Data, [[2, 0]]))
    assert error.value.__notes__ == ["payloads of clients [0, 2]", "server, round 0"]


def test_a_malformed_payload_is_named_by_its_client_and_not_by_its_position():
    def train(data, answer, state):
        payload, state = method().client(data, answer, state)
        return {"x": fp.Weighted(payload["x"].value, -payload["x"].weight)}, state

    with pytest.raises(ValueError, match=r"`payloads\[2\]\['x'\]\.weight` must"):
        next(fp.run_rounds(method()._replace(client=train), Data, [[2, 3]]))


def test_a_state_that_is_elsewhere_is_refused_where_it_is_read(tmp_path):
    made = method()
    *_, now = fp.run_rounds(made, Data, COHORTS)
    server_round, _, clients = now
    assert (server_round, now.stateful) == (5, {"0", "1", "2", "3", "4", "5"} & clients.keys())
    fp.save_checkpoint(now._replace(clients={}), tmp_path)
    bare = fp.load_checkpoint(tmp_path)
    models = bare.model(made, Data(7, 5)), now.model(made, Data(7, 5))  # a newcomer
    assert torch.equal(*(model.value for model in models))
    with pytest.raises(ValueError, match=r"`now\.clients` must have the state of client 3, which"):
        bare.model(made, Data(3, 5))
    unread = made._replace(predict=lambda data, answer, state: small_method.Value(answer["x"]))
    models = bare.model(unread, Data(3, 5)), now.model(unread, Data(3, 5))
    assert torch.equal(*(model.value for model in models))


def test_autocast_with_its_cache_is_refused_before_each_round():
    rounds = fp.run_rounds(method(), Data, COHORTS)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        next(rounds)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="with its cache"):
        next(rounds)


def test_a_codec_that_leaves_numbers_out_sends_changes_and_counted_methods_come_last():
    plain, few = method(exchanges=1), top_k(fraction=1.0)
    with pytest.raises(ValueError, match=r"`method\.server\.changes` must say whether"):
        fp.rounds.coded(plain, few)
    plain = plain._replace(server=plain.server._replace(changes=False))
    expected = list(fp.run_rounds(plain, Data, COHORTS))
    found = list(fp.run_rounds(fp.rounds.coded(plain, few), Data, COHORTS))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one.server["values"]["x"], other.server["values"]["x"])
    for wrapped, codec in (
        (fp.rounds.counted(plain, fp.Ledger()), int8()),
        (fp.rounds.coded(plain, float16()), few),
    ):
        with pytest.raises(ValueError, match=r"`method` must (be coded before|not be coded)"):
            fp.rounds.coded(wrapped, codec)


def test_entries_of_an_answer_are_values_of_which_changes_are_sent():
    def train(data, answer, state):
        value = answer["x"].value + 1 if answer else torch.ones(3)
        return {"x": fp.Weighted(value, torch.ones(3))}, state

    def coded(answer):
        server = fp.Server({}, lambda *all: answer, lambda number, found, state: found[2], False)
        made = fp.Method(train, server, max, form=lambda client: ONE)
        return fp.run_rounds(fp.rounds.coded(made, top_k(fraction=1.0)), Data, [[2]])

    assert next(coded(ONE)).server["x"].value.tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match=r"`answer` must have each entry .* none for 'x'"):
        next(coded({}))


def test_a_client_whose_numbers_are_not_finite_is_named_by_its_id():
    def train(data, answer, state):
        number = torch.nan if data.id == 9 else 1.0
        return {"x": fp.Weighted(torch.full((3,), number), torch.tensor(1.0))}, state

    made = fp.Method(train, fp.averaging_server({"x": torch.zeros(3)}), lambda *all: None)
    with pytest.raises(ValueError, match=r"^`payloads\[9\]\['x'\]\.value` must be finite"):
        list(fp.run_rounds(made, Data, [[5, 9, 11]]))


def test_an_empty_message_is_legal():
    made = method()._replace(client=lambda data, answer, state: ({}, {"met": data.id}))
    seen = []
    server = fp.Server(
        {}, lambda client, state: {}, lambda r, payloads, state: seen.append(payloads) or {}
    )
    (now,) = fp.run_rounds(fp.rounds.coded(made._replace(server=server), int8()), Data, [[2, 0]])
    assert (list(now.clients), seen) == (["0", "2"], [{0: {}, 2: {}}] * 2)


def test_a_loaded_optimizer_state_does_not_change_with_later_steps():
    parameter = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], 0.1)
    fp.rounds.load_optimizer(optimizer, {})
    parameter.grad = torch.ones(2)
    optimizer.step()
    state = fp.rounds.optimizer_state(optimizer)
    before = state["state"][0]["exp_avg"].clone()
    fp.rounds.load_optimizer(optimizer, state)
    optimizer.step()
    assert torch.equal(state["state"][0]["exp_avg"], before)
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)


@pytest.mark.parametrize(("rate", "expected"), [("round", 0.5), ("state", 0.1)])
def test_an_optimizer_keeps_the_rate_of_the_round_or_takes_the_stored_one(rate, expected):
    weight = torch.ones(2, requires_grad=True)
    optimizer, stored = torch.optim.SGD([weight], 0.5), torch.optim.SGD([weight], 0.1, 0.9)
    fp.rounds.load_optimizer(optimizer, fp.rounds.optimizer_state(stored), rate=rate)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (expected, 0.9)


def test_a_server_says_whether_a_round_without_payloads_takes_a_step():
    def rounds(empty):
        server = fp.Server(
            {"x": 0}, lambda *all: {}, lambda r, p, s: {"x": s["x"] + 1}, empty=empty
        )
        made = method()._replace(server=server, client=lambda *all: (None, {}), exchanges=1)
        return [now.server["x"] for now in fp.run_rounds(made, Data, [[], [0]])]

    assert (rounds(True), rounds(False)) == ([1, 2], [0, 0])
    with pytest.warns(UserWarning, match=r"A round has no clients.*Server\(\.\.\., empty=True\)"):
        assert rounds(None) == [0, 0]


def test_a_schedule_stays_at_its_last_value_and_warns_once():
    made = Setting(num_classes=2, rounds=4, schedule=lambda over: 1 - over)
    assert [made.learning_rate(2.0, at) for at in range(4)] == [2, 1.5, 1, 0.5]
    with pytest.warns(UserWarning, match="Round 4 is after the 4 rounds of the setting") as caught:
        assert [made.learning_rate(2.0, at) for at in (4, 9)] == [0.5, 0.5]
    assert len(caught) == 1


UNLIKE = [torch.zeros(2), torch.zeros(3)]
NOT_SENT = {"sparse": torch.eye(3).to_sparse}
NOT_SENT |= {"nested": lambda: torch.nested.nested_tensor(UNLIKE, layout=torch.jagged)}


@pytest.mark.parametrize("kind", NOT_SENT)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("place", ["payload", "answer", "state"])
def test_a_tensor_that_cannot_be_sent_is_refused_by_its_place_and_rule(place, whole, kind):
    one, tensor = torch.tensor(1.0), NOT_SENT[kind]()
    entry = tensor if whole else fp.Weighted._make((tensor, one))
    payload = {"x": entry} if place == "payload" else {"x": fp.Weighted(torch.zeros(3), one)}
    state, answer = ({"x": entry} if place == each else {} for each in ("state", "answer"))
    server = SERVER._replace(answer=lambda client, state: answer)
    made = fp.Method(lambda data, own, before: (payload, state), server, max)
    rule = rf"client 0, round 0.*: `{place}\['x'\].*` must be .*dense tensor"
    with pytest.raises(TypeError, match=rule):
        next(fp.run_rounds(made, Data, [[0]]))


FEDERATION = Federation(
    torch.ones(4, 2), torch.arange(4), {0: torch.arange(3), 3: torch.tensor([3])}
)
SERVER = fp.averaging_server({"x": torch.zeros(3)})
SGD = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)

test_wrong_calls_are_refused_by_name = refused(globals())("""
next(fp.run_rounds(method(), 3, COHORTS)) -> TypeError: `data` must be a Federation, or a function
next(fp.run_rounds(method(), FEDERATION.data, COHORTS)) -> TypeError: data; got a function (setting,
next(fp.run_rounds(method(), Federation, COHORTS)) -> TypeError: got a function (inputs, labels, sha
fp.Method(lambda data: 0, SERVER, min) -> TypeError: `client` must be a function (data, answer, stat
fp.Method(max, SERVER, lambda data: 0) -> TypeError: `predict` must be a function (data, answer, sta
fp.Server({}, lambda state: {}, max) -> TypeError: `answer` must be a function (client, state); got
fp.Server({}, max, lambda state: {}) -> TypeError: `step` must be a function (server_round, payloads
next(fp.run_rounds(method(), Data)) -> ValueError: `cohorts` must be given with your own data
next(fp.run_rounds(method(), FEDERATION)) -> ValueError: `method` must have a setting, Method(..., s
fp.Round(0, {}, {}).model(method(), FEDERATION, 0) -> ValueError: `method` must have a setting
fp.Round(0, {}, {}).model(method(), Data, 0) -> TypeError: `data` must be a Federation, or a func
next(fp.run_rounds(method(), Data, 3)) -> TypeError: `cohorts` must be an iterable of cohorts; got 3
next(fp.run_rounds(method(), Data, COHORTS, share=1)) -> TypeError: `share` must be True or False
next(fp.run_rounds(method(), Data, [], start=fp.Round(0, {}, 3))) -> TypeError: `start.clients` must
fp.rounds.counted(3, fp.Ledger()) -> TypeError: `method` must be a Method
fp.rounds.counted(method(), 3) -> TypeError: `ledger` must be a Ledger; got 3
fp.rounds.coded(3, int8()) -> TypeError: `method` must be a Method
fp.rounds.coded(method(), 3) -> TypeError: `codec` must be a codec, such as codecs.int8(); got 3
fp.rounds.coded(method(), int8()).form(-1) -> ValueError: `client` must be at least 0; got -1
fp.rounds.optimizer_state(3) -> TypeError: `optimizer` must be an optimizer of torch.optim; got 3
fp.rounds.load_optimizer(3, {}) -> TypeError: `optimizer` must be an optimizer of torch.optim; got 3
fp.rounds.load_optimizer(SGD, 3) -> TypeError: `state` must be a state of `optimizer_state`; got 3
""")


@pytest.mark.unhooked  # an iterator of clients is taken, too
def test_a_federation_follows_the_setting_of_the_method():
    """Clients and cohorts are those of the setting; without clients, all of the federation."""
    seen = []

    def train(data, answer, state):
        seen.append((data.id, data.server_round, len(list(data.batches()))))
        return {}, state

    def run(cohorts=None, **changes):
        seen.clear()
        setting = Setting(**{"num_classes": 4, "rounds": 2, "steps": 2, "clients": [3]} | changes)
        made = fp.Method(train, fp.averaging_server({}), max, setting=setting)
        list(fp.run_rounds(made, FEDERATION, cohorts))
        return list(seen)

    assert run() == [(3, 0, 2), (3, 1, 2)]
    assert run(clients=iter([0]), steps=5, rounds=1) == [(0, 0, 5)]
    assert run(clients=(), rounds=1) == [(0, 0, 2), (3, 0, 2)]
    assert run([[0], [3]], clients=(), steps=1) == [(0, 0, 1), (3, 1, 1)]


@pytest.mark.bad_input
def test_a_refused_optimizer_state_changes_nothing():
    optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], 0.1)
    before = fp.rounds.optimizer_state(optimizer)
    broken = {"param_groups": [before["param_groups"][0] | {"lr": 9.0}], "state": {0: 3}}
    with pytest.raises(ValueError, match="`state` must be a state dict of this optimizer"):
        fp.rounds.load_optimizer(optimizer, broken)
    assert_same(fp.rounds.optimizer_state(optimizer), before)


@given(st.lists(st.integers(0, 200), unique=True), st.integers(1, 9))
def test_a_rank_that_shares_is_full_of_its_lowest_clients_before_one_is_a_guest(cohort, world):
    hosts, most = ranks_of(cohort, world, share=True), -(-len(cohort) // world)
    for client in cohort:
        neighbors = [each for each in cohort if each < client and (each - client) % world == 0]
        assert hosts[client] == client % world or len(neighbors) >= most
    assert all(list(hosts.values()).count(rank) <= most for rank in range(world))
    assert hosts == ranks_of(sorted(cohort), world, share=True)
    assert ranks_of(cohort, world) == {client: client % world for client in cohort}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Result and seconds of every step in each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    two_processes.run(small_method.run_steps, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "step",
    ["all rounds", "resumed", "resumed from one folder", "shared", "shared, from one process",
     "on disk", "on disk, shared", "all rounds, after all errors"],
)  # fmt: skip
def test_two_ranks_equal_one_process(ranks, step):
    *_, expected = fp.run_rounds(method(), Data, GUESTS if "shared" in step else COHORTS)
    for rank, results in enumerate(ranks):
        now, _ = results[step]
        assert_same(dict(now.server), dict(expected.server), ordered=False)
        own = {client: each for client, each in expected.clients.items() if int(client) % 2 == rank}
        assert_same(dict(now.clients), own, ordered=False)
        assert now.stateful == expected.stateful


@pytest.mark.slow
def test_the_ledgers_of_ranks_sum_to_that_of_one_process(ranks):
    ledger = fp.Ledger()
    list(fp.run_rounds(fp.rounds.counted(method(), ledger), Data, GUESTS))
    assert sum(results["bytes"][0] for results in ranks) == ledger.total()


FAILED = {
    "client 3 fails": (
        "ZeroDivisionError: no batches; client 3, round 1",
        "RuntimeError: rank 0: ZeroDivisionError: no batches\nclient 3, round 1",
    ),
    "one rank shares": (
        "ValueError: `share` must be the same on every rank in round 0; got ['True', 'False']",
    ),
    "a step fails": (
        "RuntimeError: rank 1: ArithmeticError: out of numbers\nserver, round 3",
        "ArithmeticError: out of numbers; server, round 3",
    ),
    "one rank saved": (
        "RuntimeError: rank 1: ValueError: `start` must have the states of this rank's clients",
        "ValueError: `start` must have the states of this rank's clients; got none of client 1",
    ),
    "a newcomer trained": (
        "RuntimeError: rank 1: ValueError: `newcomers` must be clients that never trained; got [1]",
        "ValueError: `newcomers` must be clients that never trained; got [1]",
    ),
    "servers drift": (
        "ValueError: `server.state` must be the same on every rank in round 1; got [",
    ),
    "servers differ at first": (
        "ValueError: `server.state` must be the same on every rank in round 0; got [",
    ),
    "cohorts differ": (
        "ValueError: `cohorts` must be the same on every rank in round 1; got ['[0, 2]', '[1, 2]']",
    ),
    "rank 1 ends early": (
        "ValueError: `cohorts` must be the same on every rank in round 2; got ['[]', 'no more']",
    ),
    "cohorts fail": ("RuntimeError: rank 1: OSError: no list", "OSError: no list"),
    "rounds differ": ("ValueError: `server_round` must be the same on every rank; got [1, 2]",),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", FAILED)
def test_an_error_of_one_rank_ends_all_within_ten_seconds(ranks, step):
    for results, text in zip(ranks, (FAILED[step] * 2)[:2], strict=True):
        error, seconds = results[step]
        assert error.startswith(text), error
        assert seconds < 10


@pytest.mark.slow
def test_a_rank_that_left_ends_the_run_of_the_others(ranks):
    error, seconds = ranks[0]["rank 1 is gone"]
    text = "RuntimeError: round 0: rank 0 waited for the start, and rank 1 did not answer"
    assert error.startswith(text)
    assert seconds < 10
