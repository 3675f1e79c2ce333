"""Where each paper's mechanism can act: two settings a paper, and the row without the mechanism.

The settings were chosen before any of them ran. All rows of a setting have the same clients,
batches and initial values. The gallery's study chose the hyperparameters, with models of the same
kind. Those of FedL2G were chosen on held-out images of other settings. Each finished run is one
line of a JSON-lines file::

    python examples/studies/mechanisms.py --seeds 5
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import fedprompt as fp
from methods.federation import Predictions
from studies import records
from studies.gallery import registry, tables
from studies.gallery.tasks import Trial
from studies.mechanism_settings import SETTINGS, Row, Setting
from studies.papers import measure
from studies.tables import mean_and_deviation, table

COLUMNS = {
    "full": "all test images",
    "lowest": "lowest client",
    "highest": "highest client",
    "own": "own mix",
    "worst": "worst client",
    "rise": "rise",
}
RECORDS = Path(__file__).parents[2] / "docs" / "results" / "mechanisms.jsonl"


def main() -> None:
    args = flags().parse_args()
    torch.set_num_threads(1)
    path = args.records.with_stem(f"{args.records.stem}-quick") if args.quick else args.records
    known = recorded(path)
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
        brief = replace(
            whole.federation, rounds=2, steps=2, cohort_size=min(2, len(few)), shards=few
        )
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
    about = {"setting": name, "row": row.title, "seed": seed, "values": dict(row.values)}
    if not set(setting.columns) <= set(known.get(key(about), ())):
        figures = evaluate_run(row, setting.make(seed), losses="rise" in setting.columns)
        record = about | records.origin() | records.rounded(figures)
        records.append(path, record)
        known[key(about)] = record
    return known[key(about)]


def run_rounds(row: Row, made: Trial) -> Iterator[Predictions]:
    """Run the method of a row, and yield its predictions after each round."""
    method = registry.gallery()[row.method]
    torch.manual_seed(made.federation.seed)
    yield from method.function(made.federation, **{**method.defaults, **row.values})


def evaluate_run(row: Row, made: Trial, *, losses: bool = False) -> dict[str, float]:
    """Run all rounds of a row, and measure its last predictions on all clients.

    With `losses`, measure also the negative effect: the largest rise of the training loss of a
    client over its lowest value before, in nats, averaged over clients.
    """
    rounds, history = made.federation.rounds, []
    for done, predictions in enumerate(run_rounds(row, made), 1):
        if losses:
            history.append(training_losses(predictions, made))
        if done == rounds:
            figures = measure.columns(predictions, made)
            if losses:
                figures["rise"] = fp.metrics.negative_effect(torch.stack(history)).average
            return figures
    raise ValueError(f"`method` must yield {rounds} times; got {done} yields.")


@torch.no_grad()
def training_losses(predictions: Predictions, made: Trial) -> Tensor:
    """Compute the cross-entropy of each client on all its training images, (clients,)."""
    losses = []
    for client in made.federation.clients:
        (images, labels), model = made.federation.own(client), predictions.of(client)
        training = isinstance(model, nn.Module) and model.training
        if training:
            model.eval()
        losses.append(F.cross_entropy(model(images), labels))
        if training:
            model.train()
    return torch.stack(losses)


def recorded(path: Path) -> dict[Any, records.Record]:
    """Read the last record of each run in a file."""
    return {key(record): record for record in records.read(path)}


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a run in the file."""
    values = json.dumps(record["values"], sort_keys=True)
    return record["setting"], record["row"], record["seed"], values


def report(setting: Setting, found: Sequence[records.Record]) -> str:
    """Return a table with the paired gains of the first row over the others.

    Rows without a record are left out, and figures that a record lacks are empty.
    """
    by_row = {
        row.title: [each for each in found if each["row"] == row.title] for row in setting.rows
    }
    by_row = {title: own for title, own in by_row.items() if own}
    first = next(iter(by_row.values()), [])
    columns = [name for name in setting.columns if any(name in each for each in found)]
    body = [
        [
            title,
            *(cell(name, own) for name in columns),
            tables.difference(first, own, column=setting.measure),
        ]
        for title, own in by_row.items()
    ]
    header = [
        "row",
        *(COLUMNS[name] for name in columns),
        f"{COLUMNS[setting.measure]}, gain of {setting.rows[0].title}",
    ]
    return f"### {setting.title}\n\n{table(header, body)}\n"


def cell(name: str, own: Sequence[records.Record]) -> str:
    """Write mean and standard deviation of a column: nats of a rise, otherwise percentages."""
    values = [each[name] for each in own if name in each]
    if len(values) < len(own):
        return ""
    return mean_and_deviation(values, digits=3) if name == "rise" else mean_and_deviation(values)


if __name__ == "__main__":
    main()
