"""FedAvg of prompts and head on the sample ViT by this library, Flower's simulation and pfl.

All have the same 20 clients, 10 in a round, the same batches and optimizer. Run it in an
environment with Flower and pfl, on an idle machine::

    pip install -e ".[flower-sim]" "pfl==0.6.0"
    python tests/benchmarks/peers.py

A row runs in processes of its own, with a short and a long run. The difference is the time of a
round, and the rest is start-up. Memory is the largest sum of proportional set sizes (PSS) over all
processes of a row.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / each) for each in ("", "examples/flower_app", "tests/helpers")]

CLIENTS, COHORT = 20, 10
ROWS = {
    "fedprompt": [],
    "fedprompt, two ranks": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "Flower, simulation": [],
    "pfl": [],
}


def configuration(rounds: int, out: Path) -> dict[str, Any]:
    """Return the configuration of `examples/flower_app`."""
    sizes = {"clients": CLIENTS, "cohort": COHORT, "rounds": rounds}
    return {"method": "fedvpt_d", **sizes, "out": str(out)}


def fedprompt(rounds: int, out: Path) -> None:
    """Run this library in one process, or on the ranks of torchrun."""
    import torch.distributed as dist

    import fedprompt as fp
    import task

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    method, federation, *_ = task.load(configuration(rounds, out))
    group = dist.group.WORLD if dist.is_initialized() else None
    *_, now = fp.run_rounds(method, federation, group=group)
    if group is None or dist.get_rank() == 0:
        fp.save_checkpoint(now._replace(clients={}), out)


def flower(rounds: int, out: Path) -> None:
    """Run Flower's simulation of `examples/flower_app`."""
    from flower_processes import running_flower

    with (
        TemporaryDirectory() as logs,
        running_flower(Path(logs), nodes=CLIENTS, simulation=True) as run,
    ):
        values = configuration(rounds, out).items()
        written = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values)
        print(run(ROOT / "examples" / "flower_app", written))


def pfl(rounds: int, out: Path) -> None:
    """Run pfl's FederatedAveraging on its SimulatedBackend."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    import fedprompt as fp
    import task
    from fedprompt.methods.models import PromptedModel

    _, federation, *_ = task.load(configuration(rounds, out))
    setting = federation.setting

    class Model(PromptedModel):
        def loss(self, images: Any, labels: Any, **options: Any) -> Any:
            return torch.nn.functional.cross_entropy(self(images), labels)

        def metrics(self, images: Any, labels: Any, **options: Any) -> Any:
            return {"loss": Weighted(self.loss(images, labels).item(), 1)}

    class Own(Dataset):
        def iter(self, batch_size: int | None) -> Iterator[Any]:
            return iter(self.raw_data[0])

        def __len__(self) -> int:
            return int(self.metadata["size"])

    asked = iter(range(10**9))

    def own(client: int) -> Own:
        data = federation.data(client, next(asked) // COHORT)
        return Own((list(data.batches()),), metadata={"size": data.num_examples})

    ids = chain.from_iterable(chain(setting.cohorts(), [[0] * 10**4]))
    users = FederatedDataset(own, lambda: next(ids))
    model = setting.new_model()
    model.__class__ = Model
    server = torch.optim.SGD(model.parameters(), 1.0)
    trained = PyTorchModel(model, torch.optim.AdamW, server)
    backend = SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()])
    sizes = {"central_num_iterations": rounds, "evaluation_frequency": 10**9}
    params = NNAlgorithmParams(**sizes, train_cohort_size=COHORT, val_cohort_size=0)
    steps = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=0.01, local_batch_size=setting.batch_size
    )
    FederatedAveraging().run(params, backend, trained, steps, send_metrics_to_platform=False)
    fp.save_checkpoint(fp.Round(rounds, {"values": fp.snapshot(model)}, {}), out)


def measured(row: str, rounds: int, out: Path) -> tuple[float, int]:
    """Run a row in new processes, and return the seconds and the peak memory in bytes."""
    flags = [*ROWS[row], __file__, "--row", row, "--rounds", str(rounds), "--out", str(out)]
    began = time.perf_counter()
    with (out.parent / "log.txt").open("w") as log:
        process = subprocess.Popen([sys.executable, *flags], stdout=log, stderr=log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, memory(process.pid))
            time.sleep(0.2)
    seconds = time.perf_counter() - began
    if process.returncode or not out.exists():
        sys.exit(f"{row} failed:\n{(out.parent / 'log.txt').read_text()[-3000:]}")
    return seconds, peak


def memory(pid: int) -> int:
    """Sum the proportional set sizes of a process and its descendants."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout
    parents = {int(own): int(parent) for own, parent in map(str.split, table.splitlines())}
    family = [pid]
    for ancestor in family:  # the list grows during the loop
        family += [own for own, parent in parents.items() if parent == ancestor]
    total = 0
    for each in family:
        path = Path(f"/proc/{each}/smaps_rollup")
        try:
            lines = path.read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has ended
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", choices=list(ROWS), help="run this row in this process")
    parser.add_argument("--rows", default=";".join(ROWS), help="titles, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.row is not None:
        kinds = {"Flower, simulation": flower, "pfl": pfl}
        kinds.get(args.row, fedprompt)(args.rounds, args.out)
        return
    import torch

    import fedprompt as fp

    short, found, values = 2, {}, {}
    for number in range(args.repeats):
        for row in args.rows.split(";"):
            with TemporaryDirectory() as folder:
                first, _ = measured(row, short, Path(folder) / "short")
                whole, peak = measured(row, args.rounds, Path(folder) / "long")
                values[row] = fp.Round(*fp.load_checkpoint(Path(folder) / "long")).server["values"]
            each = (whole - first) / (args.rounds - short)
            found.setdefault(row, []).append((60 / each, first - short * each, peak / 2**20))
            print(f"{number}, {row}: {found[row][-1]}", file=sys.stderr)
    print(
        f"{torch.get_num_threads()} threads, torch {torch.__version__}; medians of {args.repeats}"
    )
    print("| | rounds a minute | start-up, s | memory, MiB | largest difference of a value |")
    print("|---|---:|---:|---:|---:|")
    reference = next(iter(values.values()))
    for row, runs in found.items():
        rate, start, peak = (median(column) for column in zip(*runs, strict=True))
        pairs = [(value, values[row][name]) for name, value in reference.items()]
        apart = max((one - other).abs().max().item() for one, other in pairs)
        print(f"| {row} | {rate:.1f} | {start:.1f} | {peak:.0f} | {apart:.1e} |")


if __name__ == "__main__":
    main()
