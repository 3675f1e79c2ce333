"""Studies resume after a kill at any moment.

Their results are bitwise identical to those of a run that was not killed.
"""

import json
import random
import shutil
from argparse import Namespace
from collections import Counter
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from runs import EXAMPLES, server
from same import assert_same
from studies import fedhpl, fedl2g, fedotp, sgpt
from studies.memory import _folder, _restored, rounds, variant

# A loop without an example.


def flags(checkpoint: Path | None, **given: object) -> Namespace:
    return Namespace(**{"checkpoint": checkpoint, "seed": 0, "out": Path("out"), **given})


def walk(args: Namespace, stop: int = 5, name: str = "row") -> tuple[Namespace, list[int]]:
    """Run five rounds of a loop whose memory contains a value of every kind.

    Return the memory at the end, and the rounds of this run.
    """
    torch.manual_seed(0)
    memory = Namespace(
        module=nn.ModuleList([nn.BatchNorm1d(2)]),
        draw=torch.Generator().manual_seed(1),
        ledger=fp.Ledger(),
        history=[],
    )
    memory.values, memory.teachers = (
        {"a": torch.zeros(2)},
        [fp.Weighted(torch.zeros(2), torch.zeros(2))],
    )
    module, draw, ledger, walked = memory.module, memory.draw, memory.ledger, []
    for server_round in rounds(memory, 5, name, args):
        if server_round == stop:
            return memory, walked
        # The second term uses the global random state.
        module[0](torch.randn(4, 2, generator=draw) + torch.rand(1))
        ledger.record(memory.values, direction="up", client=server_round, server_round=server_round)
        memory.values = {"a": memory.values["a"] + module[0].running_mean}
        memory.teachers[0] = fp.Weighted(
            memory.teachers[0].value - memory.values["a"], torch.ones(2)
        )
        memory.history.append(memory.values["a"].sum().item())
        walked.append(server_round)
    return memory, walked


def test_ledger_entries_are_appended_to_a_file_outside_the_checkpoint(tmp_path):
    walk(flags(tmp_path))
    walk(flags(None))  # this run has no checkpoint
    kept = tmp_path / "row" / "ledger.jsonl"
    assert len(kept.read_text().splitlines()) == 5
    assert set(fp.load_checkpoint(tmp_path / "row")["memory"]["ledger"]) == {
        "num_entries",
        "num_bytes",
        "sha256",
    }


def contents(memory: Namespace) -> dict[str, object]:
    streams = {
        "draw": memory.draw.get_state(),
        "global": torch.get_rng_state(),
        "ledger": memory.ledger.entries,
    }
    return {**vars(memory), **streams, "module": dict(memory.module.state_dict())}


@pytest.mark.parametrize("stop", range(6))
def test_a_loop_resumes_after_any_round_from_its_checkpoint(tmp_path, stop):
    whole, walked = walk(flags(None))
    whole = contents(whole)
    assert walked == [0, 1, 2, 3, 4]
    walked = walk(flags(tmp_path), stop)[1]
    assert walked == list(range(min(stop, 5)))
    resumed, walked = walk(flags(tmp_path))
    assert walked == list(range(stop, 5))  # a completed row does not run again
    assert_same(contents(resumed), whole)


def test_without_the_flag_nothing_is_written_or_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert walk(flags(None), stop=3)[1] == [0, 1, 2]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_made_with_other_flags_is_refused(tmp_path):
    walk(flags(tmp_path, rate=0.1), stop=2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for given, got in [
        ({"rate": 0.2}, r"{'rate': '0.2'}; got {'rate': '0.1'} in .*row"),
        ({}, "{'rate': None}; got {'rate': '0.1'}"),
    ]:
        with pytest.raises(
            ValueError, match=f"`--checkpoint` must hold a run with the flags of this one, {got}"
        ):
            walk(flags(tmp_path, **given))
    with pytest.raises(ValueError, match=r"one, {'new': '1'}; got {'new': None}"):
        walk(flags(tmp_path, rate=0.1, new=1))
    with pytest.raises(
        ValueError, match=r"one, {'memory': 'other'}; got {'memory': 'module, draw, .*'}"
    ):
        next(iter(rounds(Namespace(other=1), 5, "row", flags(tmp_path, rate=0.1))))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    elsewhere = flags(
        tmp_path, rate=0.1, out=Path("elsewhere")
    )  # the folder of pictures may differ
    assert walk(elsewhere)[1] == [2, 3, 4]


def test_each_row_and_each_variant_has_a_separate_folder(tmp_path):
    for args in (
        flags(tmp_path),
        variant(flags(tmp_path), seed=1),
        variant(flags(tmp_path), seed=1, layers=(2, 3)),
    ):
        for name in ("one", "two"):
            assert walk(args, stop=1, name=name)[1] == [0]
    folders = {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("state.json")}
    assert folders == {
        f"{place}{name}"
        for place in ("", "seed=1/", "seed=1_layers=_2_3_/")
        for name in ("one", "two")
    }
    assert vars(variant(flags(None), seed=1)) == vars(flags(None, seed=1))
    for rows in (fedhpl.ROWS, fedl2g.METHODS, fedotp.ROWS, sgpt.ROWS):
        assert len({_folder(name) for name in rows}) == len(rows)


def test_tensors_are_restored_to_the_device_of_the_loop():
    elsewhere = fp.Weighted(torch.zeros(2, device="meta"), torch.zeros(2, device="meta"))
    restored = _restored([elsewhere], [fp.Weighted(torch.ones(2), torch.ones(2))])
    assert [tensor.device.type for tensor in restored[0]] == ["meta", "meta"]
    assert _restored([], [torch.ones(2)])[0].device.type == "cpu"


# Examples that are killed.


@pytest.fixture(scope="module")
def examples():
    with server() as runs:
        yield runs


def outcome(folder: Path) -> dict[str, object]:
    """Return the results of a run: the memory of every row, the printed text and all files."""
    return {
        "memory": {
            path.name: fp.load_checkpoint(path) for path in sorted((folder / "memory").iterdir())
        },
        "printed": (folder / "printed").read_text(),
        "out": {path.name: path.read_bytes() for path in sorted((folder / "out").iterdir())},
    }


def remembered(folder: Path) -> int:
    """Return the number of saved rounds of all rows."""
    return sum(fp.load_checkpoint(path.parent)["rounds"] for path in folder.rglob("state.json"))


def half_saved(folder: Path) -> bool:
    """Return whether a save was interrupted, so that a file exists that no state names."""
    for row in folder.glob("memory/*"):
        named = {json.loads(path.read_text())["tensors"] for path in row.glob("state.json")}
        if {path.name for path in row.iterdir()} - named - {"state.json", "ledger.jsonl"}:
            return True
    return False


def kill(
    examples, example: str, tmp_path: Path, *flags: str, moments: int, renames: int, seed: int
) -> Counter[str]:
    """Kill an example at several moments of a run and in the middle of several saves.

    A killed run is started again and killed again. A run that ends must have the same results as a
    run without kills. The next run then starts without a checkpoint.

    Args:
        examples: Server of the examples.
        example: Name of the example.
        tmp_path: Folder of all runs.
        *flags: Flags of the example.
        moments: Number of kills at moments, spread over a whole run.
        renames: Number of kills between the two files of a save.
        seed: Seed of the moments and the saves.

    Returns:
        The numbers of kills, restarts and resumed rounds.
    """
    status, seconds = examples.run(example, tmp_path / "whole", *flags)
    assert status == 0, (tmp_path / "whole" / "complaints").read_text()
    whole = outcome(tmp_path / "whole")
    chance = random.Random(seed)
    counts = Counter()
    folders = count()
    saves = remembered(tmp_path / "whole")
    fates = [{"moment": seconds * (each + chance.random()) / moments} for each in range(moments)]
    # A save renames the file of its tensors, then the file of its state.
    fates += [{"renames": 2 * chance.randrange(1, saves) + 1} for _ in range(renames)]
    chance.shuffle(fates)
    folder, fresh = tmp_path / f"{next(folders)}", True
    while True:
        resumed = remembered(folder)
        counts["restarts that found a checkpoint"] += resumed > 0
        counts["rounds resumed"] += resumed
        status, _ = examples.run(example, folder, *flags, **(fates[-1] if fates else {}))
        if status == -9:
            counts["kills at a moment"] += "moment" in fates.pop()
            counts["kills"] += 1
            counts["kills in the middle of a save"] += half_saved(folder)
            counts["kills after the last round"] += remembered(folder) == saves
            fresh = False
            continue
        assert status == 0, (folder / "complaints").read_text()
        assert_same(outcome(folder), whole)
        counts["runs that came to their end"] += 1
        if not fates:
            return counts
        if fresh and "moment" in fates[-1]:  # the run was faster than `whole` and ended too early
            fates[-1]["moment"] *= 0.9
        folder, fresh = tmp_path / f"{next(folders)}", True


ONE_ROW = pytest.param("fedl2g", ("--methods", "FedL2G-f"), id="one row")


@pytest.mark.killed
@pytest.mark.parametrize(
    ("example", "flags"),
    [ONE_ROW, *(pytest.param(name, (), marks=pytest.mark.slow, id=name) for name in EXAMPLES)],
)
def test_a_study_that_is_killed_twice_has_the_same_results(examples, example, flags, tmp_path):
    counts = kill(examples, example, tmp_path, *flags, moments=1, renames=1, seed=0)
    assert counts["kills"] == 2
    assert counts["kills in the middle of a save"] >= 1
    assert counts["rounds resumed"] > 0


@pytest.mark.killed
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_study_that_is_killed_at_twenty_moments_has_the_same_results(
    examples, example, tmp_path, record_property
):
    counts = kill(examples, example, tmp_path, moments=20, renames=4, seed=1)
    print(example, dict(counts))
    assert counts["kills"] == 24
    assert counts["kills in the middle of a save"] >= 4
    assert counts["restarts that found a checkpoint"] >= 8
    assert counts["rounds resumed"] > counts["restarts that found a checkpoint"]


# Each example is killed after a number of saves and resumed without parts of the memory of a row.
# Without a needed part its results change. Without the idle parts they do not.

FORGETTING = [
    ("fedhpl", (), "FedHPL_+P_+H", 5, ("clients", "teachers", "history", "ledger"), ()),
    ("fedl2g", ("--methods", "LG-FedAvg", "--participation", "0.5"), "LG-FedAvg", 1,
     ("clients", "shared", "losses", "history", "ledger"), ("guides", "state")),  # no guides here
    ("fedl2g", ("--methods", "FedL2G-f"), "FedL2G-f", 2, ("clients", "guides", "history", "ledger"),
     # SGD has no momentum, no head is shared, and all clients have a new loss in every round.
     ("state", "shared", "losses")),
    # Every value is overwritten.
    ("fedotp", ("--every", "1"), "FedOTP", 7, ("clients", "history", "ledger"),
     ("values", "state")),
    # Groups are chosen again after a round.
    ("sgpt", (), "SGPT", 5, ("values", "usage", "history", "usages"), ("state", "chosen")),
    ("sgpt", (), "SGPT", 6, ("usages", "chosen", "history"),
     ("values", "state", "usage")),  # no round is left
]  # fmt: skip


@pytest.mark.killed
@pytest.mark.slow
@pytest.mark.parametrize(("example", "given", "row", "saves", "needed", "idle"), FORGETTING)
def test_forgotten_memory_changes_the_results(
    examples, tmp_path, example, given, row, saves, needed, idle
):
    assert examples.run(example, tmp_path / "whole", *given)[0] == 0
    whole = outcome(tmp_path / "whole")
    assert set(whole["memory"][row]["memory"]) == {*needed, *idle}
    assert examples.run(example, tmp_path / "killed", *given, renames=2 * saves)[0] == -9
    assert remembered(tmp_path / "killed") == saves
    for things in [idle, *([thing] for thing in needed)]:
        folder = shutil.copytree(tmp_path / "killed", tmp_path / f"without {things}")
        status, _ = examples.run(example, folder, *given, forget=[row, things])
        assert (status == 0 and same(outcome(folder), whole)) == (things is idle), (
            things,
            (folder / "complaints").read_text(),
        )


def same(one: object, other: object) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return False
    return True
