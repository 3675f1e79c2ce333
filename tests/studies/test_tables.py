"""Command lines of the studies, on embedded data and on an image folder with timm models."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import fedprompt as fp
from printed import rows
from studies import fedhpl, fedl2g, fewer_bytes
from studies.report import Result, mean_and_deviation, table

RESNETS = "resnet18,resnet34,resnet50"
VITS = "vit_small_patch16_224,vit_base_patch16_224"


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], out: Path, *arguments: str
) -> str:
    monkeypatch.setattr("sys.argv", ["fedhpl.py", "--quick", "--out", str(out), *arguments])
    fedhpl.main()
    return capsys.readouterr().out


def on_colors(folder: Path, backbones: str, *, num_clients: int) -> list[str]:
    """Return the flags of a run on the folder of images, with timm's models."""
    flags = f"--dataset colors --backbones {backbones} --image-size 32 --clients {num_clients}"
    return [*flags.split(), "--root", str(folder)]


def entries_of(out: Path) -> list[dict[str, str]]:
    """Return the entries of the ledger of the FedHPL row."""
    return list(csv.DictReader((out / "fedhpl.csv").read_text().splitlines()))


@pytest.mark.slow
def test_default_run_reports_every_method_and_writes_pictures_and_ledgers(
    monkeypatch, capsys, tmp_path
):
    printed = run(monkeypatch, capsys, tmp_path)
    figures = rows(printed)
    assert list(figures) == ["local only", "FedHPL", "FedHPL +P +H"]
    for lowest, average, highest, own in figures.values():
        assert 0 < lowest <= average <= highest < 100
        assert 0 < own < 100
    assert (tmp_path / "fedhpl.png").stat().st_size > 10_000
    entries = entries_of(tmp_path)
    up = sum(int(entry["num_bytes"]) for entry in entries if entry["direction"] == "up")
    assert f"Logits up: {up} bytes" in printed
    assert "0.54 K numbers a round" in printed  # FedHPL Table 10, five clients and ten classes
    assert up <= 110 * 4 * 5 * 2  # Table 9: 110 numbers of 4 bytes, 5 clients, 2 rounds


@pytest.mark.slow  # the killed runs of test_resume.py also show that runs are reproducible
def test_the_same_seed_gives_the_same_figures_and_another_seed_others(
    monkeypatch, capsys, tmp_path
):
    first, again, other = (
        run(monkeypatch, capsys, tmp_path, "--share-head", "--seed", seed)
        for seed in ("1", "1", "2")
    )
    assert rows(first) == rows(again)
    assert rows(first) != rows(other)


def test_local_only_sends_nothing(monkeypatch, capsys, tmp_path):
    printed = run(monkeypatch, capsys, tmp_path, "--local", "--partition", "iid")
    assert list(rows(printed)) == ["local only"]
    assert "bytes" not in printed
    assert not list(tmp_path.glob("*.csv"))


@pytest.mark.slow
def test_paper_setting_on_a_folder_with_random_weights(monkeypatch, capsys, tmp_path, folder):
    arguments = on_colors(folder, VITS, num_clients=2)
    printed = run(
        monkeypatch,
        capsys,
        tmp_path,
        *arguments,
        "--partition",
        "dir",
        "--alpha",
        "5",
        "--share-prompts",
    )
    assert list(rows(printed)) == ["local only", "FedHPL"]
    # Deep prompts of ViT-S have 12 layers x 3 x 384 floats. One weight belongs to each parameter,
    # and the logits are separate entries.
    up = [int(entry["num_bytes"]) for entry in entries_of(tmp_path) if entry["direction"] == "up"]
    assert 12 * 3 * 384 * 4 + 4 in up


@pytest.mark.slow
def test_resnets_learn_a_border_of_pixels(monkeypatch, capsys, tmp_path, folder):
    arguments = on_colors(folder, RESNETS, num_clients=3)
    run(monkeypatch, capsys, tmp_path, *arguments, "--partition", "iid", "--share-prompts")
    entries = entries_of(tmp_path)
    sizes = {
        entry["name"]: int(entry["num_bytes"]) for entry in entries if entry["direction"] == "up"
    }
    assert sizes["prompts.columns"] == 576 * 4 + 4  # FedHPL Table 8 at 32 pixels, and the weight
    assert sizes["prompts.rows"] == 684 * 4 + 4


@pytest.mark.slow
def test_full_table_has_a_line_for_every_setting_and_method(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["fedhpl.py", "--full", "--quick", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    fedhpl.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 + 2 * 3
    assert all(re.search(r"\d ± \d", line) for line in lines[2:])


def test_spread_weights_classes_by_the_test_set_and_by_each_clients_own_mix():
    # Client 0 has images of class 0 only. Client 1 has three images of class 0 and one of class 1.
    # There are 30 test images of class 0 and 10 of class 1.
    accuracy = torch.tensor([[[1.0, 0.0], [0.5, 1.0]]])
    result = Result(np.array([[4, 0], [3, 1]]), torch.tensor([30, 10]), accuracy, fp.Ledger())
    lowest, average, highest, own = result.spread()
    assert lowest == pytest.approx((0.5 * 30 + 1.0 * 10) / 40)
    assert highest == pytest.approx(30 / 40)
    assert average == pytest.approx((0.625 + 0.75) / 2)
    assert own == pytest.approx((1.0 + (0.5 * 3 + 1.0 * 1) / 4) / 2)


def test_tables_align_and_spreads_are_sample_deviations():
    assert table(["a", "long"], [["xyz", 1]]).splitlines() == [
        "| a   | long |",
        "| --- | ---: |",
        "| xyz |    1 |",
    ]
    # The deviation of two points is their distance over the square root of two.
    assert mean_and_deviation([0.1, 0.3]) == "20.0 ± 14.1"


@pytest.mark.slow
def test_fedl2gs_groups_run_on_a_folder_with_random_weights(monkeypatch, capsys, tmp_path, folder):
    arguments = (
        "--dataset",
        "colors",
        "--root",
        str(folder),
        "--group",
        "HtFE4",
        "--clients",
        "4",
        "--image-size",
        "64",
    )
    split = ("--alpha", "50", "--dim", "64", "--batch-size", "3", "--learning-rate", "0.001")
    methods = ("--methods", "FedL2G-f", "--weight", "1", "--guide-learning-rate", "100")
    monkeypatch.setattr(
        "sys.argv", ["fedl2g.py", "--quick", "--out", str(tmp_path), *arguments, *split, *methods]
    )
    fedl2g.main()
    assert (
        "3.00 KiB down a round; formula 4 x 3 x 64 x 4 bytes = 3.00 KiB" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_codecs_are_compared_by_the_sizes_of_their_blobs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "sys.argv",
        ["fewer_bytes.py", "--quick", "--out", str(tmp_path), "--clients", "2", "--backbones", "S"],
    )
    fewer_bytes.main()
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ][2:]
    assert [line[0] for line in lines] == list(fewer_bytes.ROWS)
    plain, half, eight, *sparse = (int(line[1]) for line in lines)
    numbers = 3 * 8 * 48 + 48 * 10 + 10  # three layers of eight prompts, and a head
    messages = 2 * 2  # two clients in two rounds
    # Three entries have a weight each, and a message has a header.
    assert 4 * numbers + 12 < plain / messages < 4 * numbers + 12 + 1000
    assert 0 <= (plain - half) / messages - 2 * numbers < 50  # headers name shorter offsets
    assert 0.9 * half > eight > half / 2
    assert sparse[0] == sparse[1] > sparse[2] == sparse[3]  # a memory costs no bytes
