"""Figures beside accuracy: over rounds, of classes and domains, and of the papers' mechanisms."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import fedprompt as fp
from fedprompt.compare import measure
from fedprompt.methods import METHODS, evaluate
from studies import STUDIES, figures
from studies.core import Machine, Row


def small(study, partition, method, rounds=3, **values):
    """Make a trial of a study with few images, and a method for it."""
    row = Row.of(method, **values)
    made = STUDIES[study].make(partition, row, seed=0, machine=Machine()).shrunk(0.01)
    made = made._replace(setting=replace(made.setting, rounds=rounds, steps=2, cohort_size=3))
    return made, METHODS[method].make(made.setting, **values)


def rounds_of(trial, method):
    return list(fp.run_rounds(method, trial.federation))


@pytest.mark.parametrize("method", ["fedprox", "ditto"])
def test_a_curve_has_the_accuracy_of_each_round_and_the_best_one(method):
    trial, made = small("digits", "few", method)
    shared, found = method == "fedprox", figures.curve("full", method == "fedprox")
    every = rounds_of(trial, made)
    (*_, measured) = [found(trial, made, now) for now in every]
    how = {"clients": trial.tested, "newcomers": ()}
    points = [evaluate(made, trial.federation, now, trial.tests, **how)["full"] for now in every]
    assert measured == pytest.approx(
        {"full, best round": max(points)}
        | {f"full, point {k}": each for k, each in enumerate(points, 1)}
    )
    assert shared or len({*points}) > 1


def test_a_curve_of_few_points_has_the_last_round():
    trial, made = small("digits", "few", "fedprox", rounds=5)
    found = figures.curve("full", True, every=2)
    (*_, measured) = [found(trial, made, now) for now in rounds_of(trial, made)]
    assert [*measured] == ["full, best round", *(f"full, point {k}" for k in (1, 2, 3))]


@pytest.mark.parametrize("make", [figures.rise, partial(figures.curve, "own", True)])
def test_figures_of_earlier_rounds_are_those_of_a_run_that_was_not_killed(
    make, tmp_path, monkeypatch
):
    trial, made = small("digits", "few", "fedprox", rounds=4)
    joined = lambda: figures.Joined(None, make())  # noqa: E731
    expected = measure.run(made, trial._replace(figures=joined()), shared=True).figures
    monkeypatch.setattr(measure, "PAUSE", -1.0)  # a checkpoint after each round
    done = []

    def killed(share):
        done.append(share)
        if len(done) == 3:
            raise KeyboardInterrupt

    how = {"shared": True, "checkpoint": tmp_path / "state"}
    with pytest.raises(KeyboardInterrupt):
        measure.run(made, trial._replace(figures=joined()), progress=killed, **how)
    again = measure.run(made, trial._replace(figures=joined()), **how).figures
    names = [name for name in expected if name == "rise" or "point" in name or "best" in name]
    assert names
    assert {name: again[name] for name in names} == {name: expected[name] for name in names}


def test_the_accuracy_of_classes_is_that_of_the_clients_on_all_test_images():
    trial, made = small("digits", "few", "local", rounds=1)
    (now,) = rounds_of(trial, made)
    found, right = figures.classes(trial, made, now), torch.zeros(10, 2)
    for client in trial.setting.clients:
        guesses = now.model(made, trial.federation, client).eval()(trial.tests.inputs).argmax(1)
        for label, guess in zip(trial.tests.labels.tolist(), guesses.tolist(), strict=True):
            right[label] += torch.tensor([label == guess, 1])
    known = right[:, 1] > 0
    expected = (right[:, 0] / right[:, 1])[known].tolist()
    assert [*found] == [f"class {k}" for k in known.nonzero()[:, 0].tolist()]
    assert [*found.values()] == pytest.approx(expected)


def test_a_domain_has_the_mean_of_its_clients():
    trial, made = small("digits", "few", "local", rounds=1)
    (now,) = rounds_of(trial, made)
    names = ["not-MNIST-0", *(f"b-{k}" for k in range(1, 18))]
    found = figures.accuracies(trial._replace(names=names), made, now)
    own = [each["own"] for each in found.clients.values()]
    assert found["not-MNIST"] == own[0]
    assert found["b"] == pytest.approx(sum(own[1:]) / len(own[1:]))


def test_the_terms_of_fedhpl_are_those_of_each_client():
    trial, made = small("networks", "few", "fedhpl")
    *_, now = rounds_of(trial, made)
    found, terms = figures.distillation(trial, made, now), []
    for client in trial.setting.clients:
        model = now.model(made, trial.federation, client).eval()
        teacher = made.server.answer(client, now.server)["logits"]
        data = trial.federation.data(trial.setting, client, now.server_round)
        images, labels = data.own()
        known = teacher.weight[labels] > 0
        right = labels[known]
        with torch.no_grad():
            sides = (teacher.value[right] / 4.5).softmax(1), (model(images[known]) / 4.5).softmax(1)
        t, s = (side[torch.arange(len(right)), right].double().mean() for side in sides)
        terms.append([2 - 2 * t, 2 * (t - s).abs()])
    expected = torch.tensor(terms).mean(0).tolist()
    assert [*found.values()] == pytest.approx(expected, abs=1e-6)


def test_groups_over_rounds_and_their_congruence():
    trial, made = small("digits", "few", "sgpt", num_groups=3)
    counts, measured = [], {}
    over = figures.selections_of_client()
    for now in rounds_of(trial, made):
        measured = over(trial, made, now)
        data = trial.federation.data(trial.setting, 0, now.server_round)
        model, (images, _) = now.model(made, data).eval(), data.own()
        with torch.no_grad():
            groups = model.selector(model.query(images)).indices
        counts.append([int((groups == k).sum()) for k in range(3)])
    table = torch.tensor(counts).double()
    expected = [*table.mean(0).tolist(), *table.std(0, correction=0).tolist()]
    assert [*measured.values()] == pytest.approx(expected)
    assert table.sum(1).tolist() == [len(images)] * 3
    assert 0 < figures.congruence(trial, made, now)["congruence"] < 3
