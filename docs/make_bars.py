"""Draw the bars of README from the records: ``python docs/make_bars.py``."""

import json
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

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
    ),
    "compare": (
        "which-when/example",
        "accuracy in %, one domain for each client (sample digits)",
        {"own": "each client's domain", "full": "all domains"},
        {
            "Local training": "local",
            "Head tuning": "head_tuning",
            "FedVPT-D": "fedvpt_d",
            "SCAFFOLD": "scaffold",
            "FedLoRA": "fedlora",
        },
    ),
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


plt.rcParams |= {
    "svg.hashsalt": "fedprompt",
    "svg.fonttype": "none",
    "text.color": GRAY,
}
plt.rcParams |= dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), GRAY)
for picture, described in PICTURES.items():
    draw(picture, *described)
