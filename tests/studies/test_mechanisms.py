"""Settings in which a mechanism should decide: what differs between rows, records and reports."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from methods.federation import Predictions
from studies import mechanism_causes, mechanisms, records
from studies.gallery import registry
from studies.gallery.tasks import Trial
from studies.mechanism_settings import SETTINGS

METHODS = registry.gallery()


def test_every_paper_has_two_settings_and_rows_name_hyperparameters_that_exist():
    papers = [name.split("-")[0] for name in SETTINGS]
    assert {paper: papers.count(paper) for paper in papers} == {
        "fedhpl": 3,  # the third has one client
        "sgpt": 2,
        "fedl2g": 2,
        "fedotp": 2,
    }
    for setting in SETTINGS.values():
        assert setting.measure in setting.columns
        assert set(setting.columns) <= set(mechanisms.COLUMNS)
        assert len({row.title for row in setting.rows}) == len(setting.rows)
        for row in setting.rows:
            assert set(row.values) <= set(METHODS[row.method].defaults), row.title


@pytest.mark.parametrize("paper", ["fedhpl", "sgpt", "fedl2g", "fedotp"])
def test_the_second_row_lacks_the_mechanism_and_nothing_else(paper):
    first, second = next(
        setting.rows[:2] for name, setting in SETTINGS.items() if name.startswith(paper)
    )
    differing = {name for name in first.values if first.values[name] != second.values.get(name)}
    expected = {
        "fedhpl": {"distillation_weight"},
        "sgpt": {"num_groups"},
        "fedl2g": {"server_rate"},
    }
    if paper == "fedotp":  # another solver, each with its own tuned values
        assert (first.method, second.method) == ("fedotp", "fedotp_average")
    else:
        assert (first.method, differing) == (second.method, expected[paper])


@pytest.mark.parametrize("name", ["fedhpl-classes", "fedhpl-few", "sgpt-four", "fedl2g-dirichlet"])
def test_clients_have_what_the_title_says(name):
    made = SETTINGS[name].make(0)
    federation, mixes = made.federation, made.mixes
    assert len(federation.clients) == len(mixes)
    sizes, labels = mixes.sum(1), mixes.reshape(len(mixes), -1, 10).sum(1)
    if name == "fedhpl-classes":
        assert ((labels > 0).sum(1) == 4).all()
    elif name == "sgpt-four":
        assert len(mixes) == 20
        assert (mixes.reshape(20, 4, 10).sum(2) > 0).sum(1).tolist() == [1] * 20
    else:
        assert (sizes == {"fedhpl-few": 30, "fedl2g-dirichlet": 40}[name]).all()
    owned = torch.cat(list(federation.shards.values()))
    assert len(owned) == len(owned.unique())


def test_a_row_runs_once_and_its_record_is_used_again(tmp_path):
    setting = mechanisms.shortened(SETTINGS["fedl2g-iid"])
    row, known = setting.rows[-1], {}
    path = tmp_path / "mechanisms.jsonl"
    first = mechanisms.measured("fedl2g-iid", setting, row, 0, known, path)
    again = mechanisms.measured("fedl2g-iid", setting, row, 0, known, path)
    assert first is again
    assert [mechanisms.key(each) for each in records.read(path)] == [mechanisms.key(first)]
    assert all(0 <= first[column] <= 1 for column in mechanisms.COLUMNS if column != "rise")
    assert first["rise"] >= 0
    incomplete = {mechanisms.key(first): {**first, "rise": None}}
    del incomplete[mechanisms.key(first)]["rise"]
    mechanisms.measured("fedl2g-iid", setting, row, 0, incomplete, path)
    assert incomplete[mechanisms.key(first)]["rise"] == first["rise"]
    other = replace(row, values={**row.values, "learning_rate": 0.1})
    assert mechanisms.key(first | {"values": other.values}) != mechanisms.key(first)


def test_the_report_has_the_paired_gain_of_the_first_row_over_the_others():
    setting = SETTINGS["sgpt-two"]
    rng = np.random.default_rng(0)
    values = {row.title: rng.uniform(size=5) for row in setting.rows}
    found = [
        {"row": row.title, "seed": seed}
        | dict.fromkeys(mechanisms.COLUMNS, values[row.title][seed])
        for row in setting.rows
        for seed in range(5)
    ]
    lines = mechanisms.report(setting, found).splitlines()
    first, second = (values[row.title] for row in setting.rows[:2])
    gains = 100 * (first - second)
    half = stats.ttest_1samp(gains, 0).confidence_interval(0.95).high - gains.mean()
    line = next(line for line in lines if line.startswith(f"| {setting.rows[1].title} "))
    assert f"{gains.mean():+.1f} ± {half:.1f}" in line
    assert math.isfinite(half)


def test_a_report_leaves_out_rows_without_records_and_figures_that_records_lack():
    setting = SETTINGS["fedl2g-iid"]
    figures = dict.fromkeys(("full", "own", "worst"), 0.5)
    found = [{"row": row.title, "seed": 0} | figures for row in setting.rows[:2]]
    head, _, *body = mechanisms.report(setting, found).splitlines()[2:]
    assert "rise" not in head
    assert len(body) == 2
    found[0]["rise"] = 0.1234
    head, _, first, second = mechanisms.report(setting, found).splitlines()[2:]
    place = [cell.strip() for cell in head.split("|")].index("rise")
    assert [line.split("|")[place].strip() for line in (first, second)] == ["0.123", ""]


def test_the_rise_is_the_largest_over_the_lowest_training_loss_before():
    trial = mechanisms.shortened(SETTINGS["fedl2g-iid"]).make(0)
    images = torch.zeros(2, 10)
    images[:, 3] = 2.0  # logits
    federation = replace(
        trial.federation, inputs=images, labels=torch.tensor([3, 4]), clients=[0, 1],
        shards={0: torch.tensor([0]), 1: torch.tensor([1])},
    )  # fmt: skip
    losses = mechanisms.training_losses(
        Predictions(everyone=lambda inputs: inputs), trial._replace(federation=federation)
    )
    total = math.log(math.exp(2) + 9)
    assert losses.tolist() == pytest.approx([total - 2, total], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_of_a_setting_runs(name):
    setting = mechanisms.shortened(SETTINGS[name])
    for row in setting.rows:
        figures = mechanisms.evaluate_run(row, setting.make(0), losses="rise" in setting.columns)
        assert set(setting.columns) <= set(figures), row.title


def test_the_page_has_the_tables_of_the_committed_records():
    page = (mechanisms.RECORDS.parent / "mechanisms.md").read_text()
    committed = records.read(mechanisms.RECORDS)
    for name, setting in SETTINGS.items():
        found = [record for record in committed if record["setting"] == name]
        titles = {record["row"] for record in found}
        assert titles <= {row.title for row in setting.rows}
        assert len(found) == 5 * len(titles), name
        if found:
            assert mechanisms.report(setting, found).strip() in page, name
        missing = [row.title for row in setting.rows if row.title not in titles]
        assert all(title.removeprefix("SGPT, ") in page for title in missing), missing


def test_a_quick_study_prints_its_table_and_keeps_its_records_apart(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mechanisms.jsonl"
    flags = ["--quick", "--only", "fedl2g-iid", "--seeds", "1", "--records", str(path)]
    monkeypatch.setattr("sys.argv", ["mechanisms.py", *flags])
    mechanisms.main()
    assert f"### {SETTINGS['fedl2g-iid'].title}" in capsys.readouterr().out
    found = records.read(tmp_path / "mechanisms-quick.jsonl")
    assert [each["row"] for each in found] == [row.title for row in SETTINGS["fedl2g-iid"].rows]
    assert not path.exists()


class Grouped:
    """Model of three groups: images select the group in column 0, and group 1 alone is right."""

    class Selector:
        keys = torch.zeros(3, 1)

        def __call__(self, query):
            return SimpleNamespace(indices=query[:, 0].long())

    selector = Selector()

    def query(self, images):
        return images

    def logits(self, images, chosen=None):
        right = torch.zeros(len(images), dtype=torch.bool) if chosen is None else chosen == 1
        labels = images[:, 1].long()
        return torch.nn.functional.one_hot(torch.where(right, labels, (labels + 1) % 10), 10)


def test_causes_of_groups_by_hand():
    groups, labels = [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]
    domains = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    images = torch.tensor([groups, labels]).T.float()
    cells = 10 * domains + torch.tensor(labels)
    found = mechanism_causes.selected(Grouped(), Trial(None, images, cells, None, ()))
    assert found["effective groups"] == pytest.approx(2)
    assert found["smallest share of the main domain of a group"] == 0.75
    assert found["groups of one domain"] == 1
    assert found["dead groups"] == 1
    assert found["images in the group of their domain"] == 7 / 8
    assert found["accuracy with the selected groups"] == 0.5
    assert found["accuracy without groups"] == 0
    assert found["predictions that the next group changes"] == 1  # 0 to 1, and 1 to 2


def test_causes_of_guides_are_those_of_the_last_broadcast():
    setting = mechanisms.shortened(SETTINGS["fedl2g-iid"])
    row = setting.rows[0]
    still = replace(row, values={**row.values, "server_rate": 0.0})
    moved, fixed = (mechanism_causes.guides(replace(setting, rows=[each])) for each in (row, still))
    distance = "distance of the guides, of their first norm"
    assert moved[distance] > 0 == fixed[distance]
    assert all(math.isfinite(each) for each in moved.values())
