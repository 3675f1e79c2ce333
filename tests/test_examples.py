"""The plain loops learn, are reproducible, and have at most 100 lines."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOPS = ("fedavg", "fedhpl", "fedl2g", "fedotp", "fewer_bytes", "private", "sgpt")
NOT_LOOPS = ("backdoor", "compare", "digits", "leakage", "photographs", "study", "zoo")
FLAGS = {"private": ("--seed", "0")}  # without a seed, the noise is not reproducible
# The other loops compare two runs.
NUM_RUNS = {"fedavg": 1, "sgpt": 1, "fewer_bytes": 3, "fedotp": 3}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    def run(name: str, *flags: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [f"{name}.py", "--quick", *FLAGS.get(name, ()), *flags])
        importlib.import_module(name).main()
        return capsys.readouterr().out.splitlines()

    return run


def accuracies(lines: list[str]) -> list[float]:
    """Return the accuracy in % after each round."""
    found = [re.fullmatch(r"(.*, )?round \d+: (\d+\.\d) %", line) for line in lines]
    assert all(found), lines
    return [float(match[2]) for match in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_quick_run_learns_and_its_last_line_has_the_final_accuracy(name, run, tmp_path):
    *rounds, last = run(name)
    values = accuracies(rounds)
    assert len(values) == 2 * NUM_RUNS.get(name, 2)
    assert min(values[1::2]) > 15  # guessing one of ten classes gives 10
    assert f"{values[-1]:.1f} %" in last
    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == (["out/fedhpl.png"] if name == "fedhpl" else [])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_two_runs_print_the_same(name, run):
    assert run(name) == run(name)


@pytest.mark.slow
def test_fedavg_goes_on_from_its_file(run):
    *_, before, _ = run("fedavg", "--save", "prompts.safetensors")
    *rounds, _ = run("fedavg", "--start", "prompts.safetensors")
    assert accuracies(rounds)[0] > accuracies([before])[0]


@pytest.mark.slow
def test_a_backdoor_succeeds_against_the_mean_and_less_against_krum(run):
    _, _, *lines = run("backdoor", "--seeds", "1")
    rows = {tuple(line.split(" | ")[:2]): re.findall(r"(\d+) \(", line) for line in lines}
    assert len(rows) == 4 * 5
    boosted = {server: rows["| 32/255, change times 5", server] for server in ("mean", "Krum")}
    assert int(boosted["mean"][1]) > 2 * int(boosted["mean"][2]) > 2 * int(boosted["Krum"][1])


def test_clients_of_fedhpl_have_thirty_images_and_no_image_twice():
    fedhpl = importlib.import_module("fedhpl")
    labels = torch.arange(400) % 10
    shards = fedhpl.few_images(labels, generator=np.random.default_rng(0))
    assert [len(shard) for shard in shards] == [30] * len(fedhpl.SIZES)
    assert len(np.unique(np.concatenate(shards))) == 30 * len(shards)


def test_every_loop_is_in_the_list_and_at_most_a_hundred_lines_long():
    loops = {
        path.stem: path.read_text() for path in EXAMPLES.glob("*.py") if path.stem not in NOT_LOOPS
    }
    assert sorted(loops) == sorted(LOOPS)
    for name, text in loops.items():
        assert text.count("\n") <= 100, name
        assert max(map(len, text.splitlines())) <= 100, name


@pytest.mark.slow
def test_tables_of_leakage_are_those_of_the_records(tmp_path):
    importlib.import_module("leakage").write_tables(tmp_path)
    tables = EXAMPLES.parent / "docs" / "results" / "tables"
    written = sorted(tmp_path.iterdir())
    assert len(written) == 4
    for path in written:
        assert path.read_text() == (tables / path.name).read_text(), path.name
