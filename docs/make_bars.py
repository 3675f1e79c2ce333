"""Draw the pictures of README from the records: ``python docs/make_bars.py``.

The second one is the picture that ``fedprompt compare`` writes, of the runs of::

    python examples/study.py --study which-when --seeds 5
"""

import json
import os
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

from fedprompt.compare import Results, records
from fedprompt.compare.runs import bits_of

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
PICTURES = {
    "bars": (
        "mnist/deep-domains",
        "accuracy in %, one domain each (MNIST, DINOv2 ViT-S/14)",
        {"own": "each client's domain", "full": "all domains"},
        {
            "Local training": "alone, deep prompts",
            "Local training, three times as long": "alone, three times as long",
            "Norms (local)": "alone, norms",
            "Head tuning": "head, averaged",
            "FedVPT-D": "deep prompts, averaged",
            "LoRA, rank 1": "LoRA of rank 1, averaged",
            "Norms": "norms, averaged",
        },
    )
}
GRAY = "#808080"
COLORS = ("#4477aa", "#ccbb44")


def draw(name, place, title, columns, rows):
    """Draw two bars for each row, with 95 % intervals over seeds."""
    file, partition = place.split("/")
    with (DOCS / "results" / "records" / f"{file}.jsonl").open() as lines:
        runs = [json.loads(line) for line in lines]
    runs = [
        run for run in runs if run["partition"] == partition and run["trial"] is None
    ]
    height = 1.3 + 0.28 * len(rows)
    figure, axes = plt.subplots(figsize=(4.4, height), layout="constrained")
    for number, (column, words) in enumerate(columns.items()):
        values = [[100 * r[column] for r in runs if r["row"] == row] for row in rows]
        means = [np.mean(each) for each in values]
        errors = [
            stats.sem(each) * stats.t.ppf(0.975, len(each) - 1) for each in values
        ]
        where = np.arange(len(rows)) - 0.2 + 0.4 * number
        style = {"height": 0.38, "color": COLORS[number], "ecolor": GRAY}
        axes.barh(where, means, xerr=errors, label=words, **style)
    axes.set_yticks(range(len(rows)), list(rows.values()))
    figure.suptitle(title, fontsize=9, x=0.02, ha="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncol=2, frameon=False, fontsize=9)
    target = DOCS / "images" / f"{name}.svg"
    figure.savefig(target, transparent=True, metadata={"Date": None})


def draw_comparison(name):
    """Draw the picture of a comparison with one partition."""
    folder = DOCS / "results" / "records"
    found = records.newest(records.read(folder / f"{name}.jsonl"))
    unnamed = [record | {"partition": ""} for record in found]
    of_run = bits_of(folder / name, found, {})
    pairs = zip(found, unnamed, strict=True)
    bits = {records.key(shown): of_run[records.key(run)] for run, shown in pairs}
    columns = {
        "own": "accuracy on each client's domain",
        "full": "accuracy on all domains",
    }
    alone = {"training alone": ["Local training"]}
    shown = Results(unnamed, columns=columns, bits=bits, references=alone)
    shown.plot(DOCS / "images" / "compare.svg")


os.environ["SOURCE_DATE_EPOCH"] = "0"  # a picture without a date
plt.rcParams |= {
    "svg.hashsalt": "fedprompt",
    "svg.fonttype": "none",
    "text.color": GRAY,
}
plt.rcParams |= dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), GRAY)
for picture, described in PICTURES.items():
    draw(picture, *described)
plt.rcParams |= dict.fromkeys(
    ("text.color", "xtick.color", "ytick.color", "axes.edgecolor"), "black"
)
draw_comparison("which-when")
