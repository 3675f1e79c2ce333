"""The study of the gallery: equal budgets, exact counts, records that are never mixed, tables."""

import json
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy import stats

import fedprompt as fp
from methods.federation import Predictions
from studies import compare
from studies import records as saved
from studies.gallery import evaluate, jobs, registry, tables
from studies.gallery.jobs import Job
from studies.gallery.tasks import PARTITIONS, QUICK, Settings, Trial, make_trial
from tiny_federations import vit_federation

MINE = '''
"""A method of somebody else."""
import torch.nn as nn
from methods.federation import Predictions

SEARCH = {"learning_rate": (1e-3, 1e-1), "kind": ["a", "b"]}


def constant(federation, *, learning_rate=1e-2, kind="a", factor=2.0):
    """Constant: predicts the same for every image."""
    for _ in range(federation.rounds):
        yield Predictions(everyone=lambda inputs: inputs.new_zeros(len(inputs), 10))


def helper(federation):
    pass
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def job(path, **changes):
    fields = {
        "method": "constant",
        "path": str(path),
        "task": "digits",
        "partition": "dirichlet",
        "seed": 0,
        "trial": None,
        "values": {"learning_rate": 0.01, "kind": "a", "factor": 2.0},
        "settings": QUICK,
    }
    return Job(**fields | changes)


# Tasks


TRIALS = [
    *(("digits", partition) for partition in PARTITIONS),
    ("heterogeneous-digits", "dirichlet"),
    ("clip-digits", "dirichlet"),
    pytest.param("clip-digits", "domains", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("task", "partition"), TRIALS)
def test_newcomers_never_train_and_no_test_input_is_trained_on(task, partition):
    # Tokens of CLIP are computed anew for each split, which takes a second.
    for validate in (False, True) if task == "digits" else (True,):
        trial = make_trial(task, partition, seed=3, settings=QUICK, validate=validate)
        federation = trial.federation
        assert not set(trial.newcomers) & set(federation.clients)
        assert len(trial.newcomers) * 6 == len(federation.shards) == QUICK.num_clients
        used = torch.cat(list(federation.shards.values()))
        assert len(used.unique()) == len(used)
        flat = federation.inputs.flatten(1)
        for others in (trial.test[:5], federation.public[:5]):
            assert torch.cdist(others.flatten(1), flat).min() > 1e-3


def test_partitions_are_what_they_are_called():
    few = make_trial("digits", "few", seed=0, settings=Settings()).federation
    assert {len(shard) for shard in few.shards.values()} == {50}
    domains = make_trial("digits", "domains", seed=0, settings=Settings())
    assert ((domains.mixes.reshape(18, 5, 10).sum(2) > 0).sum(1) == 1).all()
    labels = make_trial("digits", "dirichlet", seed=0, settings=Settings())
    share = labels.mixes.amax(1) / labels.mixes.sum(1)
    assert share.mean() > 0.35  # .1 without a shift


def test_methods_have_equal_cohorts_batches_and_initial_values():
    one, other = (make_trial("digits", "dirichlet", seed=1, settings=QUICK) for _ in range(2))
    torch.manual_seed(1)
    first = one.federation.new_model()
    torch.manual_seed(2)
    second = other.federation.new_model(prompts=lambda trunk: None)
    assert torch.equal(first.head.weight, second.head.weight)
    assert one.federation.cohort(1) == other.federation.cohort(1)
    for a, b in zip(one.federation.batches(2, 1), other.federation.batches(2, 1), strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


# Evaluation


def known(accuracy):
    """A trial with four inputs of two cells, and a predictor with a given accuracy on each."""
    federation = vit_federation(num_classes=2, cohort_size=2)
    test = torch.zeros(8, 1, 8, 8)
    test[:, 0, 0, 0] = torch.arange(8)
    cells = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    right = torch.cat([torch.arange(4) < 4 * accuracy[0], torch.arange(4) < 4 * accuracy[1]])
    guesses = torch.where(right, cells, 1 - cells)

    def predict(inputs):
        return F.one_hot(guesses[inputs[:, 0, 0, 0].long()], 2).float()

    mixes = torch.tensor([[1, 0], [0, 1], [1, 1], [3, 1], [1, 3], [1, 0]])
    return Trial(federation, test, cells, mixes, [5]), predict


def test_accuracies_are_those_of_the_mixes():
    trial, predict = known((1.0, 0.25))
    found = evaluate.accuracies(Predictions(everyone=predict), trial)
    assert found["full"] == pytest.approx(0.625)
    assert found["own"] == pytest.approx((1 + 0.25 + 0.625 + 0.8125 + 0.4375) / 5)
    assert found["worst"] == pytest.approx(0.25)
    assert found["received"] == found["after"] == pytest.approx(1.0)


def test_each_client_is_measured_with_its_own_model():
    trial, predict = known((1.0, 0.0))
    wrong = known((0.0, 1.0))[1]
    predictions = Predictions(
        client=lambda client: wrong if client == 1 else predict, newcomer=lambda client: wrong
    )
    found = evaluate.accuracies(predictions, trial)
    assert found["own"] == pytest.approx((1 + 1 + 0.5 + 0.75 + 0.25) / 5)
    assert found["received"] == 0


def test_a_newcomer_trains_ten_steps_and_the_model_is_restored():
    federation = vit_federation()
    model = federation.new_model()
    before = fp.snapshot(model)
    with evaluate.counted_passes() as passes, evaluate.trained(model, federation, 5):
        moved = fp.snapshot(model)
    assert passes["backward"] == 10
    assert all(not torch.equal(value, moved[name]) for name, value in before.items())
    assert all(torch.equal(value, fp.snapshot(model)[name]) for name, value in before.items())


def test_backward_passes_are_counted_and_autograd_is_restored():
    functions = torch.autograd.backward, torch.autograd.grad
    weight = nn.Parameter(torch.ones(2))
    with evaluate.counted_passes() as passes:
        (weight * 2).sum().backward()
        torch.autograd.grad((weight**2).sum(), weight)
    assert passes["backward"] == 2
    assert functions == (torch.autograd.backward, torch.autograd.grad)


def test_a_method_must_yield_once_in_each_round():
    trial, predict = known((1.0, 1.0))

    def early(federation):
        yield Predictions(everyone=predict)

    with pytest.raises(ValueError, match="yield once in each of 2 rounds; got 1"):
        evaluate.run(early, trial, {})


def test_bytes_are_those_of_a_client_and_round():
    trial, predict = known((1.0, 1.0))

    def chatty(federation):
        for server_round in range(federation.rounds):
            for client in federation.cohort(server_round):
                federation.send_up(client, {"a": torch.zeros(5)})
                federation.send_down(client, {"a": torch.zeros(7)})
            yield Predictions(everyone=predict)

    found = evaluate.run(chatty, trial, {})
    assert (found["bytes_up"], found["bytes_down"]) == (20, 28)


def test_passes_and_parameters_are_those_of_a_client_and_round_without_newcomers():
    trial, _ = known((1.0, 1.0))
    model = trial.federation.new_model()

    def twice(federation, *, learning_rate):
        for server_round in range(federation.rounds):
            for client in federation.cohort(server_round):
                for images, labels in federation.batches(client, server_round):
                    for _ in range(2):
                        F.cross_entropy(model(images), labels).backward()
            yield Predictions(everyone=model)

    federation = replace(trial.federation, labels=trial.federation.labels % 2)
    found = evaluate.run(twice, trial._replace(federation=federation), {"learning_rate": 0.1})
    assert found["backward"] == 2 * federation.steps
    assert found["steps"] == federation.steps
    assert found["trained"] == sum(each.numel() for each in model.parameters())


def test_predictions_are_of_everyone_or_of_each_client():
    with pytest.raises(ValueError, match="Exactly one"):
        Predictions()
    with pytest.raises(ValueError, match="Exactly one"):
        Predictions(everyone=torch.relu, client=lambda client: torch.relu)
    with pytest.raises(ValueError, match="`newcomer` must be given"):
        Predictions(client=lambda client: torch.relu)


# Methods of a file


def test_methods_of_a_file_are_its_documented_functions_of_a_federation(mine):
    (method,) = registry.in_file(mine).values()
    assert (method.name, method.title) == ("constant", "Constant")
    assert method.defaults == {"learning_rate": 1e-2, "kind": "a", "factor": 2.0}
    assert set(method.search) == {"learning_rate", "kind"}
    assert registry.lines_of_code(mine) == 5


def test_every_name_of_the_gallery_is_unique():
    found = registry.gallery()
    assert len({method.title for method in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("{folder}/other.py:constant", "`--methods` must name an existing Python file; got"),
        ("{folder}:constant", "`--methods` must name an existing Python file; got"),
        ("{folder}/mine.py", "`--methods` must have the form FILE:NAME for a file; got"),
        ("{folder}/mine.py:", "`--methods` must have the form FILE:NAME for a file; got"),
        (
            "{folder}/mine.py:constand",
            "`--methods` must name methods, ['constant']; got 'constand'",
        ),
        ("fedavgg", "`--methods` must name methods, ["),
        ("local,local", "`--methods` must name each method once; got 'local' twice"),
        ("promptfl", "`--methods` must name methods of the family 'one model'; got 'promptfl'"),
    ],
)
def test_a_mistake_in_methods_ends_with_one_line(names, message, mine, monkeypatch, capsys):
    flags = ["--quick", "--methods", names.format(folder=mine.parent)]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.startswith(f"compare.py: {message}")
    assert printed.count("\n") == 1


def test_a_method_imports_modules_of_its_folder(mine, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (mine.parent / "next_to_mine.py").write_text("FACTOR = 3.0\n")
    mine.write_text(
        f"import next_to_mine\n{MINE}".replace("factor=2.0", "factor=next_to_mine.FACTOR")
    )
    assert registry.in_file(mine)["constant"].defaults["factor"] == 3.0
    del sys.modules["next_to_mine"]


# Jobs and records


def test_a_finished_job_is_not_run_again(mine, tmp_path, monkeypatch):
    path, wanted = tmp_path / "records.jsonl", [job(mine, seed=seed) for seed in range(3)]
    count = []
    monkeypatch.setattr(jobs, "run", lambda job, bar: count.append(job.seed) or {"own": job.seed})
    jobs.run_all(wanted[:2], path, workers=1)
    path.write_text(path.read_text()[:-9])  # killed while it wrote the second line
    found = jobs.run_all(wanted, path, workers=1)
    assert count == [0, 1, 1, 2]
    assert [record["own"] for record in found] == [0, 1, 2]
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_study_that_is_killed_24_times_has_the_records_of_a_whole_run(
    mine, tmp_path, monkeypatch
):
    """Each second kill cuts the line that was just written, so that its run is lost."""
    monkeypatch.setattr(jobs, "run", lambda job, bar: {"own": job.seed})
    path, wanted = tmp_path / "records.jsonl", [job(mine, seed=seed) for seed in range(13)]
    whole = jobs.run_all(wanted, tmp_path / "whole.jsonl", workers=1)
    for kill in range(24):

        def fatal(file, cut=5 * (kill % 2)):
            os.ftruncate(file, os.fstat(file).st_size - cut)
            os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            os.fsync = fatal
            jobs.run_all(wanted, path, workers=1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(saved.read(path)) == 12
    assert jobs.run_all(wanted, path, workers=1) == whole


def test_a_record_of_other_code_counts_and_one_of_other_values_does_not(
    mine, tmp_path, monkeypatch, capsys
):
    path, wanted = tmp_path / "records.jsonl", [job(mine, seed=seed) for seed in range(2)]
    monkeypatch.setattr(jobs, "run", lambda job, bar: {"own": job.seed})
    compare.finished(wanted, path, 1, "runs")
    mine.write_text(MINE.replace("new_zeros", "new_ones"))
    compare.finished([*wanted, job(mine, values={"factor": 3.0})], path, 1, "runs")
    assert "runs: 2 of 3 rows are in" in capsys.readouterr().err
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(("changed", "mark"), [("", ""), (" M fedprompt/wire.py", "-dirty")])
def test_a_record_names_commit_versions_and_date(changed, mark, monkeypatch):
    answers = {"rev-parse": "abc1234", "status": changed}
    monkeypatch.setattr(saved, "_git", lambda command, *_: answers[command])
    found = saved.origin.__wrapped__()
    assert (found["commit"], found["torch"]) == (f"abc1234{mark}", torch.__version__)
    assert found["version"] == version("fedprompt")
    assert datetime.fromisoformat(found["date"])
    monkeypatch.setattr(saved, "_git", lambda *_: "")
    assert "commit" not in saved.origin.__wrapped__()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_that_fails_does_not_lose_the_others(workers, mine, tmp_path):
    path = tmp_path / "records.jsonl"
    wrong, rounds = job(mine, values={"unknown": 1}), []
    with pytest.raises(RuntimeError, match="1 jobs failed"):
        jobs.run_all(
            [wrong, job(mine)], path, workers=workers, finished_round=lambda: rounds.append(1)
        )
    assert len(jobs.load(path)) == 1
    assert len(rounds) == QUICK.rounds


def test_trials_are_the_default_and_draws_within_the_ranges(mine):
    (method,) = registry.in_file(mine).values()
    found = jobs.trials(method, "digits")
    assert found == jobs.trials(method, "digits") != jobs.trials(method, "clip-digits")
    assert len(found) == jobs.NUM_TRIALS
    assert found[0] == method.defaults
    assert all(1e-3 <= each["learning_rate"] <= 1e-1 for each in found)
    assert {each["kind"] for each in found} <= {"a", "b"}
    assert {each["factor"] for each in found} == {2.0}


def test_tuning_takes_the_most_accurate_trial_at_a_seed_that_is_not_reported(
    mine, tmp_path, monkeypatch
):
    seen = []

    def run(job, bar):
        seen.append(job)
        return {"own": job.values["learning_rate"]}

    monkeypatch.setattr(jobs, "run", run)
    args = compare.flags().parse_args(["--workers", "1"])
    methods = list(registry.in_file(mine).values())
    best = compare.tuned(methods, args, QUICK, tmp_path / "records.jsonl")
    rates = [each["learning_rate"] for each in jobs.trials(methods[0], "digits")]
    assert best["constant"]["learning_rate"] == max(rates)
    assert {job.seed for job in seen} == {jobs.TUNING_SEED}
    assert jobs.TUNING_SEED not in range(100)


def test_with_default_values_no_trial_runs(mine, monkeypatch):
    ran = []
    monkeypatch.setattr(compare, "finished", lambda runs, *rest: ran.extend(runs) or [])
    monkeypatch.setattr(tables, "report", lambda *rest: [])
    monkeypatch.setattr(tables, "save_all", lambda *rest: None)
    flags = ["--methods", f"{mine}:constant", "--defaults", "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    compare.main()
    defaults = registry.in_file(mine)["constant"].defaults
    assert [(job.trial, job.values) for job in ran] == [(None, defaults)] * 2 * 3


# Tables


def records(name, own):
    return [
        {"method": name, "partition": "dirichlet", "trial": None, "seed": seed, "own": value}
        for seed, value in enumerate(own)
    ]


def test_the_paired_interval_is_that_of_students_t():
    own = [0.5, 0.62, 0.55, 0.58, 0.51]
    other = [0.45, 0.6, 0.56, 0.5, 0.5]
    found = tables.difference(records("a", own), records("b", other))
    gains = 100 * (np.array(own) - np.array(other))
    low, high = stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert found == f"{gains.mean():+.1f} ± {(high - low) / 2:.1f}"
    assert tables.difference(records("a", own[:3]), records("b", other)) == "+2.0"
    assert tables.difference(records("a", own), None) == ""


def test_a_quick_study_prints_a_table_with_a_method_of_ones_own(
    mine, tmp_path, monkeypatch, capsys
):
    names = f"{mine}:constant,fedvpt,local"
    flags = ["--quick", "--workers", "1", "--partitions", "few", "--records", str(tmp_path)]
    flags += ["--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare.py", "--methods", names, *flags])
    compare.main()
    printed = capsys.readouterr().out
    rows = [line for line in printed.splitlines() if line.startswith("| Constant")]
    assert len(rows) == 2  # of accuracy, and of hyperparameters
    assert "| Local training" in printed
    lines = (tmp_path / "digits-quick.jsonl").read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"constant", "fedvpt", "local"}
    compare.main()
    assert capsys.readouterr().out == printed
    assert (tmp_path / "digits-quick.jsonl").read_text().splitlines() == lines


def test_tables_are_also_written_as_csv_and_as_a_figure(mine, tmp_path):
    figures = dict.fromkeys(("full", "worst", "received", "after"), 0.5)
    figures |= dict.fromkeys(("bytes_up", "bytes_down", "trained", "backward", "seconds"), 10.0)
    rows = [each | figures | {"values": {}} for each in records("constant", [0.1, 0.2, 0.3])]
    tables.save_all(rows, registry.in_file(mine), "digits", tmp_path / "out")
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    stems = [f"digits-dirichlet.{kind}" for kind in ("csv", "md", "png")]
    assert written == [*stems, "digits-values.md"]
    text = (tmp_path / "out" / "digits-dirichlet.md").read_text()
    assert text.startswith("digits, label shift (Dirichlet .3), 3 seeds\n\n| method")
    header, row = (tmp_path / "out" / "digits-dirichlet.csv").read_text().splitlines()
    assert header.startswith("method,all test images,own mix,worst client")
    assert row.startswith("Constant,50.0 ± 0.0,20.0 ± 10.0,50.0 ± 0.0")
