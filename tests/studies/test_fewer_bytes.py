"""Command line of the study of codecs, on the digits and on an image folder with a timm model."""

import pytest

from studies import fewer_bytes
from studies.tables import mean_and_deviation, table


def lines(monkeypatch, capsys, out, *flags) -> list[list[str]]:
    arguments = ["fewer_bytes.py", "--quick", "--out", str(out), "--clients", "2", *flags]
    monkeypatch.setattr("sys.argv", arguments)
    fewer_bytes.main()
    printed = capsys.readouterr().out.splitlines()
    table = [line for line in printed if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table][2:]


@pytest.mark.slow
def test_codecs_are_compared_by_the_sizes_of_their_blobs(monkeypatch, capsys, tmp_path):
    found = lines(monkeypatch, capsys, tmp_path, "--backbones", "S")
    assert [line[0] for line in found] == list(fewer_bytes.ROWS)
    plain, half, eight, *sparse = (int(line[1]) for line in found)
    numbers = 3 * 8 * 48 + 48 * 10 + 10  # three layers of eight prompts, and a head
    messages = 2 * 2  # two clients in two rounds
    # Three entries have a weight each, and a message has a header.
    assert 4 * numbers + 12 < plain / messages < 4 * numbers + 12 + 1000
    assert 0 <= (plain - half) / messages - 2 * numbers < 50  # headers name shorter offsets
    assert 0.9 * half > eight > half / 2
    assert sparse[0] == sparse[1] > sparse[2] == sparse[3]  # a memory costs no bytes


@pytest.mark.slow
def test_a_folder_of_images_and_a_model_of_timm(monkeypatch, capsys, tmp_path, folder):
    flags = "--dataset colors --image-size 32 --partition iid --backbones vit_tiny_patch16_224"
    found = lines(monkeypatch, capsys, tmp_path, *flags.split(), "--root", str(folder))
    assert [line[0] for line in found] == list(fewer_bytes.ROWS)


def test_tables_align_and_spreads_are_sample_deviations():
    assert table(["a", "long"], [["xyz", 1]]).splitlines() == [
        "| a   | long |",
        "| --- | ---: |",
        "| xyz |    1 |",
    ]
    # The deviation of two points is their distance over the square root of two.
    assert mean_and_deviation([0.1, 0.3]) == "20.0 ± 14.1"
    assert mean_and_deviation([0.1, 0.3], digits=3) == "0.200 ± 0.141"
