# ruff: noqa: NPY002
"""Laws of random numbers, and of who made a round, over methods of the gallery."""

import random
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt import methods
from fedprompt.methods import Federation, HeldOut, VitSetting, evaluate
from same import assert_same
from tiny_federations import trunk

LABELS = torch.arange(30) % 3
IMAGES = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
SHARDS = {client: torch.arange(6) + 6 * client for client in range(5)}
FEDERATION, HELD_OUT = Federation(IMAGES, LABELS, SHARDS), HeldOut(IMAGES, LABELS)
TRUNK = trunk(8)


class Dropped(fp.DeepPrompts):
    """Prompts with dropout."""

    def forward(self):
        stream = super().forward()
        return stream._replace(
            layers={k: nn.functional.dropout(v) for k, v in stream.layers.items()}
        )


def shifted(images, generator):
    """Augment as torchvision does, from the global generators."""
    return images + torch.rand(()) + np.random.rand() + random.random()


def setting(**changes):
    budget = {"rounds": 3, "steps": 2, "batch_size": 4, "cohort_size": 3, "clients": range(5)}
    kinds = {"num_classes": 3, "prompts": lambda trunk: Dropped(2, trunk), "augment": shifted}
    return VitSetting(**{"trunk": TRUNK, **budget, **kinds, **changes})


MAKERS = [methods.fedprox, methods.scaffold, methods.ditto, methods.pfedme]


def run(make, cohorts=None, start=None, **changes):
    rounds = fp.run_rounds(make(setting(**changes)), FEDERATION, cohorts, start=start)
    return list(map(tuple, rounds))


@pytest.mark.parametrize("make", MAKERS)
def test_draws_depend_neither_on_the_order_of_clients_nor_on_what_a_loop_does(make, tmp_path):
    expected = run(make)
    cohorts = [cohort[::-1] for cohort in setting().cohorts()]
    assert_same(run(make, cohorts), expected, ordered=False)
    method, found = make(setting()), []
    for now in fp.run_rounds(method, FEDERATION):
        torch.rand(now.server_round + 1)
        torch.manual_seed(7)
        evaluate(method, FEDERATION, now, HELD_OUT)
        fp.save_checkpoint(now, tmp_path / str(now.server_round))
        found.append(tuple(now))
    assert_same(found, expected, ordered=False)
    start = fp.load_checkpoint(tmp_path / "0")
    assert_same(run(make, start=start), expected[1:], ordered=False)


def drawing(data, answer, state):
    """Send draws of all three libraries."""
    draws = torch.rand(1) + np.random.rand() + random.random()
    return {"x": fp.Weighted(draws, torch.tensor(1.0))}, state


OWN = fp.Method(drawing, fp.averaging_server({"x": torch.zeros(1)}), lambda *all: nn.Identity())


def of_seed(seed):
    torch.manual_seed(seed)
    (now,) = fp.run_rounds(OWN, lambda client, server_round: client, [[0, 1]])
    return now.server["values"]["x"].item()


def test_own_methods_have_the_seed_of_torch():
    assert of_seed(1) == of_seed(1) != of_seed(2)


def test_draws_in_training_do_not_depend_on_those_of_the_data_and_of_an_answer():
    def sent(count):
        def data(client, server_round):
            torch.rand(count)
            return client

        def answer(client, state):
            torch.rand(count)
            return OWN.server.answer(client, state)

        torch.manual_seed(1)
        method = OWN._replace(server=OWN.server._replace(answer=answer))
        (now,) = fp.run_rounds(method, data, [[0, 1]])
        return now.server["values"]["x"].item()

    assert sent(0) == sent(3)


def states():
    return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]


FIRST_CALL = """
import random
import torch
from fedprompt.transport import exact
state = random.getstate()
exact(torch.ones(2, 1), torch.ones(2) / 2, torch.ones(1))  # the import of POT draws
assert random.getstate() == state
"""


def test_the_first_call_that_imports_a_library_draws_no_numbers(in_new_process):
    in_new_process(FIRST_CALL)


def test_a_loop_finds_its_streams_as_it_left_them_also_after_an_error():
    def fails(data, answer, state):
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        return drawing(data, answer, state) if data < 2 else 1 / 0

    rounds = fp.run_rounds(OWN._replace(client=fails), lambda c, r: c, [[0], [1], [2]])
    for _ in range(2):
        before = states()
        next(rounds)
        assert states() == before
        torch.rand(3)
    before, seed = states(), torch.initial_seed()
    with pytest.raises(ZeroDivisionError):
        next(rounds)
    assert (states(), torch.initial_seed()) == (before, seed)
    closed = fp.run_rounds(OWN, lambda c, r: c, [[0], [1]])
    next(closed)
    closed.close()
    assert (states(), torch.initial_seed()) == (before, seed)


def test_cohorts_that_draw_from_the_streams_of_the_loop_differ_from_round_to_round():
    def cohorts():
        for _ in range(4):
            yield [
                random.randrange(99),
                100 + np.random.randint(99),
                200 + int(torch.randint(99, ())),
            ]

    def train(data, answer, state):
        seen.append(data)
        return drawing(data, answer, state)

    drawn, seen = [], []
    for found in (drawn, seen):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        if found is drawn:
            drawn += [int(client) for cohort in cohorts() for client in cohort]
        else:
            list(fp.run_rounds(OWN._replace(client=train), lambda c, r: c, cohorts()))
    assert seen == drawn


def test_an_iterator_of_cohorts_that_another_run_used_up_is_refused():
    cohorts = iter([[0], [1]])
    *_, now = fp.run_rounds(OWN, lambda c, r: c, cohorts)
    with pytest.raises(ValueError, match="`cohorts` must be a list, or a new iterator for each"):
        list(fp.run_rounds(OWN, lambda c, r: c, cohorts))
    assert not [*fp.run_rounds(OWN, lambda c, r: c, iter([[0], [1]]), start=now)]
    assert not [*fp.run_rounds(OWN, lambda c, r: c, [])]


def own(rate, rule=None, kind=0):
    """Make a method without a name, whose client knows the rate in one of four ways."""

    def closure(data, answer, state):
        return drawing(data * rate, answer, state)

    def default(data, answer, state, rate=rate):
        return drawing(data * rate, answer, state)

    def given(rate, data, answer, state):
        return drawing(data * rate, answer, state)

    class Client:
        def __init__(self):
            self.rate = rate

        def train(self, data, answer, state):
            return drawing(data * self.rate, answer, state)

    client = (closure, default, partial(given, rate), Client().train)[kind]
    server = fp.averaging_server({"x": torch.zeros(1)}, rule or fp.aggregation.overwrite())
    return fp.Method(client, server, lambda *all: nn.Identity())


@pytest.mark.parametrize("kind", range(4))
def test_methods_without_a_name_are_told_by_their_functions_and_numbers(kind):
    data = lambda client, server_round: client  # noqa: E731
    *_, now = fp.run_rounds(own(0.5, kind=kind), data, [[1]])
    next(fp.run_rounds(own(0.5, kind=kind), data, [[1]] * 2, start=now))
    for other in (own(0.25, kind=kind), own(0.5, fp.ema(decay=0.5), kind), own(0.5, kind=kind - 1)):
        with pytest.raises(ValueError, match="`start` must be a round of the same method, '"):
            next(fp.run_rounds(other, data, [[1]] * 2, start=now))


def test_a_frozen_network_that_has_changed_in_place_is_another_one():
    network = fp.vit_trunk(deepcopy(TRUNK.model))
    made = methods.fedper(setting(**PLAIN, trunk=network))
    now = next(fp.run_rounds(made, FEDERATION))
    next(fp.run_rounds(made, FEDERATION, start=now))
    with torch.no_grad():
        network.model.pos_embed.add_(1)
    with pytest.raises(ValueError, match="same frozen network"):
        next(fp.run_rounds(made, FEDERATION, start=now))


PLAIN = {"prompts": None, "augment": None}
NOW = [*fp.run_rounds(methods.fedper(setting(**PLAIN)), FEDERATION)][-1]
OTHERS = {
    "method, 'fedper(learning_rate=0.3)'": lambda: methods.fedper(setting(), learning_rate=0.3),
    "method, 'fedprox(": lambda: methods.fedprox(setting()),
    "wrappers, 'coded(codec=int8())'": lambda: fp.rounds.coded(
        methods.fedper(setting()), fp.codecs.int8()
    ),
    "setting.seed, '1'": lambda: methods.fedper(setting(seed=1)),
    "setting.steps, '3'": lambda: methods.fedper(setting(steps=3)),
    "frozen network, '": lambda: methods.fedper(setting(trunk=trunk(12))),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("text", OTHERS)
def test_a_round_of_another_method_is_refused_by_name(text, tmp_path):
    fp.save_checkpoint(NOW, tmp_path)
    now, method = fp.load_checkpoint(tmp_path), OTHERS[text]()
    for argument, call in (
        ("start", lambda: next(fp.run_rounds(method, FEDERATION, start=now))),
        ("now", lambda: now.model(method, FEDERATION, 0)),
        ("now", lambda: evaluate(method, FEDERATION, now, HELD_OUT)),
    ):
        with pytest.raises(ValueError, match=f"`{argument}` must be a round of the same") as error:
            call()
        assert text in str(error.value)


def test_rounds_clients_devices_and_functions_may_change_and_a_round_may_be_taken_apart():
    changes = {"rounds": 4, "clients": range(4), "device": torch.device("cpu"), "schedule": abs}
    for method, start in (
        (methods.fedper(setting(**changes)), NOW),
        (fp.rounds.counted(methods.fedper(setting(**PLAIN, rounds=4)), fp.Ledger()), NOW),
        (methods.fedper(setting(rounds=4), learning_rate=0.3), fp.Round(*NOW)),
    ):
        (now,) = fp.run_rounds(method, FEDERATION, start=start)
        assert now.server_round == 3
        now.model(method, FEDERATION, 0)


def test_a_state_that_was_made_on_other_images_is_warned_of_once():
    made = methods.fedper(setting(**PLAIN, clients=[0], rounds=6))
    now = [*fp.run_rounds(made, FEDERATION, [[0]])][-1]
    other = replace(FEDERATION, inputs=IMAGES + 1)
    cohorts = [[0]] * 3
    with pytest.warns(UserWarning, match="state of client 0 was made on other images") as caught:
        list(fp.run_rounds(made, other, cohorts, start=now))
    assert len(caught) == 1
    list(fp.run_rounds(made, FEDERATION, cohorts, start=now))
