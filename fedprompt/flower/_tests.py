"""Figures of the tests that clients make of their own models."""

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from flwr.app import MetricRecord

import fedprompt._refusals as check
from fedprompt.flower._records import EXAMPLES, figures_of
from fedprompt.metrics import balanced_accuracy, contingency_table

_BATCH = 100


@torch.no_grad()
def figures(model: Any, inputs: Any, labels: Any) -> MetricRecord:
    """Test a model on the inputs of a client: accuracy, balanced accuracy and cross-entropy."""
    check.instance("method.predict", model, nn.Module, "return an nn.Module")
    model.eval()
    device = next((part.device for part in [*model.parameters(), *model.buffers()]), "cpu")
    places = torch.split(torch.arange(len(labels)), _BATCH)
    logits = torch.cat([model(inputs[part].to(device)).float().cpu() for part in places])
    none = logits.shape[1]  # a prediction with NaN is no class
    classes = torch.where(logits.isnan().any(1), none, logits.argmax(1))
    labels = torch.as_tensor(labels).cpu().long()
    found = {
        EXAMPLES: len(labels),
        "accuracy": (classes == labels).double().mean().item(),
        "balanced_accuracy": balanced_accuracy(
            contingency_table(classes, labels, none + 1, none + 1)
        ),
    }
    loss = F.cross_entropy(logits, labels).item()
    return MetricRecord(found | {"loss": loss if math.isfinite(loss) else math.inf})


def checked_figures(records: Any) -> dict[str, float]:
    """Return the figures in a reply, which a node may have made up."""
    single = len(records) == len(records.metric_records) == 1
    check.require(single, "records", "have one record of metrics", list(records))
    (metrics,) = records.metric_records.values()
    size: Any = metrics.get(EXAMPLES)
    rule = f"have {EXAMPLES!r}, an integer of at least 1"
    check.require(type(size) is int and size >= 1, "metrics", rule, repr(size))
    found = figures_of(metrics)
    for name, most in {"accuracy": 1.0, "balanced_accuracy": 1.0, "loss": math.inf}.items():
        value = found.get(name, math.nan)
        check.require(0 <= value <= most, f"metrics[{name!r}]", f"be in [0, {most:g}]", value)
    return found | {EXAMPLES: size}


def mean_figures(found: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Average figures of clients, weighted by images; balanced accuracy over clients."""
    images = {client: each[EXAMPLES] for client, each in found.items()}
    means = weighted_means({c: figures_of(each) for c, each in found.items()}, images)
    over_clients = weighted_means(found, dict.fromkeys(found, 1))["balanced_accuracy"]
    counts = {"clients": len(found), "images": sum(images.values())}
    return counts | means | {"balanced_accuracy": over_clients}


def weighted_means(
    found: Mapping[int, Mapping[str, float]], weights: Mapping[int, float]
) -> dict[str, float]:
    """Average each figure over the clients that sent it, by their weights."""
    means = dict[str, float]()
    for name in dict.fromkeys(name for each in found.values() for name in each):
        having = [client for client in found if name in found[client]]
        values = [found[client][name] for client in having]
        means[name] = fmean(values, [weights[client] for client in having])
    return means
