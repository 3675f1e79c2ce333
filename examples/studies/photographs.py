"""Methods of the gallery on photographs of solar cells and on MNIST, with pretrained networks.

Clients train prompts in the last three blocks of a frozen DINOv2 ViT-S/14, whose other blocks run
once for all images. In two settings, clients have networks of three kinds. Every method has the
same rounds, clients, batches and initial values, and the same number of tuning trials::

    pip install -e ".[photographs]"
    python examples/studies/photographs.py --pretrained --seeds 5

Each finished run is one line of a JSON-lines file, so a killed study continues.
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `photographs` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from studies.compare import finished
from studies.gallery import jobs, registry
from studies.gallery.registry import Method
from studies.photo import tables
from studies.photo.runs import Run
from studies.photo.settings import SETTINGS, TITLES, Sources
from studies.photo.trials import make_trial

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "photographs"
RATES = 0.01, 0.003, 0.03, 0.1  # of the tuning trials


def main(arguments: Sequence[str] | None = None) -> None:
    args = flags().parse_args(arguments)
    sources = sources_of(args)
    known = registry.gallery()
    if args.estimate:
        print(estimate(known, args, sources))
        return
    for task in args.tasks:
        marks = f"{'-random' if args.random else ''}{'-quick' if args.quick else ''}"
        path = args.records / f"{task}{marks}.jsonl"
        for partition in args.partitions:
            methods = chosen(known, partition, args.only)
            if methods:
                study(methods, args, task, partition, sources, path)
    print(f"\nTables and figures: {args.out}/")


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=_among(TITLES), default=list(TITLES))
    parser.add_argument("--partitions", type=_among(SETTINGS), default=list(SETTINGS))
    rows = dict.fromkeys(name for setting in SETTINGS.values() for name in setting.methods)
    parser.add_argument("--only", type=_among(rows), default=list(rows), help="names of rows")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--weights", type=Path, help="file of DINOv2 ViT-S/14, names of timm")
    parser.add_argument(
        "--efficientnet-weights", type=Path, help="file of EfficientNet-Lite0, names of timm"
    )
    parser.add_argument("--pretrained", action="store_true", help="timm downloads the networks")
    parser.add_argument("--random", action="store_true", help="tiny random networks, for tests")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the tables")
    parser.add_argument("--estimate", action="store_true", help="print the hours and stop")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps, no tuning")
    return parser


def _among(names: Mapping[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - names.keys():
            raise argparse.ArgumentTypeError(f"must be among {list(names)}; got {unknown}")
        return chosen

    return parse


def sources_of(args: argparse.Namespace) -> Sources:
    """Return where the networks come from.

    Raises:
        SystemExit: If there are no weights for a network of the chosen settings.
    """
    networks = {name for each in args.partitions for name in SETTINGS[each].networks}
    given = args.pretrained or args.random
    if not given and args.weights is None:
        sys.exit("DINOv2 needs --weights FILE, or --pretrained, with which timm downloads it.")
    if not given and args.efficientnet_weights is None and "convolutional" in networks:
        sys.exit("EfficientNet-Lite0 needs --efficientnet-weights FILE, or --pretrained.")
    return Sources(args.weights, args.efficientnet_weights, args.pretrained, args.random)


def chosen(known: Mapping[str, Method], partition: str, only: Sequence[str]) -> list[Method]:
    """Return the rows of a setting that are wanted."""
    return [known[name] for name in SETTINGS[partition].methods if name in only]


def study(
    methods: Sequence[Method],
    args: argparse.Namespace,
    task: str,
    partition: str,
    sources: Sources,
    path: Path,
) -> None:
    """Tune and run the rows of one setting, print its table and write its figures."""
    settings = SETTINGS[partition].budget(args.quick)
    seeds = range(1 if args.quick else args.seeds)
    values = {method.name: method.defaults for method in methods}
    if not args.quick:
        shorter = replace(settings, rounds=-(-settings.rounds // 2))
        trials = [
            Run(*_of(method, task, partition), jobs.TUNING_SEED, trial, own, shorter, sources)
            for method in methods
            for trial, own in enumerate(trials_of(method, task, partition))
        ]
        values = best(finished(trials, path, args.workers, f"{task} {partition}, tuning"))
    runs = [
        Run(*_of(method, task, partition), seed, None, values[method.name], settings, sources)
        for seed in seeds
        for method in methods
    ]
    records = finished(runs, path, args.workers, f"{task} {partition}")
    by_name = {method.name: method for method in methods}
    print("\n" + tables.text(records, by_name, task, partition))
    tables.save_all(records, by_name, task, partition, args.out)
    shown = [each for each in records if each["method"] == tables.SHOWN and "shown" in each]
    if task == "solar" and shown:
        tables.show_cells(shown[0], settings, args.out / f"cells-{partition}.png")


def _of(method: Method, task: str, partition: str) -> tuple[str, str, str, str]:
    return method.name, str(method.path), task, partition


def trials_of(method: Method, task: str, partition: str) -> list[dict[str, Any]]:
    """Return the hyperparameters of the tuning trials, with the same learning rates in all rows.

    Other hyperparameters have their default values in the first trial, and are drawn in the others.
    """
    drawn = jobs.trials(method, f"{task} {partition}")
    return [values | {"learning_rate": rate} for values, rate in zip(drawn, RATES, strict=False)]


def best(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each method with the best accuracy on own mixes.

    Of equal trials, the first counts.
    """
    found: dict[str, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: -record["own"]):
        found.setdefault(record["method"], record["values"])
    return found


def estimate(known: Mapping[str, Method], args: argparse.Namespace, sources: Sources) -> str:
    """Run one round of each row on the first task, and say how long the study will take."""
    task, seconds = args.tasks[0], 0.0
    began = time.process_time()
    for partition in args.partitions:  # reads images, and runs the first blocks
        settings = SETTINGS[partition].budget(args.quick)
        make_trial(task, partition, seed=0, settings=settings, sources=sources)
    once = time.process_time() - began
    rows = [(each, name) for each in args.partitions for name in chosen(known, each, args.only)]
    for partition, method in tqdm(rows, desc="one round each", unit="row"):
        settings = SETTINGS[partition].budget(args.quick)
        one = replace(settings, rounds=1)
        own = Run(*_of(method, task, partition), 1, None, method.defaults, one, sources)
        began = time.process_time()
        training = jobs.run(own)["seconds"]
        around = time.process_time() - began - training
        trials = len(trials_of(method, task, partition))
        rounds = trials * -(-settings.rounds // 2) + args.seeds * settings.rounds
        seconds += rounds * training + (trials + args.seeds) * around
    count = len(args.tasks)
    hours = (seconds * count / args.workers + once * count) / 3600
    return f"{len(rows) * count} rows: about {hours:.2f} hours with {args.workers} processes"


if __name__ == "__main__":
    main()
