"""All methods of the gallery on one task, under one budget.

Every method has the same rounds, clients, batches and initial values, and the same number of
tuning trials. Each finished run is one line of a JSON-lines file, so a killed study continues::

    python examples/studies/compare.py --task digits --methods all --seeds 5

A method of your own takes part with ``--methods mine.py:my_method,fedvpt``.
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from studies.gallery import jobs, registry, tables
from studies.gallery.jobs import Job
from studies.gallery.registry import Method
from studies.gallery.tasks import PARTITIONS, QUICK, TASKS, Settings

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "compare"


def main() -> None:
    args = flags().parse_args()
    settings = QUICK if args.quick else Settings()
    try:
        methods = chosen(args.methods, TASKS[args.task].family)
    except registry.MethodsError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        sys.exit(2)
    if args.estimate:
        print(estimate(methods, args, settings))
        return
    path = args.records / f"{args.task}{'-quick' if args.quick else ''}.jsonl"
    seeds = range(1 if args.quick else args.seeds)
    values = {method.name: method.defaults for method in methods}
    if not (args.quick or args.defaults):
        shorter = replace(settings, rounds=-(-settings.rounds // 2))
        values = tuned(methods, args, shorter, path)
    runs = [
        Job(method.name, str(method.path), args.task, partition, seed, None, own, settings)
        for seed in seeds
        for partition in args.partitions
        for method in methods
        for own in [values[method.name]]
    ]
    records = finished(runs, path, args.workers, "runs")
    by_name = {method.name: method for method in methods}
    print("\n".join(tables.report(records, by_name, args.task)))
    tables.save_all(records, by_name, args.task, args.out)
    print(f"\nTables and figures: {args.out}/")


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument(
        "--methods", default="all", help="names, or FILE:NAME for your own, separated by commas"
    )
    parser.add_argument("--partitions", type=_partitions, default=list(PARTITIONS))
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the tables")
    parser.add_argument("--defaults", action="store_true", help="default values, no tuning")
    parser.add_argument("--estimate", action="store_true", help="print the hours and stop")
    parser.add_argument("--quick", action="store_true", help="two rounds of two steps, no tuning")
    return parser


def _partitions(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - PARTITIONS.keys():
        raise argparse.ArgumentTypeError(f"must be among {list(PARTITIONS)}; got {unknown}")
    return names


def chosen(names: str, family: str) -> list[Method]:
    """Return the named methods of a family, or all.

    Raises:
        MethodsError: If a name is unknown or given twice, or a method is of another family.
    """
    known = registry.gallery()
    if names == "all":
        return [method for method in known.values() if family in method.families]
    found = []
    for name in names.split(","):
        path, _, function = name.rpartition(":")
        if not function or function.endswith(".py"):
            rule = "have the form FILE:NAME for a file"
            raise registry.MethodsError(f"`--methods` must {rule}; got {name!r}.")
        methods = registry.in_file(Path(path)) if path else known
        if function not in methods:
            rule = f"name methods, {sorted(methods)}"
            raise registry.MethodsError(f"`--methods` must {rule}; got {function!r}.")
        if family not in methods[function].families:
            rule = f"name methods of the family {family!r}"
            raise registry.MethodsError(f"`--methods` must {rule}; got {function!r}.")
        if function in {method.name for method in found}:
            rule = "name each method once"
            raise registry.MethodsError(f"`--methods` must {rule}; got {function!r} twice.")
        found.append(methods[function])
    return found


def tuned(
    methods: Sequence[Method], args: argparse.Namespace, settings: Settings, path: Path
) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each method with the best accuracy on own mixes.

    Trials train on three quarters of the training images and test on the others.
    """
    runs = [
        Job(method.name, str(method.path), args.task, *where, trial, values, settings)
        for method in methods
        for where in [(jobs.TUNED_ON, jobs.TUNING_SEED)]
        for trial, values in enumerate(jobs.trials(method, args.task))
    ]
    records = finished(runs, path, args.workers, "tuning")
    best = {}
    for method in methods:
        own = [record for record in records if record["method"] == method.name]
        best[method.name] = max(own, key=lambda record: record["own"])["values"]
    return best


def finished(runs: Sequence[Job], path: Path, workers: int, name: str) -> list[dict[str, Any]]:
    """Run jobs behind two progress bars, over the rows and over all their rounds."""
    known = jobs.load(path)
    if old := sum(job.key() in known for job in runs):
        cure = "remove their lines to run them again"
        print(f"{name}: {old} of {len(runs)} rows are in {path}; {cure}", file=sys.stderr)
    rounds = sum(job.settings.rounds for job in runs)
    with (
        tqdm(total=len(runs), desc=name, unit="row") as row_bar,
        tqdm(total=rounds, unit="round") as round_bar,
    ):
        return jobs.run_all(
            runs,
            path,
            workers=workers,
            finished_round=round_bar.update,
            finished_job=row_bar.update,
        )


def estimate(methods: Sequence[Method], args: argparse.Namespace, settings: Settings) -> str:
    """Run one round of each method, and say how long the study will take."""
    seconds = 0.0
    for method in tqdm(methods, desc="one round each"):
        one = replace(settings, rounds=1)
        job = Job(
            method.name, str(method.path), args.task, jobs.TUNED_ON, 0, None, method.defaults, one
        )
        began = time.process_time()
        training = jobs.run(job)["seconds"]
        around = time.process_time() - began - training
        trials, runs = len(jobs.trials(method, args.task)), args.seeds * len(args.partitions)
        rounds = trials * -(-settings.rounds // 2) + runs * settings.rounds
        seconds += rounds * training + (trials + runs) * around
    hours = seconds / 3600 / args.workers
    return f"{len(methods)} methods: about {hours:.1f} hours with {args.workers} processes"


if __name__ == "__main__":
    main()
