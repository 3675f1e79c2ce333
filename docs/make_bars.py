"""Draw the bars of the README from the records: ``python docs/make_bars.py``."""

import json
from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
TITLES = {
    "Local training": "alone, deep prompts",
    "Local training, three times as long": "alone, three times as long",
    "Norms (local)": "alone, norms",
    "Head tuning": "head, averaged",
    "FedVPT-D": "deep prompts, averaged",
    "LoRA, rank 1": "LoRA of rank 1, averaged",
    "Norms": "norms, averaged",
}
COLUMNS = {"own": "each client's domain", "full": "all domains"}

records = map(json.loads, (DOCS / "results" / "records" / "mnist.jsonl").open())
found = [
    each
    for each in records
    if each["partition"] == "deep-domains" and each["trial"] is None
]
plt.rcParams |= {
    "svg.hashsalt": "fedprompt",
    "svg.fonttype": "none",
    "text.color": "#808080",
}
plt.rcParams |= dict.fromkeys(
    ("xtick.color", "ytick.color", "axes.edgecolor"), "#808080"
)
figure, axes = plt.subplots(figsize=(7.2, 3.3), layout="constrained")
for place, (column, words) in enumerate(COLUMNS.items()):
    values = [[100 * r[column] for r in found if r["row"] == title] for title in TITLES]
    means = [np.mean(each) for each in values]
    errors = [stats.sem(each) * stats.t.ppf(0.975, len(each) - 1) for each in values]
    where = np.arange(len(TITLES)) - 0.2 + 0.4 * place
    color = ("#4477aa", "#ccbb44")[place]
    drawn = {"height": 0.38, "color": color, "label": words, "ecolor": "#808080"}
    axes.barh(where, means, xerr=errors, **drawn)
axes.set_yticks(range(len(TITLES)), list(TITLES.values()))
axes.set_title(
    "accuracy in %, one domain for each client (MNIST, DINOv2 ViT-S/14)", fontsize=9
)
axes.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside lower center", ncol=2, frameon=False, fontsize=8)
plt.savefig(DOCS / "images" / "bars.svg", transparent=True, metadata={"Date": None})
