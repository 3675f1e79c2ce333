"""Figures that explain why groups of prompts and learned guides do not help in `mechanisms.py`.

Runs SGPT and FedL2G-f once in each of their settings::

    python examples/studies/mechanism_causes.py
"""

import sys
from pathlib import Path

# Makes `methods`, `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt import samples
from fedprompt.methods.sgpt import GroupedModel
from studies.gallery.tasks import Trial
from studies.mechanism_settings import SETTINGS, Setting
from studies.mechanisms import run_rounds, shortened


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    for name, setting in SETTINGS.items():
        explain = {"sgpt": groups, "fedl2g": guides}.get(name.split("-")[0])
        if explain is not None:
            print(f"\n{setting.title}, seed 0")
            for title, value in explain(shortened(setting) if quick else setting).items():
                print(f"  {title}: {value:.3f}")


def groups(setting: Setting) -> dict[str, float]:
    """Measure how groups are selected, and what their prompts change."""
    trial = setting.make(0)
    *_, predictions = run_rounds(setting.rows[0], trial)
    with torch.no_grad():
        return selected(predictions.everyone, trial)


def selected(model: GroupedModel, trial: Trial) -> dict[str, float]:
    """Measure a trained model on the test images."""
    num_classes = len(samples.CLASS_NAMES)
    domains, labels = trial.test_cells // num_classes, trial.test_cells % num_classes
    batches, num_groups = trial.test.split(256), len(model.selector.keys)
    chosen = [model.selector(model.query(each)).indices for each in batches]
    found = torch.cat(chosen), domains, num_groups, 1 + int(domains.max())
    table = fp.selection.contingency_table(*found).float()
    used, health = table[table.any(1)], fp.selection.selection_health(table.sum(1))
    shares = used.amax(1) / used.sum(1)
    pairs = list(zip(batches, chosen, strict=True))
    own = torch.cat([model.logits(*pair).argmax(1) for pair in pairs])
    none = torch.cat([model.logits(each).argmax(1) for each in batches])
    other = torch.cat([model.logits(each, (of + 1) % num_groups).argmax(1) for each, of in pairs])
    return {
        "effective groups": health["effective_groups"],
        "dead groups": health["dead_groups"],
        "images in the group of their domain": fp.selection.clustering_accuracy(table),
        "smallest share of the main domain of a group": shares.min().item(),
        "groups of one domain": (shares == 1).sum().item(),
        "accuracy with the selected groups": (own == labels).float().mean().item(),
        "accuracy without groups": (none == labels).float().mean().item(),
        "predictions that the next group changes": (own != other).float().mean().item(),
    }


def guides(setting: Setting) -> dict[str, float]:
    """Measure how far the guides move, and the two losses of the first client."""
    trial = setting.make(0)
    federation = trial.federation
    sent: list[Tensor] = []
    send = federation.send_down

    def watched(client: int, values: dict[str, Tensor]) -> dict[str, Tensor]:
        sent.append(values["guides"].clone())
        return send(client, values)

    federation.send_down = watched
    *_, predictions = run_rounds(setting.rows[0], trial)
    client, first, last = federation.clients[0], sent[0], sent[-1]
    own = federation.shards[client]
    model, labels = predictions.of(client), federation.labels[own]
    with torch.no_grad():
        features = model.features(federation.inputs[own])
        logits = model.head(features)
    weight = setting.rows[0].values["guide_weight"]
    return {
        "distance of the guides, of their first norm": float((last - first).norm() / first.norm()),
        "guide loss with its weight": weight * F.mse_loss(features, last[labels]).item(),
        "cross-entropy": F.cross_entropy(logits, labels).item(),
    }


if __name__ == "__main__":
    main()
