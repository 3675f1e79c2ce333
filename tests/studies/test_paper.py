"""Every setting of the papers runs end to end, on files of its data set's own format."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fabricated import fabricate, unchecked
from other_device import other_device
from studies import paper, records, tasks
from studies.papers import cost, run, shrinking
from studies.papers.estimate import estimate
from studies.papers.run import Machine
from studies.papers.setting import Setting
from tiny_backbones import SIZE, TINY

MACHINE = Machine(backbones=TINY, device=torch.device("cpu"))
TABLE = Path(__file__).parents[2] / "docs" / "results" / "reproduce" / "settings.md"
CLASSES = {"cifar100": 100, "flowers102": 102, "five-dataset": 50}
COOP = ("dtd-coop", "flowers102-coop", "food101-coop", "pets-coop", "caltech101-coop")
FREE = ("tiny-imagenet", *COOP)
"""Data sets that are written with as many classes as clients."""
# One setting of each data set that no other of these has.
FAST = (
    "fedhpl-1-cifar10-dirichlet",
    "fedhpl-1-svhn-iid",
    "sgpt-2-office-caltech10",
    "fedl2g-2-htfe3",
    "fedotp-1-dtd",
    "fedotp-1-pets",
)
DEVICE = [
    "fedhpl-1-svhn-iid",
    "sgpt-2-office-caltech10",
    "fedl2g-2-htfe3",
    "fedotp-1-dtd",
    pytest.param("fedhpl-2-cifar10-iid", marks=pytest.mark.slow),
    pytest.param("fedl2g-2-htfe2", marks=pytest.mark.slow),
    pytest.param("fedotp-3-cifar10", marks=pytest.mark.slow),
    pytest.param("sgpt-4-cifar100-s10", marks=pytest.mark.slow),
]
SLOW = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in paper.SETTINGS
]


def small(setting: Setting, root, *, rows: int | None = None) -> tuple[Setting, tasks.Task]:
    """Shrink a setting to two rounds, small images and a tiny data set in `root`."""
    if setting.family == "networks" and rows is not None:
        setting = replace(setting, num_clients=5, cohort_size=5)
    free = setting.task in FREE
    classes = {"classes": setting.num_clients} if free else {}
    count = setting.num_clients if free else CLASSES.get(setting.task, 10)
    # Batch normalization needs two images in each batch of the smallest client.
    each = 40 if setting.family == "networks" else 8
    per_class = max(4, math.ceil(each * setting.num_clients / count))
    fabricate(setting.task, root, train=per_class, test=2, **classes)
    with unchecked():
        task = tasks.load(setting.task, root, size=SIZE)
    size = 32 if setting.backbones[0].startswith("RN") else SIZE
    recipe = replace(setting.recipe, epochs=min(2, setting.recipe.epochs))
    last = [row for row in setting.rows if row.method is not None][-(rows or len(setting.rows)) :]
    brief = replace(setting, image_size=size, length=4, recipe=recipe, rows=tuple(last))
    return shrinking.shrunk(replace(brief, last_rounds=1), task, 0.001)


@pytest.mark.parametrize("name", SLOW)
def test_a_setting_runs_from_files_to_the_table(name, tmp_path):
    setting, task = small(paper.SETTINGS[name], tmp_path, rows=1 if name in FAST else None)
    assert setting.rounds == 2
    found = paper.finished(setting, task, MACHINE, seeds=[0], path=tmp_path / "records.jsonl")
    for row, record in zip(setting.rows, found, strict=True):
        assert record["row"] == row.title
        assert all(0 <= record[column] <= 1 for column in row.figures)
        assert all(math.isfinite(record[name]) for name in ("bytes_up", "seconds"))
    text = paper.report(setting, found)
    for row in setting.rows:
        for column, figure in row.figures.items():
            ours = 100 * next(each[column] for each in found if each["row"] == row.title)
            line = next(
                line
                for line in text.splitlines()
                if line.startswith(f"| {row.title} ") and f" {column} |" in line
            )
            assert f"{figure}" in line
            assert f"{ours - figure:+.1f}" in line


@pytest.mark.parametrize("name", DEVICE)
def test_a_setting_runs_on_another_device(name, tmp_path):
    setting, task = small(paper.SETTINGS[name], tmp_path, rows=1 if name in FAST else None)
    rows = [(row, run.inputs_of(row), own) for row, own in paper.runnable(setting)]
    with other_device() as device:
        machine = replace(MACHINE, device=device)
        for row, inputs, own in rows:
            trial = run.make_trial(own, task, machine, seed=0, inputs=inputs)
            found = run.run_row(row, trial, task)
            assert all(0 <= found[column] <= 1 for column in row.figures)


def test_a_batch_on_two_devices_is_an_error_of_the_stand_in():
    with other_device() as device, pytest.raises(RuntimeError, match="on the same device"):
        torch.zeros(2, device=device) + torch.zeros(2)


def test_a_generator_of_another_device_is_an_error_of_the_stand_in():
    with other_device() as device, pytest.raises(RuntimeError, match="expected a generator on"):
        torch.rand(2, generator=torch.Generator(), device=device)


def test_a_killed_run_continues_with_the_missing_rows(tmp_path, monkeypatch):
    setting, task = small(paper.SETTINGS["fedhpl-1-svhn-iid"], tmp_path, rows=2)
    path = tmp_path / "records.jsonl"
    whole = paper.finished(setting, task, MACHINE, seeds=[0], path=path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20])
    ran = []
    kept = run.run_row
    monkeypatch.setattr(run, "run_row", lambda row, *a, **k: ran.append(row) or kept(row, *a, **k))
    again = paper.finished(setting, task, MACHINE, seeds=[0], path=path)
    assert [row.title for row in ran] == [setting.rows[1].title]
    for first, second in zip(whole, again, strict=True):
        assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_a_finished_run_has_full_progress_bars(tmp_path, monkeypatch):
    setting, task = small(paper.SETTINGS["fedhpl-1-svhn-iid"], tmp_path, rows=1)
    path, bars = tmp_path / "records.jsonl", []

    class Bar(paper.tqdm):
        def __exit__(self, *error):
            bars.append((self.n, self.total))
            super().__exit__(*error)

    monkeypatch.setattr(paper, "tqdm", Bar)
    for _ in range(2):
        paper.finished(setting, task, MACHINE, seeds=[0], path=path)
    assert bars == [(2, 2), (1, 1)] * 2


def test_a_record_of_other_rounds_values_or_images_is_not_used(tmp_path):
    setting, task = small(paper.SETTINGS["sgpt-2-office-caltech10"], tmp_path)
    row, fewer = setting.rows[0], tasks.Images(*(each[1:] for each in task.train))
    runs = [
        (row, setting, task),
        (row, replace(setting, rounds=setting.rounds + 1), task),
        (replace(row, values={"a": 1}), setting, task),
        (row, setting, task._replace(train=fewer)),
    ]
    assert len({paper.key(paper.about(*run, 0)) for run in runs}) == len(runs)


def test_the_estimate_counts_steps_and_images(tmp_path):
    setting, task = small(paper.SETTINGS["fedhpl-1-cifar10-dirichlet"], tmp_path, rows=1)
    trial = run.make_trial(setting, task, MACHINE, seed=0)
    own = estimate(setting.rows[0], trial)
    sizes = [len(shard) for shard in trial.federation.shards.values()]
    epochs, batch = setting.recipe.epochs, setting.recipe.batch_size
    assert own.images == setting.rounds * epochs * sum(sizes)
    assert own.steps == setting.rounds * epochs * sum(math.ceil(each / batch) for each in sizes)
    assert 0 < own.measured <= 20
    assert own.seconds > 0


def test_the_estimate_is_printed_for_each_row_with_the_sum(tmp_path):
    setting, task = small(paper.SETTINGS["fedhpl-1-svhn-iid"], tmp_path, rows=2)
    lines = paper.estimate(setting, task, MACHINE, 3).splitlines()
    for row in setting.rows:
        assert sum(line.startswith(f"| {row.title} ") for line in lines) == 1
    assert lines[-1].startswith("All rows, 3 seeds, with evaluation: ")
    assert not (tmp_path / "out").exists()


def test_the_committed_table_has_every_setting_with_the_papers_figure():
    lines = TABLE.read_text().splitlines()[2:]
    assert len(lines) == len(paper.SETTINGS)
    for line, setting in zip(lines, paper.SETTINGS.values(), strict=True):
        name, data, _, title, column, figure, _ = (each.strip() for each in line.split("|")[1:-1])
        assert (name, data) == (f"`{setting.name}`", setting.task)
        row = next(row for row in setting.rows if row.title == title)
        assert float(figure) == row.figures[column]


@pytest.mark.slow
def test_the_committed_table_is_the_one_of_the_command():
    assert paper.reproduction() == TABLE.read_text().rstrip("\n")


def test_hours_are_those_of_arithmetic():
    setting = paper.SETTINGS["fedhpl-1-cifar10-iid"]
    row = next(row for row in setting.rows if row.title == "FedHPL")
    own = replace(setting, **row.changes)
    flops = cost.forward_flops(own.backbones[0], own.image_size)
    assert 34e9 < flops < 36e9  # ViT-B/16 at 224 pixels: 17.6 billion products and sums
    images = 50_000 * own.rounds * own.recipe.epochs
    passes = 2 * images + 5 * 10_000  # five clients have models of their own
    assert cost.hours(setting, row) == pytest.approx(passes * flops / cost.SPEED / 3600)
    shared = next(row for row in setting.rows if row.title == "FedAVG")
    passes = 2 * 100 * 50_000 + 10_000
    assert cost.hours(setting, shared) == pytest.approx(passes * flops / cost.SPEED / 3600)
    small = replace(setting, recipe=replace(setting.recipe, batch_size=1))
    steps = images
    assert cost.hours(small, replace(row, changes={})) >= steps * cost.STEP / 3600


def test_hours_count_three_quarters_of_all_images_where_they_are_pooled():
    setting = paper.SETTINGS["fedl2g-1-flowers102-pathological"]
    one = replace(setting, rounds=1, num_clients=1, cohort_size=1, backbones=("cnn",))
    flops = cost.forward_flops("cnn", setting.image_size)
    steps = math.ceil(0.75 * 8189 / 10)  # 8,189 flowers; a step of a small network takes 10 ms
    tests = 0.25 * 8189 * flops / cost.SPEED
    assert cost.hours(one, setting.rows[0]) == pytest.approx((steps * cost.STEP + tests) / 3600)


def test_the_list_names_every_setting():
    text = paper.listed()
    assert all(f"| {name} " in text for name in paper.SETTINGS)


def test_an_unknown_setting_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["paper.py", "--setting", "fedhpl-9"])
    with pytest.raises(SystemExit, match="`--setting` must be one of `--list`; got 'fedhpl-9'"):
        paper.main()


def test_records_hold_one_line_each(tmp_path):
    path = tmp_path / "a" / "records.jsonl"
    records.append(path, {"row": "a"})
    path.write_text(path.read_text() + '{"row": "b')
    records.append(path, {"row": "c"})
    assert records.read(path) == [{"row": "a"}, {"row": "c"}]
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == ["a", "c"]
