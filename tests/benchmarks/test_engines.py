"""Speed of `run_rounds` on two ranks, and with many registered clients."""

import json
import statistics
from collections import Counter

import pytest
import torch

import engine_speed
import fedprompt as fp
import timed
import two_processes
from fedprompt.wire.gather import ranks_of

pytestmark = pytest.mark.benchmark


def bound(cohorts, world, share):
    """Return the speed-up that the cohorts allow: clients over those of the busiest rank."""
    ranks = [Counter(ranks_of(cohort, world, share=share).values()) for cohort in cohorts]
    return sum(map(len, cohorts)) / sum(max(clients.values()) for clients in ranks)


@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize("size", [10, 30, 100, 300, 1000])
def test_bounds_of_many_ranks(size, world, meter):
    draw = torch.Generator().manual_seed(0)
    registered = range(10 * size)
    cohorts = [fp.sample_clients(registered, size=size, generator=draw) for _ in range(100)]
    title = f"{size:,} of {10 * size:,} clients, {world} ranks: bound"
    meter.report(f"{title} at home", bound(cohorts, world, share=False))
    shared = bound(cohorts, world, share=True)
    meter.report(f"{title} if they share", shared)
    assert shared == size / -(-size // world)


@pytest.mark.parametrize(
    ("clients", "cohort", "share", "goal"),
    [(15, 10, False, None), (15, 10, True, None), (6, 6, False, 1.7)],
)
def test_two_ranks_next_to_one_process(clients, cohort, share, goal, meter, tmp_path):
    sizes = {"clients": clients, "cohort": cohort, "rounds": 9 if meter.check else 2}
    sizes["steps"] = meter.size(8, brief=1)
    made, ratios = engine_speed.federation(**sizes), []
    for number in range(5 if meter.check else 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "sizes.json").write_text(json.dumps(sizes | {"share": share}))
        alone, now = engine_speed.timed(made)
        two_processes.run(engine_speed.time_rank, folder)
        found = [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
        ratios.append(alone / max(seconds for seconds, _ in found))
        for name, value in now.server["values"].items():
            assert all(torch.equal(value, values[name]) for _, values in found)
    possible = bound(list(made[0].cohorts())[1:], 2, share)  # the first round warms up
    title = f"{cohort} of {clients} clients, two ranks{' that share' * share}"
    meter.report(f"{title}: bound by the cohorts", possible)
    meter.report(f"{title}: one process / two ranks, time", statistics.median(ratios))
    least = 0.85 if goal is None else goal / possible
    meter.report(f"{title}: share of the bound", statistics.median(ratios) / possible,
                 at_least=least)  # fmt: skip


def test_a_round_of_many_small_entries(meter):
    """Ten clients send 40 entries of 768 numbers; the plain loop sums in float64, too."""
    names = [f"block.{number}" for number in range(meter.size(40))]
    first = {name: torch.zeros(768) for name in names}

    def train(data, answer, state):
        one = torch.tensor(1.0)
        return {name: fp.Weighted(value + data, one) for name, value in answer.items()}, state

    def plain():
        values = first
        for _ in range(3):
            payloads = [train(client, values, {})[0] for client in range(10)]
            total = sum(payload[names[0]].weight.double() for payload in payloads)
            values = {
                name: (sum(each[name].value.double() * each[name].weight.double()
                           for each in payloads) / total).float()
                for name in names
            }  # fmt: skip
        return values

    def ours():
        method = fp.Method(train, fp.averaging_server(first), lambda *all: None)
        return [*fp.run_rounds(method, lambda client, _: client, [range(10)] * 3)][-1]

    assert all(map(torch.equal, plain().values(), ours().server["values"].values()))
    seconds = meter.seconds(plain=plain, ours=ours)
    meter.report("rounds of small entries / plain loop, time",
                 (seconds["ours"] / seconds["plain"]).median().item(), at_most=2.0)  # fmt: skip


def test_a_round_with_a_whole_vit_as_the_message(meter):
    """A client sends all parameters of a ViT-B; the plain loop has the same mean and server rule.

    The engine copies the answer, the server's state and its next state.
    """
    name = "vit_base" if meter.check else "vit_tiny"
    with torch.device("meta"):
        shapes = {name: each.shape for name, each in timed.vit(name).named_parameters()}
    first = {name: torch.zeros(shape) for name, shape in shapes.items()}
    rule, size = fp.aggregation.overwrite(), sum(value.nbytes for value in first.values())

    def train(data, answer, state):
        one = torch.tensor(1.0)
        return {name: fp.Weighted(value + 1, one) for name, value in answer.items()}, state

    method = fp.Method(train, fp.averaging_server(first), lambda *all: None)

    def plain():
        mean = fp.weighted_mean(train(client, first, {})[0] for client in range(1))
        return rule.step(first, mean, rule.init(first))[0]

    def ours():
        return next(fp.run_rounds(method, lambda client, _: client, [[0]]))

    def clones():  # in new memory, as those of the engine
        return [{name: value.clone() for name, value in first.items()} for _ in range(3)]

    assert all(map(torch.equal, plain().values(), ours().server["values"].values()))
    seconds = meter.seconds(rounds=3, plain=plain, ours=ours, clones=clones)
    peaks, title = meter.peak_bytes(plain=plain, ours=ours), "a ViT as the message: ours - plain"
    more = (seconds["ours"] - seconds["plain"]) / seconds["clones"]
    meter.report(f"{title}, time / three clones", more, at_most=1.0)
    more = (peaks["ours"] - peaks["plain"]) / size
    meter.report(f"{title}, memory / the message", more, at_most=2.9)  # .9 before copies


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
