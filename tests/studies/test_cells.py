"""A cell of each paper, by one command, from files in their layout and without a network."""

import json
import socket
from dataclasses import replace

import open_clip
import pytest
import timm
import torch

import study
from fabricated import fabricate, unchecked
from studies import papers

VIT, CLIP = "test_vit.r160_in1k", "ViT-S-32-alt:own"
OFFICE = {"train": 3, "test": 1}
CELLS = {
    "fedhpl": ("fedhpl-2-svhn-iid", "FedHPL (ViT)", VIT, {"train": 20, "test": 4}),
    "sgpt": ("sgpt-2-office-caltech10", "SGPT", VIT, OFFICE),
    "fedl2g": ("fedl2g-2-htfe2", "FedL2G-l", None, {"train": 8, "test": 2}),
    "fedotp": ("fedotp-a2-office-caltech10", "FedOTP (Ours)", CLIP, OFFICE),
}


def weights(name, folder):
    """Write the weights of a small network."""
    made = timm.create_model(VIT) if name == VIT else open_clip.create_model("ViT-S-32-alt")
    torch.save(made.state_dict(), folder / "weights.pth")
    return f"{name}={folder / 'weights.pth'}"


@pytest.mark.slow
@pytest.mark.parametrize("paper", CELLS)
def test_a_cell_runs_from_files_to_the_printed_figure(paper, tmp_path, monkeypatch, capsys):
    """Networks are smaller than the paper's, and all else is the command of a user."""
    name, title, network, numbers = CELLS[paper]
    setting, flags = papers.settings(paper)[name], []
    if network is not None:
        flags = ["--weights", weights(network, tmp_path)]
    small = {"backbones": (network,) if network else ("cnn", "resnet4")}
    side = 224 if network == CLIP else 32
    own = replace(setting, **small, image_size=side)
    monkeypatch.setitem(papers.settings(paper), name, own)
    fabricate(setting.data, tmp_path, **numbers)

    def refused(*address, **options):
        raise AssertionError(f"the program asks for {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    flags += ["--root", str(tmp_path), "--out", str(tmp_path / "out"), "--rows", title]
    flags += ["--partitions", name, "--shrink", "0.001", "--workers", "1"]
    with unchecked():
        study.main(["--study", paper, *flags])
    (path,) = (tmp_path / "out" / "records").glob("*/*/records.jsonl")
    *_, record = map(json.loads, path.read_text().splitlines())
    row = next(row for row in setting.rows if row.title == title)
    printed = capsys.readouterr().out
    assert record["row"] == title
    for column, figure in row.figures.items():
        assert 0 <= record[column] <= 1
        assert f"{figure:.1f}" in printed or f"{figure:g}" in printed
    assert all(choice in printed for choice in setting.choices)
