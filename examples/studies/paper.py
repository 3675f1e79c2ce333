"""The settings of the four papers: one command for each column of their tables.

``--list`` names all settings. The run prints our figures next to the paper's, with the
difference. Each finished row is one line of a JSON-lines file, so a killed run continues::

    python examples/studies/paper.py --list
    python examples/studies/paper.py --setting fedotp-1-dtd --root DATA --estimate
    python examples/studies/paper.py --setting fedotp-1-dtd --root DATA --device cuda
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from studies import (
    records,
    tasks,
)
from studies.papers import (
    backbones,
    cost,
    fedhpl,
    fedl2g,
    fedotp,
    run,
    sgpt,
    shrinking,
)
from studies.papers.estimate import estimate as measured
from studies.papers.run import Machine
from studies.papers.setting import Row, Setting
from studies.tables import mean_and_deviation, table

SETTINGS = {
    setting.name: setting for paper in (fedhpl, sgpt, fedl2g, fedotp) for setting in paper.SETTINGS
}


def main() -> None:
    args = flags().parse_args()
    if args.list or args.table:
        print(listed() if args.list else reproduction())
        return
    if args.setting not in SETTINGS:
        raise SystemExit(f"`--setting` must be one of `--list`; got {args.setting!r}.")
    setting = SETTINGS[args.setting]
    task = tasks.load(setting.task, args.root)
    setting, task = shrinking.shrunk(setting, task, args.shrink)
    machine = Machine(backbones=backbones.PRETRAINED, device=torch.device(args.device))
    if args.estimate:
        print(estimate(setting, task, machine, args.seeds))
        return
    found = finished(setting, task, machine, seeds=range(args.seeds), path=args.records)
    print(report(setting, found))


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name all settings and stop")
    parser.add_argument("--table", action="store_true", help="print hours and figures of all")
    parser.add_argument("--setting", help="name of a setting")
    parser.add_argument("--root", type=Path, default=Path("."), help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0 on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--estimate", action="store_true", help="print steps, images and hours, and stop"
    )
    parser.add_argument(
        "--shrink", type=_share, default=1.0, help="share of rounds and images, such as 0.01"
    )
    parser.add_argument("--records", type=Path, default=Path("out/paper.jsonl"))
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1; got {text}")
    return value


def listed() -> str:
    """Return a table of all settings."""
    body = [
        [
            setting.name,
            setting.source,
            setting.task,
            f"{setting.num_clients} ({setting.cohort_size})",
            f"{setting.rounds}",
            f"{sum(row.method is not None for row in setting.rows)} of {len(setting.rows)}",
        ]
        for setting in SETTINGS.values()
    ]
    return table(["setting", "source", "data", "clients (in a round)", "rounds", "rows"], body)


def reproduction() -> str:
    """Return a table of all settings with hours by arithmetic, and the paper's figures and ours."""
    body = []
    for setting in SETTINGS.values():
        rows = [row for row in setting.rows if row.method is not None]
        own = max(enumerate(rows), key=lambda each: (_is_own(each[1], setting), each[0]))[1]
        column = next((name for name in ("full", "own") if name in own.figures), None)
        column = column or next(iter(own.figures))
        spent = [cost.hours(setting, row) for row in rows]
        hours = "not known" if None in spent else _short(sum(spent))
        name = f"`{setting.name}`"
        body.append([name, setting.task, hours, own.title, column, own.figures[column], "not run"])
    header = ["setting", "data", "hours, all rows", "row", "column", "the paper, %", "ours"]
    return table(header, body)


def _is_own(row: Row, setting: Setting) -> bool:
    """Return whether a row is the method of the setting's paper."""
    return row.title.lower().startswith(setting.name.split("-")[0])


def _short(hours: float) -> str:
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"


def runnable(setting: Setting) -> list[tuple[Row, Setting]]:
    """Return the rows that the gallery has, each with the setting it changes."""
    return [
        (row, replace(setting, **row.changes)) for row in setting.rows if row.method is not None
    ]


def trials(
    setting: Setting, task: tasks.Task, machine: Machine, seed: int, rows: Sequence[Row]
) -> Iterator[tuple[Row, Any]]:
    """Yield rows with their trials. Consecutive rows with equal settings share one."""
    last, trial = None, None
    for row, own in runnable(setting):
        if row not in rows:
            continue
        inputs = run.inputs_of(row)
        own = replace(own, rows=())
        if (own, inputs) != last:
            last, trial = (own, inputs), None
            trial = run.make_trial(own, task, machine, seed=seed, inputs=inputs)
        yield row, trial


def finished(
    setting: Setting, task: tasks.Task, machine: Machine, *, seeds: Sequence[int], path: Path
) -> list[records.Record]:
    """Run the rows that have no record yet, and return the records of all."""
    known = {key(each): each for each in records.read(path)}
    rows, found = [row for row, _ in runnable(setting)], []
    changed = {row.title: own for row, own in runnable(setting)}
    total = sum(own.rounds for own in changed.values()) * len(seeds)
    with (
        tqdm(total=len(rows) * len(seeds), desc=setting.name, unit="row") as row_bar,
        tqdm(total=total, unit="round") as round_bar,
    ):
        for seed in seeds:
            named = {row.title: about(row, changed[row.title], task, seed) for row in rows}
            missing = [row for row in rows if key(named[row.title]) not in known]
            row_bar.update(len(rows) - len(missing))
            round_bar.update(sum(changed[row.title].rounds for row in rows if row not in missing))
            for row, trial in trials(setting, task, machine, seed, missing):
                last = changed[row.title].last_rounds
                how = {"last_rounds": last, "finished_round": round_bar.update}
                figures = run.run_row(row, trial, task, **how)
                record = named[row.title] | records.origin() | records.rounded(figures)
                records.append(path, record)
                known[key(record)] = record
                row_bar.update()
                del trial  # its images and models go before the next trial is made
            found += [known[key(each)] for each in named.values()]
    return found


def about(row: Row, setting: Setting, task: tasks.Task, seed: int) -> records.Record:
    """Return what tells a run from the others: `--shrink` changes rounds and images."""
    return {
        "setting": setting.name,
        "row": row.title,
        "seed": seed,
        "values": dict(row.values),
        "rounds": setting.rounds,
        "images": len(task.train.labels),
    }


def key(record: records.Record) -> str:
    """Return the fields that identify a run in the file."""
    names = ("setting", "row", "seed", "values", "rounds", "images")
    return json.dumps([record[name] for name in names], sort_keys=True)


def estimate(setting: Setting, task: tasks.Task, machine: Machine, num_seeds: int) -> str:
    """Measure twenty steps and a test batch of each row, and return a table of the hours."""
    body, hours = [], 0.0
    rows = [row for row, _ in runnable(setting)]
    for row, trial in tqdm(trials(setting, task, machine, 0, rows), total=len(rows)):
        own = measured(row, trial, last_rounds=setting.last_rounds)
        hours += num_seeds * own.seconds / 3600
        body.append(
            [
                row.title,
                f"{own.steps:,}",
                f"{own.images:,}",
                f"{own.measured}",
                f"{own.seconds / 3600:.2f}",
            ]
        )
    header = ["row", "steps", "images", "steps measured", "hours, one seed"]
    return f"{table(header, body)}\n\nAll rows, {num_seeds} seeds, with evaluation: {hours:.1f} h"


def report(setting: Setting, found: Sequence[records.Record]) -> str:
    """Return a table of our figures next to the paper's, and the choices of the setting."""
    body = []
    for row in setting.rows:
        own = [record for record in found if record["row"] == row.title]
        for column, figure in row.figures.items():
            ours, gap = "not in the gallery", ""
            if row.method is not None:
                values = [record[column] for record in own]
                ours = mean_and_deviation(values)
                gap = f"{100 * sum(values) / len(values) - figure:+.1f}"
            spread = f" ± {row.spread[column]}" if column in row.spread else ""
            body.append([row.title, column, f"{figure}{spread}", ours, gap])
    lines = [f"{setting.name}: {setting.source}", ""]
    lines += [table(["row", "column", "paper, %", "ours, %", "difference"], body), ""]
    return "\n".join(lines + [f"- {choice}" for choice in setting.choices])


if __name__ == "__main__":
    main()
