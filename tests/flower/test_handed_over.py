"""What Flower hands over is honored or refused: arrays, configs, wrappers and modifiers."""

from functools import partial

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import mod
from flwr.serverapp import strategy as flwr

import fedprompt as fp
from fedprompt import flower
from fedprompt.methods import promptfl
from flower_grid import InProcessGrid
from flower_runs import MAX_BYTES, VALUES, again, assert_equal, plain_method
from tiny_federations import clip_federation

pytestmark = pytest.mark.flower

COHORTS = [[0, 1], [0, 1]]


class OneHot(torch.nn.Module):
    def forward(self, inputs):
        return torch.nn.functional.one_hot(inputs, 3).float()


def made():
    return plain_method()._replace(predict=lambda *all: OneHot())


def grid_of(plain, mods=(), method=None, tests=None):
    options = {"max_bytes": MAX_BYTES, "plain": plain, "mods": mods, "tests": tests}
    return InProcessGrid(flower.client_app(method or made(), lambda c, _: c, **options), [0, 1])


def strategy_of(plain, method=None, **options):
    given = {"max_bytes": MAX_BYTES, "plain": plain, "patience": 0.0} | options
    return flower.ServerStrategy(method or made(), COHORTS, **given)


def after(plain, wrap=lambda own: own, mods=(), **given):
    """Return the values after two rounds, and whether `now` has them."""
    own = strategy_of(plain)
    given = {"initial_arrays": own.arrays, "num_rounds": 2} | given
    result = wrap(own).start(grid_of(plain, mods), **given)
    found = own.take(result.arrays).server["values"]
    assert_equal(found, {n: torch.from_numpy(a.numpy()) for n, a in result.arrays.items()})
    return found


def expected():
    *_, now = fp.run_rounds(made(), lambda c, _: c, COHORTS)
    return now.server["values"]


FIXED = {"clipping_norm": 1.0, "num_sampled_clients": 2}
WRAPPERS = {
    "clipping at clients": (
        flwr.DifferentialPrivacyClientSideFixedClipping, FIXED, [mod.fixedclipping_mod]
    ),
    "clipping at the server": (flwr.DifferentialPrivacyServerSideFixedClipping, FIXED, []),
    "adaptive at clients": (
        flwr.DifferentialPrivacyClientSideAdaptiveClipping,
        {"num_sampled_clients": 2},
        [mod.adaptiveclipping_mod],
    ),
    "adaptive at the server": (
        flwr.DifferentialPrivacyServerSideAdaptiveClipping, {"num_sampled_clients": 2}, []
    ),
}  # fmt: skip


@pytest.mark.parametrize("plain", [False, True])
def test_arrays_of_flower_or_bytes_have_the_bits_of_one_process(plain):
    assert_equal(after(plain), expected())
    assert_equal(after(plain, mods=[mod.message_size_mod, mod.arrays_size_mod]), expected())
    assert_equal(after(plain, initial_arrays=ArrayRecord()), expected())


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_clip_and_add_their_noise(name):
    """Of 1,000 equal values, noise makes a spread; clipped ones have not moved by 1 or more."""
    wrapper, options, mods = WRAPPERS[name]
    found = after(True, partial(wrapper, noise_multiplier=0.1, **options), mods)["w"]
    assert found.std() > 1e-4
    assert found.mean() < 0.5
    with pytest.raises((TypeError, ValueError), match=r"noise and clipping .*plain=True"):
        after(False, partial(wrapper, noise_multiplier=0.1, **options))


def test_a_modifier_adds_its_noise_or_is_refused(log):
    noisy = mod.LocalDpMod(1.0, 1.0, 1.0, 1e-5)
    assert after(True, mods=[noisy])["w"].std() > 0.1
    assert_equal(after(False, mods=[noisy]), VALUES)
    assert all("noise and clipping of Flower need plain=True" in line for line in log)
    assert len(log) == 4  # two clients in two rounds


@pytest.mark.parametrize("mods", [[], [mod.message_size_mod]])
def test_clipping_at_clients_without_its_modifier_changes_nothing(mods):
    wrapper = partial(
        flwr.DifferentialPrivacyClientSideFixedClipping, noise_multiplier=1.0, **FIXED
    )
    own = strategy_of(True)
    result = wrapper(own).start(grid_of(True, mods), own.arrays, num_rounds=1)
    assert not result.arrays
    assert_equal(own.now.server["values"], VALUES)


FIRST = ArrayRecord({name: value + 5 for name, value in VALUES.items()})
RATE = ConfigRecord({"lr": 0.1})


def test_first_arrays_are_honored_or_refused():
    assert_equal(after(True, initial_arrays=FIRST)["b"], expected()["b"] + 5)
    with pytest.raises(ValueError, match=r"`arrays` must be an empty .* other values as `start`"):
        after(False, initial_arrays=FIRST)


@pytest.mark.bad_input
@pytest.mark.parametrize("which", ["train_config", "evaluate_config"])
def test_a_config_that_no_modifier_reads_is_refused(which, log):
    with pytest.raises(ValueError, match=f"`{which}` must be empty, .*; got \\['lr'\\]"):
        after(False, **{which: RATE})
    if which == "train_config":
        assert_equal(after(True, train_config=RATE), VALUES)
        assert all("`config` must be empty" in line for line in log)


def test_a_round_is_not_read_before_its_arrays_came_back():
    """A strategy around ours may add noise to them, so the values without noise stay unknown."""
    own, grid = strategy_of(True), grid_of(True)
    sent = own.configure_train(1, own.arrays, ConfigRecord(), grid)
    arrays, _ = own.aggregate_train(1, grid.send_and_receive(sent))
    with pytest.raises(ValueError, match="must be read after `take"):
        _ = own.now
    shifted = ArrayRecord({name: torch.from_numpy(a.numpy() + 1) for name, a in arrays.items()})
    assert own.take(shifted).server["values"]["b"][0] == 1 + 1.6
    with pytest.raises(ValueError, match="`arrays` must have the names"):
        own.take(ArrayRecord({"other": torch.zeros(3)}))


def test_a_loop_of_ones_own_over_bytes_needs_no_arrays():
    own, grid = strategy_of(False), grid_of(False)
    for number in (1, 2):
        sent = own.configure_train(number, ArrayRecord(), ConfigRecord(), grid)
        own.aggregate_train(number, grid.send_and_receive(sent))
    assert_equal(own.now.server["values"], expected())


@pytest.mark.parametrize("kind", [flwr.FedAvg, flwr.FedMedian, flwr.FedProx])
def test_strategies_of_flower_average_plain_messages(kind, log):
    """FedProx sends a config, which a method does not read; no strategy averages bytes."""
    options = {"min_train_nodes": 2, "min_available_nodes": 2, "fraction_evaluate": 0.0}
    result = kind(**options).start(grid_of(True), ArrayRecord(VALUES), num_rounds=2)
    expected = {flwr.FedAvg: 3.2, flwr.FedMedian: 3.0}.get(kind)
    if expected:
        assert result.arrays["b"].numpy() == pytest.approx(expected)
    assert bool(result.arrays) == bool(expected)
    header = fp.wire.Header()
    sent = Envelope(flower.pack(VALUES, header=header), 1, "train")
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({**flower.pack(VALUES, header=header), "metrics": metrics})
    with pytest.raises(TypeError, match="safetensors"):
        kind(**options).aggregate_train(1, [Envelope(content, reply_to=sent)])


@pytest.mark.bad_input
def test_methods_that_are_no_plain_sum_are_refused():
    other = fp.Server({}, lambda *a: {}, lambda *a: {})
    sized = promptfl(clip_federation(), sizes={3: 1})
    for method in (made()._replace(exchanges=2), made()._replace(server=other), sized):
        with pytest.raises(ValueError, match="have one exchange, and an averaging_server that an"):
            strategy_of(True, method)


def test_rows_of_unlike_weights_are_refused_at_the_client(log):
    def rows(data, answer, state):
        return {n: fp.Weighted(v, torch.ones(len(v))) for n, v in answer.items()}, state

    other = made()._replace(client=rows)
    strategy_of(True).start(grid_of(True, method=other), ArrayRecord(), num_rounds=1)
    assert all("entries of one common weight" in line for line in log)
    assert len(log) == 2


def with_metrics(**metrics):
    """Add metrics to the record of metrics, if there is one."""

    def changed(content):
        (name,) = content.metric_records or ["metrics"]
        record = MetricRecord({**content.metric_records.get(name, {}), **metrics})
        return RecordDict({**content, name: record})

    return changed


def with_record(name, record):
    return lambda content: RecordDict({**content, name: record})


FIELDS = {
    "a metric": with_metrics(own=3.0),
    "a metric with the name of a count": with_metrics(asked=7, images=7),
    "a metric that is no number": with_metrics(own=[1.0, 2.0]),
    "metrics": with_record("more", MetricRecord({"own": 3.0})),
    "a config": with_record("more", ConfigRecord({"own": 3.0})),
    "an entry of the client id": with_record("client", ConfigRecord({"client": 1, "own": 3.0})),
    "an entry of the state": with_record("stateful", ConfigRecord({"own": 3.0})),
    "arrays": with_record("more", FIRST),
}


@pytest.mark.parametrize(
    ("kind", "plain"),
    [("train", False), ("train", True), ("evaluate", False), ("query.client", False)],
)
@pytest.mark.parametrize("direction", ["request", "reply"])
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_of_a_message_is_averaged_or_has_a_line_in_the_log(
    field, direction, kind, plain, log
):
    """One message of client 1 has one field more."""

    class Changing(InProcessGrid):
        def push_messages(self, messages):
            return super().push_messages([change(m, "request") for m in messages])

    def change(message, where):
        meta = message.metadata
        node = meta.dst_node_id if where == "request" else meta.src_node_id
        if (where, meta.message_type, node) != (direction, kind, 993):
            return message
        return again(message, FIELDS[field](message.content))

    own, options = strategy_of(plain, tested=[0, 1]), {"max_bytes": MAX_BYTES, "plain": plain}
    zeros = torch.zeros(2, dtype=int)
    app = flower.client_app(made(), lambda c, _: c, tests=lambda c: (zeros, zeros), **options)
    grid = Changing(app, [0, 1], fault=lambda reply: [change(reply, "reply")])
    result = own.start(grid, ArrayRecord(), num_rounds=1)
    means = result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp.get(1, {})
    assert any("own" in each for each in means) or any("993" in line for line in log)


def test_metrics_of_replies_are_averaged_into_the_result():
    """A modifier of the node adds, by images, its loss and, at client 1, its own figure."""

    def adding(message, context, call_next):
        reply, client = call_next(message, context), context.node_config["partition-id"]
        return again(
            reply, with_metrics(loss=1.0 + client, **{"own": 3} if client else {})(reply.content)
        )

    def tests(client):
        return torch.zeros(2 + client, dtype=int), torch.zeros(2 + client, dtype=int)

    result = strategy_of(True, tested=[0, 1]).start(
        grid_of(True, [adding], tests=tests), ArrayRecord(), num_rounds=1
    )
    for found in (result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]):
        assert (found["loss"], found["own"]) == ((2 * 1 + 3 * 2) / 5, 3)


def test_timeout_and_evaluate_fn_are_honored():
    grid, seen = grid_of(False), []

    def evaluate(number, arrays):
        seen.append(arrays["b"].numpy()[0])
        return MetricRecord({"first": float(seen[-1])})

    given = {"num_rounds": 2, "timeout": 7.0, "evaluate_fn": evaluate}
    result = strategy_of(False).start(grid, ArrayRecord(), **given)
    assert set(grid.timeouts) == {7.0}
    assert seen == pytest.approx([0.0, 1.6, 3.2])
    assert result.evaluate_metrics_serverapp[2]["first"] == seen[-1]


def test_clients_test_their_own_models_and_the_best_round_is_kept():
    """Client 0 has three images and client 1 one; from round to round their labels change."""

    def tests(client):
        return (torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])) if client == 0 else (
            torch.tensor([2]), torch.tensor([2]))  # fmt: skip

    own = strategy_of(False, tested=[0, 1])
    result = own.start(grid_of(False, tests=tests), ArrayRecord(), num_rounds=2)
    found = result.evaluate_metrics_clientapp[2]
    assert (found["clients"], found["images"], found["accuracy"]) == (2, 4, 0.75)
    assert found["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["loss"] == pytest.approx((2 * 0.5514 + 1.5514 + 0.5514) / 4, abs=1e-4)
    assert own.best.now.server_round == 0  # of equal rounds, the first
    assert {"asked": 2, "accepted": 2}.items() <= result.train_metrics_clientapp[1].items()
    assert result.train_metrics_clientapp[1]["bytes_up"] > 2 * 4 * 1003


def test_figures_without_tests_or_out_of_range_are_left_out(log):
    own = strategy_of(False, tested=[0, 1])
    result = own.start(grid_of(False), ArrayRecord(), num_rounds=1)
    assert (result.evaluate_metrics_clientapp, own.best) == ({}, None)
    assert all("`tests` must be given to `client_app`" in line for line in log)
