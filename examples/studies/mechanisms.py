"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. All rows of a setting have the same clients,
batches and initial values. The gallery's study chose the hyperparameters, with models of the same
kind. Those of FedL2G are from ``studies/fedl2g.py``. Each finished run is one line of a JSON-lines
file::

    python examples/studies/mechanisms.py --seeds 5
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from embedded import clip, data, vit, zoo
from methods import federation
from methods.federation import Predictions
from studies import mechanism_settings, records
from studies.gallery import evaluate, jobs, registry, tables
from studies.gallery.tasks import Trial
from studies.mechanism_settings import SETTINGS, Row, Setting
from studies.papers import federations, measure
from studies.report import mean_and_deviation, table

COLUMNS = {"full": "all test images", "own": "own mix", "worst": "worst client"}
RECORDS = Path(__file__).parents[2] / "docs" / "results" / "mechanisms.jsonl"


def main() -> None:
    args = flags().parse_args()
    torch.set_num_threads(1)
    path = args.records.with_stem(f"{args.records.stem}-quick") if args.quick else args.records
    known = {key(record): record for record in records.read(path)}
    names = list(SETTINGS) if args.only is None else args.only.split(",")
    for name in names:
        setting = shortened(SETTINGS[name]) if args.quick else SETTINGS[name]
        runs = [(row, seed) for seed in range(args.seeds) for row in setting.rows]
        found = [
            measured(name, setting, row, seed, known, path)
            for row, seed in tqdm(runs, desc=name, unit="run")
        ]
        print(report(setting, found), flush=True)


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"names among {', '.join(SETTINGS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    parser.add_argument("--records", type=Path, default=RECORDS, help="JSON-lines file")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    return parser


def shortened(setting: Setting) -> Setting:
    """Return a setting of two rounds of two clients, with 20 images each."""

    def make(seed: int) -> Trial:
        whole = setting.make(seed)
        few = {client: own[:20] for client, own in whole.federation.shards.items()}
        brief = replace(whole.federation, rounds=2, steps=2, cohort_size=2, shards=few)
        return whole._replace(federation=brief)

    return replace(setting, make=make)


def measured(
    name: str,
    setting: Setting,
    row: Row,
    seed: int,
    known: dict[Any, records.Record],
    path: Path,
) -> records.Record:
    """Run a row, unless it has a record."""
    of = {"setting": name, "row": row.title, "seed": seed}
    about = of | {"digest": digest(row)}
    if key(about) not in known:
        record = about | records.rounded(evaluate_run(row, setting.make(seed)))
        records.append(path, record)
        known[key(about)] = record
    return known[key(about)]


def run_rounds(row: Row, made: Trial) -> Iterator[Predictions]:
    """Run the method of a row, and yield its predictions after each round."""
    method = registry.gallery()[row.method]
    torch.manual_seed(made.federation.seed)
    yield from method.function(made.federation, **{**method.defaults, **row.values})


def evaluate_run(row: Row, made: Trial) -> dict[str, float]:
    """Run all rounds of a row, and measure its last predictions on all clients."""
    rounds = made.federation.rounds
    for done, predictions in enumerate(run_rounds(row, made), 1):
        if done == rounds:
            return measure.columns(predictions, made)
    raise ValueError(f"`method` must yield {rounds} times; got {done} yields.")


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a run in the file."""
    return tuple(record[name] for name in ("setting", "row", "seed", "digest"))


def digest(row: Row) -> str:
    """Hash all that decides a result: code, hyperparameters and library version."""
    modules = (mechanism_settings, measure, federations, evaluate, federation, clip, data, vit, zoo)
    files = [Path(module.__file__ or "") for module in modules]
    path = registry.gallery()[row.method].path
    told = [sorted(row.values.items()), jobs.version()]
    return registry.digest(path, *files, settings=told)


def report(setting: Setting, found: Sequence[records.Record]) -> str:
    """Return a table with the paired gains of the first row over the others."""
    by_row = {
        row.title: [each for each in found if each["row"] == row.title] for row in setting.rows
    }
    first = next(iter(by_row.values()))
    body = [
        [
            title,
            *(mean_and_deviation([each[name] for each in own]) for name in COLUMNS),
            tables.difference(first, own, column=setting.measure),
        ]
        for title, own in by_row.items()
    ]
    header = [
        "row",
        *COLUMNS.values(),
        f"{COLUMNS[setting.measure]}, gain of {setting.rows[0].title}",
    ]
    return f"### {setting.title}\n\n{table(header, body)}\n"


if __name__ == "__main__":
    main()
