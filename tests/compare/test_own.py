"""A problem of your own data: its clients, tests, budget and public inputs, counted by hand."""

import pickle

import numpy as np
import pytest
import torch

from fedprompt import compare
from fedprompt.compare import own, rows
from fedprompt.compare.divisions import Division, held_out
from fedprompt.compare.trials import Further, Machine
from fedprompt.methods import METHODS, HeldOut, Setting
from refusals import refused
from tiny_federations import clip_federation, mixed_federation

IMAGES = torch.arange(160, dtype=torch.uint8).reshape(40, 1, 2, 2)
LABELS = torch.arange(40) * 7 % 3
TESTS, TEST_LABELS = 255 - IMAGES[::2], LABELS[::2]


def divided(generator):
    """Three clients have 16, 10 and 8 of 40 inputs, and 5, 3 and none of 20 tests."""
    order, tests = generator.permutation(40), generator.permutation(20)
    parts = [tests[:5], tests[5:8], tests[:0]]
    return Division([order[:16], order[16:26], order[26:34]], parts, ("a", "b", "c"))


def given(asked, **budget):
    def side(inputs):
        return lambda kind, device: (asked.append((kind, device)), inputs)[1]

    tests = {"tests": side(TESTS), "test_labels": TEST_LABELS, "divide": divided, "newcomers": 1}
    others = {"new": lambda kind, device: Further(TESTS, TEST_LABELS)}
    setting = Setting(num_classes=4, rounds=5, batch_size=4, **budget)  # class 3 has no input
    return own.Data(setting=setting, inputs=side(IMAGES), labels=LABELS, further=others, **tests)


ROW = rows.Row.of("promptsrc")  # of images
WHERE = {"seed": 3, "machine": Machine("cuda")}


def at(images, positions):
    return images[torch.as_tensor(positions)].float()


@pytest.mark.parametrize("validate", [False, True])
def test_a_trial_has_the_inputs_of_its_division(validate):
    """A tuning trial is tested on a quarter of the training inputs of each class."""
    rng, asked = np.random.default_rng(3), []
    division = divided(rng)
    train, tests = division.train, division.own
    if validate:
        tried = [held_out(LABELS[shard].numpy(), 0.25, rng) for shard in train]
        tests = [shard[of] for shard, of in zip(train, tried, strict=True)]
        train = [shard[~of] for shard, of in zip(train, tried, strict=True)]
    trial = given(asked).trial(ROW, validate=validate, **WHERE)
    images, labels = (IMAGES, LABELS) if validate else (TESTS, TEST_LABELS)
    assert {*asked} == {("images", "cuda")}
    assert len(asked) == 2 - validate  # a tuning trial reads no test input
    for client, (shard, part) in enumerate(zip(train, tests, strict=True)):
        inputs, classes = trial.federation.data(client, 0).own()
        assert torch.equal(inputs, at(IMAGES, shard))
        assert classes.tolist() == LABELS[shard].tolist()
        assert trial.mixes[client].tolist() == np.bincount(classes, minlength=4).tolist()
        assert torch.equal(trial.test[trial.own[client]], at(images, part))
        assert trial.test_cells[trial.own[client]].tolist() == labels[part].tolist()
    assert len(trial.test) == len(trial.test_cells) == sum(map(len, tests))
    assert (list(trial.newcomers), trial.names) == ([2], ("a", "b", "c"))
    assert [*trial.further] == ([] if validate else ["new"])
    setting, used = trial.setting, sorted([*train[0], *train[1]])
    assert torch.equal(setting.public, at(IMAGES, used))
    steps = -(-len(used) // 8)  # batches of four in an epoch of the mean client
    assert (setting.rounds, setting.steps, setting.cohort_size) == (3 if validate else 5, steps, 2)
    assert (list(setting.clients), setting.seed) == ([0, 1], 3)


def test_a_budget_that_is_given_is_kept_and_a_machine_may_shrink_it():
    trial = given([], steps=9, cohort_size=1, public=TESTS).trial(ROW, validate=False, **WHERE)
    assert (trial.setting.steps, trial.setting.cohort_size) == (9, 1)
    assert torch.equal(trial.setting.public, TESTS)
    small = {"seed": 3, "machine": Machine(shrink=0.2), "validate": False}
    setting = given([], steps=14).trial(ROW, **small).setting
    assert (setting.rounds, setting.steps) == (2, 3)


def made(own=None, *, newcomers=0, labels=LABELS, inputs=IMAGES, clients=None, title="Mine", **of):
    clients = clients or dict(enumerate(torch.arange(40).split([9, 21, 10])))
    of = {"tests": TESTS, "test_labels": TEST_LABELS, "num_classes": 3, "rounds": 5} | of
    tests, setting = HeldOut(of.pop("tests"), of.pop("test_labels"), own=own), Setting
    options = {"setting": setting(**of), "newcomers": newcomers, "title": title}
    return compare.problem(inputs, labels, clients, tests, **options)


def test_without_tests_of_their_own_clients_have_all_tests_and_up_to_ten_are_in_a_round():
    images = torch.rand(132, 1, 2, 2)
    labels, parts = torch.arange(132) % 3, torch.arange(132).split(11)
    problem = made(inputs=images, labels=labels, clients=lambda generator: list(parts))
    trial = problem.make("", ROW, validate=False, **WHERE)
    assert (trial.setting.cohort_size, trial.own, len(trial.test)) == (10, None, 20)
    spaced = [place * 131 // 99 for place in range(100)]  # at equal distances from 0 to 131
    assert torch.equal(trial.setting.public, images[spaced])
    assert trial.names == [*map(str, range(12))]
    given = made({0: torch.tensor([3, 1])}).make("", ROW, validate=False, **WHERE)
    assert [*map(list, given.own)] == [[1, 0], [], []]


@pytest.mark.parametrize(
    ("tests", "newcomers", "words"),
    [
        (None, 0, {"own": "own mix"}),
        ({0: torch.arange(2)}, 0, {"own": "own tests"}),
        (None, 1, {"own": "own mix", "received": "new clients", "after": "after 10 steps"}),
    ],
)
def test_a_problem_has_the_columns_of_its_tests_and_is_made_again_elsewhere(
    tests, newcomers, words
):
    problem = made(tests, newcomers=newcomers)
    sent = pickle.loads(pickle.dumps(problem))
    for each in (problem, sent):
        assert each.columns == {"full": "all tests", "worst": "worst client"} | words
        assert (each.name, each.title, each.partitions) == ("own", "Mine", {"": "Mine"})
        assert each.compared == ("own", "full")
        assert each.every
        assert each.references["training alone"][:2] == [
            "Training alone",
            "Training alone, 2 times as long",
        ]
        assert each.inputs("", Machine()) == problem.inputs("", Machine())
        assert each.trials("", ROW) == [ROW.values]


def test_rows_are_the_methods_for_the_models_of_the_setting():
    whole = {
        "labels": LABELS,
        "clients": {0: torch.arange(1)},
        "tests": HeldOut(TESTS, TEST_LABELS),
    }
    changes = {"cohort_size": 1}
    settings = [Setting(num_classes=3, rounds=1), mixed_federation(**changes)]
    settings.append(clip_federation(**changes))
    for setting, family in zip(settings, ("one model", "mixed models", "CLIP"), strict=True):
        problem = compare.problem(IMAGES, **whole, setting=setting)
        kinds = {family, "mixed models"} if family == "one model" else {family}
        expected = {name for name, entry in METHODS.items() if kinds & {*entry.families}}
        assert problem.family("") == family
        assert {row.method for row in problem.rows("")} == expected


class Read:
    """Inputs that are read when they are needed."""

    shape, dtype = (400, 1, 2, 2), torch.uint8

    def __init__(self, asked):
        self.asked = asked

    def __len__(self):
        return 400

    def __getitem__(self, positions):
        self.asked.append(positions.tolist())
        return torch.zeros(len(positions), 1, 2, 2)


def test_a_problem_of_other_data_or_settings_is_another_one_and_few_inputs_are_read():
    other = {
        "inputs": IMAGES.flip(0),
        "labels": LABELS.flip(0),
        "tests": TESTS.flip(0),
        "test_labels": TEST_LABELS.flip(0),
        "own": {0: torch.arange(2)},
        "newcomers": 1,
        "rounds": 6,
        "clients": {0: torch.arange(40)},
    }
    changes = [{}, {"title": "Another"}, *({name: value} for name, value in other.items())]
    changes.append({"own": {0: torch.arange(3)}})
    found = [str(made(**change).inputs("", Machine())) for change in changes]
    assert found[0] == found[1]  # a title is not data
    assert len({*found}) == len(changes) - 1
    read = []
    made(inputs=Read(read), labels=torch.zeros(400, dtype=torch.long))
    assert read == [[place * 399 // 63 for place in range(64)]]


REFUSED = """
made(rounds=0) -> ValueError: `rounds` must be at least 1; got 0.
made(steps=0) -> ValueError: `steps` must be at least 1; got 0.
made(cohort_size=0) -> ValueError: `cohort_size` must be at least 1; got 0.
made(cohort_size=4) -> ValueError: `cohort_size` must be at most 3, the clients that train; got 4.
made(cohort_size=3, newcomers=1) -> ValueError: `cohort_size` must be at most 2, the clients that tr
made(newcomers=3) -> ValueError: `newcomers` must be below 3, the clients; got 3.
made(title=3) -> TypeError: `title` must be a string; got 3 (int).
made(test_labels=TEST_LABELS + 1) -> ValueError: `tests.labels` must lie in [0, 3)
made(inputs=[3]) -> TypeError: `inputs` must be a tensor, or return batches by positions; got a list
compare.problem(IMAGES, LABELS, {}, TESTS, setting=3) -> TypeError: `setting` must be a Setting, s
compare.problem(IMAGES, LABELS, {}, 3, setting=given([]).setting) -> TypeError: `tests` must be a H
"""
test_wrong_data_are_refused = refused(globals())(REFUSED)


def test_all_clients_that_train_may_be_in_a_round():
    assert made(cohort_size=2, newcomers=1).title == "Mine"
