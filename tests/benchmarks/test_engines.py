"""Speed of `run_rounds` on two ranks, and with many registered clients."""

import json
import statistics

import pytest
import torch

import engine_speed
import two_processes

pytestmark = pytest.mark.benchmark


def bound(made):
    """Return the speed-up that the cohorts allow: clients over those of the busiest rank."""
    cohorts = list(made.setting.cohorts())[1:]  # the first round warms up
    busiest = sum(max(sum(c % 2 == rank for c in each) for rank in (0, 1)) for each in cohorts)
    return sum(map(len, cohorts)) / busiest


@pytest.mark.parametrize(("clients", "cohort", "goal"), [(15, 10, None), (6, 6, 1.7)])
def test_two_ranks_next_to_one_process(clients, cohort, goal, meter, tmp_path):
    sizes = {"clients": clients, "cohort": cohort, "rounds": 9 if meter.check else 2}
    sizes["steps"] = meter.size(8, brief=1)
    made, ratios = engine_speed.federation(**sizes), []
    for number in range(5 if meter.check else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sizes.json").write_text(json.dumps(sizes))
        alone, now = engine_speed.timed(made)
        two_processes.run(engine_speed.time_rank, folder)
        found = [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
        ratios.append(alone / max(seconds for seconds, _ in found))
        for name, value in now.server["values"].items():
            assert all(torch.equal(value, values[name]) for _, values in found)
    possible = bound(made)
    title = f"{cohort} of {clients} clients, two ranks"
    meter.report(f"{title}: bound by the cohorts", possible)
    meter.report(f"{title}: one process / two ranks, time", statistics.median(ratios))
    least = 0.85 if goal is None else goal / possible
    meter.report(f"{title}: share of the bound", statistics.median(ratios) / possible,
                 at_least=least)  # fmt: skip


def test_many_registered_clients(meter, tmp_path):
    """Of 100,000 clients or of 1,000, each in its own process, 1,000 take part in each round."""
    seconds, peaks = [], []
    for _ in range(3 if meter.check else 1):
        found = {}
        for registered in (1_000, 100_000):
            torch.multiprocessing.spawn(engine_speed.many_clients, (registered, tmp_path))
            found[registered] = json.loads((tmp_path / f"{registered}.json").read_text())
        (few, small), (many, large) = found[1_000], found[100_000]
        seconds.append(many / few)
        peaks.append((large - small) / 2**20)
    title = "100,000 registered clients / 1,000"
    meter.report(f"{title}, 1,000 in a round, time", statistics.median(seconds), at_most=1.2)
    meter.report(f"{title}, more memory in MiB", statistics.median(peaks), at_most=50)
