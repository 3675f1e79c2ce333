"""SGPT's study: its command line, its components, and its server for any order of clients."""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedprompt as fp
from embedded.shifts import feature_shift, label_shift
from studies import sgpt, sgpt_report, sgpt_setup


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, *arguments: str
) -> str:
    monkeypatch.setattr("sys.argv", ["sgpt.py", "--quick", "--out", str(out), *arguments])
    sgpt.main()
    return capsys.readouterr().out


def tables(printed: str) -> list[dict[str, list[str]]]:
    """Return every table of the report as a dict from the first column to the other columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", printed, re.MULTILINE):
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found.append({name: cells for name, *cells in lines[2:]})
    return found


def quick(**flags: object) -> Namespace:
    args = sgpt_setup.flags().parse_args(["--quick"])
    return Namespace(**vars(args) | flags)


@pytest.mark.slow
def test_default_run_compares_with_vpt_and_writes_its_picture(monkeypatch, capsys, tmp_path):
    accuracy, clusters = tables(run(monkeypatch, capsys, tmp_path))
    assert list(accuracy) == ["FedVPT", "FedVPT-D", "SGPT"]
    for cells in accuracy.values():
        overall, local, worst = map(float, cells)
        assert 0 <= worst <= local < 100
        assert overall == pytest.approx(local, abs=5)  # clients hold about equally many test images
    assert list(clusters) == ["SGPT", "centralized k-means"]
    assert clusters["centralized k-means"][1] == "100.0"  # it agrees with itself
    assert (tmp_path / "sgpt.png").stat().st_size > 10_000


@pytest.mark.slow  # the killed runs of test_resume.py also show that runs are reproducible
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(
    monkeypatch, capsys, tmp_path
):
    first, again, other = (
        run(monkeypatch, capsys, tmp_path, "--shift", "feature", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    "name",
    [name if name == "SGPT" else pytest.param(name, marks=pytest.mark.slow) for name in sgpt.ROWS],
)
def test_every_row_sends_what_it_trains_in_equal_numbers_of_steps(name, monkeypatch):
    steps = []
    monkeypatch.setattr(
        torch.optim.SGD,
        "step",
        lambda self: steps.append({id(group["params"][0]) for group in self.param_groups}),
    )
    federation, backbone, args = sgpt_setup.prepare(quick(rounds=1, ratio=0.1))
    args.rounds = 1
    result = sgpt.federate(name, federation, backbone, args)
    row = sgpt.ROWS[name]
    assert {value.split(".")[0] for value in result.values} == set().union(*row.blocks)
    # Two of 20 clients have 60 images each, which are two batches of at most 32. There are two
    # epochs in total, in one block or in two.
    assert len(steps) == 2 * 2 * 2
    assert len({frozenset(each) for each in steps}) == len(row.blocks)
    if "groups" in result.values:
        assert result.usage.sum() > 0


@pytest.mark.slow
def test_the_order_of_clients_changes_neither_model_nor_counts(monkeypatch):
    federation, backbone, args = sgpt_setup.prepare(quick())
    forwards, draw = sgpt.federate("SGPT", federation, backbone, args), fp.cohort
    nearest = fp.select_nearest(federation.test.queries, forwards.values["selector.keys"]).indices
    assert torch.equal(forwards.chosen, nearest)  # inference uses no counts
    monkeypatch.setattr(fp, "cohort", lambda *clients, **drawn: draw(*clients, **drawn)[::-1])
    backwards = sgpt.federate("SGPT", federation, backbone, args)
    torch.testing.assert_close(backwards.usage, forwards.usage, rtol=0, atol=0)
    torch.testing.assert_close(backwards.values, forwards.values, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_clients_that_never_took_part_select_their_groups():
    federation, backbone, args = sgpt_setup.prepare(quick(shift="feature", unseen=5))
    result = sgpt.federate("SGPT", federation, backbone, Namespace(**vars(args) | {"rounds": 6}))
    new = federation.test.shards[-5:]  # one of each domain
    seen = [np.concatenate(federation.test.shards[domain:-5:5]) for domain in range(5)]
    own, known = (
        sgpt_report.frequencies(result.chosen, shards, args.groups) for shards in (new, seen)
    )
    distance = torch.cdist(own, known, p=1) / 2
    assert distance.diagonal().mean() < distance[~torch.eye(5, dtype=torch.bool)].mean() - 0.2
    assert "took part" in sgpt_report.newcomers({"SGPT": result}, 5)


@pytest.mark.slow
def test_paper_setting_on_a_folder_with_random_weights(monkeypatch, capsys, tmp_path, folder):
    arguments = (
        "--dataset",
        "colors",
        "--root",
        str(folder),
        "--image-size",
        "32",
        "--backbone",
        "vit_tiny_patch16_224",
    )
    printed = run(
        monkeypatch,
        capsys,
        tmp_path,
        *arguments,
        "--clients",
        "3",
        "--classes-per-client",
        "2",
        "--ratio",
        "0.7",
    )
    accuracy, clusters = tables(printed)
    assert list(accuracy) == ["FedVPT", "FedVPT-D", "SGPT"]
    assert float(clusters["SGPT"][3]) <= 12  # effective groups of twelve test images


def test_other_data_have_the_defaults_of_the_paper():
    args = sgpt_setup.filled(sgpt_setup.flags().parse_args(["--dataset", "cifar100"]))
    assert (args.groups, args.epochs, args.ratio, args.learning_rate) == (20, 5, 0.05, 0.01)
    assert (args.shared_layers, args.group_layers) == ((0, 1, 2, 3), (4, 5, 6))
    assert (
        sgpt_setup.filled(
            sgpt_setup.flags().parse_args(["--dataset", "cifar100", "--groups", "7"])
        ).groups
        == 7
    )


@pytest.mark.slow
def test_full_tables_have_a_line_for_every_row(monkeypatch, capsys, tmp_path):
    printed = run(monkeypatch, capsys, tmp_path, "--full")
    found = tables(printed)
    rows = list(sgpt.ROWS)
    selecting = [
        name for name in rows if any("groups" in block for block in sgpt.ROWS[name].blocks)
    ]
    assert list(found[0]) == rows
    assert list(found[1]) == [*selecting, "centralized k-means"]
    assert list(found[3])[:3] == rows[:3]
    assert set(found[4]) <= set(found[1])
    assert list(found[2]) == list(found[5]) == ["FedVPT", "SGPT"]
    assert list(found[6]) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("validate", [False, True])
def test_label_shift_tests_each_client_on_the_classes_it_learns(validate):
    federation = label_shift(
        "digits",
        root=".",
        image_size=16,
        seed=0,
        num_clients=20,
        classes_per_client=2,
        validate=validate,
    )
    for side, total in (
        (federation.train, 900 if validate else 1200),
        (federation.test, 300 if validate else 597),
    ):
        assert sorted(np.concatenate(side.shards)) == list(range(total))
    for learned, tested in zip(federation.train.shards, federation.test.shards, strict=True):
        classes = set(federation.train.labels[learned].tolist())
        assert len(classes) == 2
        assert set(federation.test.labels[tested].tolist()) == classes


def test_feature_shift_gives_each_client_one_domain_and_each_domain_four_clients():
    federation = feature_shift(seed=0, num_clients=20, validate=False)
    for side in federation:
        if isinstance(side, int):
            continue
        domains = [side.truth[shard].unique().tolist() for shard in side.shards]
        assert domains == [[client % 5] for client in range(20)]
        assert sorted(np.concatenate(side.shards)) == list(range(len(side.labels)))
    raw, inverted = federation.train.truth == 3, federation.train.truth == 0
    images = torch.stack([federation.train.split.dataset[number][0] for number in range(len(raw))])
    # Ink is light on black, and dark on white.
    assert images[raw].mean() < 0.5 < images[inverted].mean()


def test_validation_uses_no_test_image():
    def images(**flags: bool) -> tuple[set[bytes], set[bytes]]:
        federation = label_shift(
            "digits", root=".", image_size=16, seed=0, num_clients=20, classes_per_client=2, **flags
        )
        return tuple(
            {side.split.dataset[n][0].numpy().tobytes() for n in range(len(side.labels))}
            for side in federation[1:]
        )

    train, test = images(validate=False)
    learned, checked = images(validate=True)
    assert learned | checked == train
    assert not checked & learned
    assert not (learned | checked) & test


def test_clusters_are_matched_one_to_one():
    # Groups 2, 0, 1 match classes 0, 1, 2 with 2 + 1 + 1 samples. The second sample of group 0 is
    # not matched, because its class already has a group.
    found, wanted = torch.tensor([2, 2, 0, 0, 1]), torch.tensor([0, 0, 1, 0, 2])
    assert sgpt_report.matched(found, wanted) == pytest.approx(4 / 5)
    assert sgpt_report.matched(wanted, wanted) == 1


def test_figures_are_means_of_the_last_ten_rounds():
    accuracy = torch.tensor([[1.0, 1.0]] * 3 + [[0.75, 0.0]] * 5 + [[0.25, 0.0]] * 5)
    result = sgpt_report.Result(accuracy, torch.tensor([30, 10]), None, None, {})
    assert result.figures() == pytest.approx([0.375, 0.25, 0.0])


def test_feature_shift_needs_domains():
    with pytest.raises(ValueError, match="`--shift feature` must come with"):
        sgpt_setup.prepare(quick(shift="feature", dataset="cifar10"))
