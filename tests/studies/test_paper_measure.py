"""Columns of the papers' tables, and the recipe that a federation has of its setting."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn as nn

from methods.federation import Federation, Predictions
from studies import paper
from studies.gallery.tasks import Trial
from studies.papers import measure, run
from studies.papers.run import Machine
from studies.papers.setting import Recipe
from studies.tasks import Images, Task
from tiny_backbones import SIZE, TINY

MACHINE = Machine(backbones=TINY, device=torch.device("cpu"))


def trial() -> Trial:
    """Three clients and two domains of two classes; cells 0 to 3 have 4, 2, 1 and 3 test inputs."""
    cells = torch.tensor([0] * 4 + [1] * 2 + [2] + [3] * 3)
    inputs = torch.eye(len(cells))
    mixes = torch.tensor([[3, 1, 0, 0], [0, 0, 2, 6], [0, 0, 5, 5]])
    federation = Federation(
        inputs=inputs,
        labels=cells % 2,
        shards={client: torch.arange(3) for client in range(3)},
        clients=range(3),
        num_classes=2,
        rounds=1,
        steps=1,
        cohort_size=3,
        batch_size=2,
        seed=0,
        public=inputs[:0],
    )
    return Trial(federation, inputs, cells, mixes, ())


def guess(*right: int):
    """Return a function from inputs to logits that is right on the given test inputs."""
    labels = trial().test_cells % 2
    answers = torch.where(
        torch.isin(torch.arange(len(labels)), torch.tensor(right)), labels, 1 - labels
    )
    return lambda inputs: inputs @ nn.functional.one_hot(answers, 2).float()


def test_columns_are_those_of_arithmetic():
    # Accuracy of the cells: 1/2, 1, 0, 0; then 0, 0, 1, 2/3; then 0, 0, 0, 1/3.
    models = [guess(0, 1, 4, 5), guess(6, 7, 8), guess(9)]
    found = measure.columns(
        Predictions(client=models.__getitem__, newcomer=models.__getitem__), trial(), ("a", "b")
    )
    own = [(3 / 2 + 1) / 4, (2 + 4) / 8, (5 / 3) / 10]
    full = [4 / 10, 3 / 10, 1 / 10]
    expected = {
        "full": np.mean(full),
        "lowest": min(full),
        "highest": max(full),
        "own": np.mean(own),
        "worst": min(own),
        "a": own[0],
        "b": np.mean(own[1:]),
    }
    assert found == pytest.approx(expected)


def test_one_model_of_all_clients_has_its_own_mixes_and_no_column_of_a_single_domain():
    found = measure.columns(Predictions(everyone=guess(0, 1, 4, 5)), trial())
    assert found.keys() == {"full", "lowest", "highest", "own", "worst"}
    assert found["own"] == pytest.approx((3 / 2 + 1) / 4 / 3)
    assert (found["full"], found["worst"]) == pytest.approx((4 / 10, 0))


def images(count: int) -> Images:
    pixels = torch.randint(256, (count, 3, SIZE, SIZE), dtype=torch.uint8)
    return Images(pixels, torch.arange(count) % 10, torch.zeros(count, dtype=torch.long))


def test_a_federation_has_the_recipe_of_its_setting():
    recipe = Recipe(
        optimizer="Adam",
        values={"betas": (0.5, 0.6), "weight_decay": 0.2},
        cosine=True,
        epochs=3,
        batch_size=7,
        flip=True,
    )
    setting = replace(
        paper.SETTINGS["fedhpl-1-cifar10-iid"],
        image_size=SIZE,
        rounds=9,
        num_clients=4,
        cohort_size=2,
        num_prompts=5,
        recipe=recipe,
    )
    task = Task("cifar10", images(80), images(20), tuple("0123456789"))
    made = run.make_trial(setting, task, MACHINE, seed=3).federation
    assert (made.rounds, made.cohort_size, made.batch_size, made.seed) == (9, 2, 7, 3)
    assert [len(made.cohort(server_round)) for server_round in range(3)] == [2, 2, 2]
    assert made.new_model(0).prompts.tokens.shape[1] == 5
    batches = list(made.batches(0, 0))
    assert [len(labels) for _, labels in batches] == [7, 7, 6] * 3
    made.server_round = 3
    group = made.optimizer(made.new_model(0), 0.4).param_groups[0]
    assert group["lr"] == pytest.approx(0.4 * (1 + np.cos(np.pi / 3)) / 2)
    assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.2)


def test_accuracy_is_the_mean_of_the_last_rounds(monkeypatch):
    task = Task("cifar10", images(80), images(20), tuple("0123456789"))
    setting = replace(
        paper.SETTINGS["fedhpl-1-cifar10-iid"],
        image_size=SIZE,
        rounds=3,
        num_clients=2,
        cohort_size=2,
    )
    row = next(row for row in setting.rows if row.method == "fedvpt_d")
    given = iter([{"full": 0.2}, {"full": 0.4}])
    monkeypatch.setattr(measure, "columns", lambda *args: next(given))
    found = run.run_row(row, run.make_trial(setting, task, MACHINE, seed=0), task, last_rounds=2)
    assert found["full"] == pytest.approx(0.3)
