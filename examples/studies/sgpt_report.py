"""Accuracy, clusters, tables and pictures of the SGPT study."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from torch import Tensor

import fedprompt as fp
from embedded.shifts import Federation
from studies.memory import variant
from studies.report import mean_and_deviation, percent, plt, save, table
from studies.sgpt_setup import prepare

LAST = 10
"""Number of last rounds over which the reported figures are averaged, as in the paper."""


class Result(NamedTuple):
    """Result of a run: accuracy (rounds, clients) of the global model, and selected groups.

    Accuracy is on each client's own test images. `usage` (rounds, groups) counts the selections of
    the cohort in training. `chosen` (test images,) are the groups that the last global model
    selects at inference. Both are None without groups. `values` is the last global model.
    """

    accuracy: Tensor
    num_test: Tensor
    usage: Tensor | None
    chosen: Tensor | None
    values: dict[str, Tensor]

    def over_rounds(self) -> list[float]:
        """Return the global accuracy after each round."""
        return [fp.metrics.global_accuracy(row[None], self.num_test) for row in self.accuracy]

    def figures(self) -> list[float]:
        """Average global, local and worst local accuracy over the last rounds."""
        local, worst = (
            [reduce(row[None]) for row in self.accuracy]
            for reduce in (fp.metrics.local_accuracy, fp.metrics.worst_local_accuracy)
        )
        last = min(LAST, len(self.accuracy))
        return [
            fp.metrics.last_and_best(history, last=last).last_mean
            for history in (self.over_rounds(), local, worst)
        ]


def run(
    federate: Callable[..., Result], names: Sequence[str], args: Namespace
) -> tuple[dict[str, Result], Federation, Namespace]:
    """Call `federate(name, federation, backbone, args)` for each name on one split of the data."""
    federation, backbone, args = prepare(args)
    return {name: federate(name, federation, backbone, args) for name in names}, federation, args


def matched(found: Tensor, wanted: Tensor) -> float:
    """Compute clustering accuracy: the share of samples on the best one-to-one match of groups."""
    table = fp.selection.contingency_table(
        found, wanted, num_groups=int(found.max()) + 1, num_classes=int(wanted.max()) + 1
    )
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table.numpy()[rows, columns].sum() / table.sum())


def centralized(federation: Federation, num_groups: int, seed: int) -> Tensor:
    """Group the test images by k-means on the pooled training queries of all clients.

    This is a reference: in a federation, queries are not pooled.
    """
    train, test = (
        F.normalize(side.queries, dim=1).cpu().numpy()
        for side in (federation.train, federation.test)
    )
    return torch.as_tensor(
        KMeans(num_groups, n_init=10, random_state=seed).fit(train).predict(test)
    ).long()


CLUSTERS = ("true groups", "k-means", "dead groups", "effective groups")


def clusters(
    results: Mapping[str, Result], federation: Federation, args: Namespace
) -> dict[str, list[float]]:
    """Compare selections with the true groups and with centralized k-means, and count groups.

    The last row is k-means.
    """
    kmeans = centralized(federation, args.groups, args.seed)
    selections = {
        name: result.chosen for name, result in results.items() if result.chosen is not None
    } | {"centralized k-means": kmeans}
    figures = {}
    for name, chosen in selections.items():
        health = fp.selection.selection_health(torch.bincount(chosen, minlength=args.groups))
        agreement = [matched(chosen, federation.test.truth), matched(chosen, kmeans)]
        figures[name] = [*agreement, health["dead_groups"], health["effective_groups"]]
    return figures


def frequencies(chosen: Tensor, shards: Sequence[np.ndarray], num_groups: int) -> Tensor:
    """Compute the shares of the groups among the images of each client, (clients, groups)."""
    counts = torch.stack([torch.bincount(chosen[shard], minlength=num_groups) for shard in shards])
    return counts / counts.sum(1, keepdim=True)


def picture(
    path: Path, results: Mapping[str, Result], federation: Federation, num_groups: int
) -> None:
    """Draw group frequencies of every client, selections over rounds, and accuracy over rounds."""
    steered = [name for name in ("SGPT, no momentum", "SGPT") if name in results]
    figure, axes = plt.subplots(
        1, 2 + len(steered), figsize=(4 * (2 + len(steered)), 3.4), layout="constrained"
    )
    shown = steered[-1]
    axes[0].imshow(
        frequencies(results[shown].chosen, federation.test.shards, num_groups).numpy(),
        cmap="Blues",
        aspect="auto",
    )
    axes[0].set(title=f"{shown}: group frequency", xlabel="group", ylabel="client")
    for axis, name in zip(axes[1:-1], steered, strict=True):
        fp.plots.group_usage(results[name].usage, axes=axis)
        axis.set_title(name)
    for name, result in results.items():
        _history(axes[-1], name, result)
    axes[-1].set(title="global accuracy", xlabel="round", ylabel="%")
    axes[-1].legend(fontsize="small")
    save(figure, path, dpi=80)


def _history(axis: Axes, name: str, result: Result) -> None:
    history = np.array(result.over_rounds())
    axis.plot(range(1, len(history) + 1), 100 * history, label=name)


def newcomers(results: Mapping[str, Result], unseen: int) -> str:
    """Compare clients that never took part with the others: means of last rounds and clients."""
    means = {name: result.accuracy[-LAST:].mean(0) for name, result in results.items()}
    lines = [
        [name, percent(mean[:-unseen].mean().item()), percent(mean[-unseen:].mean().item())]
        for name, mean in means.items()
    ]
    return table(["local accuracy", "took part", "never did"], lines)


ACCURACY = ("global", "local", "worst local")


def summary(results: Mapping[str, Result], federation: Federation, args: Namespace) -> str:
    """Write the picture to a folder, and the tables as text."""
    figures = clusters(results, federation, args)
    picture(args.out / "sgpt.png", results, federation, args.groups)
    return "\n".join(
        [
            *([newcomers(results, args.unseen), ""] if args.unseen else []),
            f"Accuracy, %, mean of the last {min(LAST, args.rounds)} of {args.rounds} rounds:",
            table(
                ["method", *ACCURACY],
                [[name, *map(percent, result.figures())] for name, result in results.items()],
            ),
            "\nTest images on the best one-to-one match of groups, %, and groups in use:",
            table(
                ["selection", *CLUSTERS],
                [
                    [name, *map(percent, line[:2]), *map(_count, line[2:])]
                    for name, line in figures.items()
                ],
            ),
            f"\nPicture: {args.out}/sgpt.png",
        ]
    )


def full(
    federate: Callable[..., Result], rows: Mapping[str, Sequence[str]], args: Namespace
) -> Iterator[str]:
    """Yield each table of the documentation when it is complete.

    The rows of each shift have three seeds, the layers of groups one seed.
    """
    for shift, names in rows.items():
        runs = [run(federate, names, variant(args, shift=shift, seed=seed)) for seed in range(3)]
        yield f"\n{shift} shift, accuracy:\n" + accuracy_over_seeds(names, runs)
        yield f"\n{shift} shift, clusters:\n" + clusters_over_seeds(runs)
        results, federation, filled = runs[0]
        drawn = ("FedVPT", "FedVPT-D", "SGPT, no momentum", "SGPT")
        shown = {name: results[name] for name in drawn}
        picture(args.out / f"sgpt_{shift}.png", shown, federation, filled.groups)
        kept = {}
        for name in ("FedVPT", "SGPT"):
            kept[name] = run(federate, [name], variant(args, shift=shift, unseen=5))[0][name]
        title = f"\n{shift} shift, five clients that never take part, one seed:\n"
        yield title + newcomers(kept, 5)
    yield "\nlabel shift, groups at one layer alone, one seed:\n" + by_layer(federate, args)


def accuracy_over_seeds(names: Sequence[str], runs: Sequence[tuple[Any, ...]]) -> str:
    """Write mean and deviation of each row, and of its gain over FedVPT-D with the same seed."""
    accuracy = {}
    for name in names:
        accuracy[name] = np.array([results[name].figures() for results, _, _ in runs])
    lines = []
    for name in names:
        gains = (accuracy[name] - accuracy["FedVPT-D"]).T[[0, 2]]
        figures = (*accuracy[name].T, *gains)
        lines.append([name, *map(mean_and_deviation, figures)])
    header = ["method", *ACCURACY, "global - FedVPT-D", "worst - FedVPT-D"]
    return table(header, lines)


def clusters_over_seeds(runs: Sequence[tuple[Any, ...]]) -> str:
    """Write mean and deviation of agreements, and mean numbers of groups."""
    each = [clusters(*run) for run in runs]
    lines = []
    for name in each[0]:
        figures = np.array([line[name] for line in each]).T
        counts = [_count(row.mean()) for row in figures[2:]]
        lines.append([name, *map(mean_and_deviation, figures[:2]), *counts])
    return table(["selection", *CLUSTERS], lines)


def by_layer(federate: Callable[..., Result], args: Namespace) -> str:
    """Run SGPT with groups at one layer at a time; draw bars, and write a table."""
    _, backbone, _ = prepare(args)
    figures = {}
    for layer in range(backbone.encoder.depth):
        results, _, _ = run(federate, ["SGPT"], variant(args, group_layers=(layer,)))
        figures[str(layer)] = results["SGPT"].figures()
    bars(args.out / "sgpt_layers.png", figures)
    lines = [[layer, *map(percent, values)] for layer, values in figures.items()]
    return table(["layer", *ACCURACY], lines)


def bars(path: Path, figures: Mapping[str, Sequence[float]]) -> None:
    """Draw accuracy by the layer where groups enter."""
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for position, (name, values) in enumerate(
        zip(ACCURACY, zip(*figures.values(), strict=True), strict=True)
    ):
        axis.bar(
            np.arange(len(figures)) + 0.25 * (position - 1),
            100 * np.array(values),
            0.25,
            label=name,
        )
    axis.set(
        xlabel="layer of the group prompts",
        ylabel="%",
        xticks=range(len(figures)),
        xticklabels=list(figures),
    )
    axis.legend(fontsize="small")
    save(figure, path, dpi=80)


def _count(value: float) -> str:
    return f"{value:.1f}"
