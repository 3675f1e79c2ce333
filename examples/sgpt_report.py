"""What surrounds SGPT's loop: command-line flags, what is constant for a whole run, figures of clusters, tables and pictures."""

import argparse
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
from embedded.shifts import Federation, Side, feature_shift, label_shift
from embedded.tasks import Backbone, load_backbone
from report import mean_and_deviation, percent, plt, table

LAST = 10
"""Reported are means over so many last rounds, as in the paper."""

DIGITS: dict[str, Any] = {
    "backbone": "B", "ratio": 0.25, "rounds": 24, "epochs": 2, "batch_size": 32, "learning_rate": 0.05,
    "num_prompts": 8, "shared_length": 8, "shared_layers": (0, 1), "group_layers": (2, 3), "average": False,
}  # fmt: skip
PAPER: dict[str, Any] = {
    "backbone": "vit_base_patch16_224.augreg_in21k", "ratio": 0.05, "rounds": 60, "epochs": 5, "batch_size": 40, "learning_rate": 0.01,
    "num_prompts": 10, "shared_length": 1, "shared_layers": (0, 1, 2, 3), "group_layers": (4, 5, 6), "average": True, "groups": 20,
}  # fmt: skip
GROUPS = {"label": 10, "feature": 5}
"""As many for the digits as there are classes, or domains."""


def layers(text: str) -> tuple[int, ...]:
    return tuple(int(layer) for layer in text.split(","))


def flags() -> argparse.ArgumentParser:
    """Make the parser; flags without a default take that of the digits or, for other data, the paper's."""
    parser = argparse.ArgumentParser(description="SGPT", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shift", choices=("label", "feature"), default="label", help="what differs between clients: classes, or domains")
    parser.add_argument("--classes-per-client", type=int, default=2, help="for label shift")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--unseen", type=int, default=0, help="so many of them never take part: they only take the model and are tested")
    parser.add_argument("--ratio", type=float, help="share of clients in a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, help="for each of SGPT's two blocks; rows of one block get twice as many")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--weight-decay", type=float, default=1e-5, help="of shared prompts and heads; keys and groups have none")
    parser.add_argument("--groups", type=int)
    parser.add_argument("--num-prompts", type=int, help="of FedVPT and FedVPT-D, for each layer")
    parser.add_argument("--shared-length", type=int, help="shared prompts that enter at each of their layers")
    parser.add_argument("--group-length", type=int, default=1, help="likewise for each group")
    parser.add_argument("--shared-layers", type=layers)
    parser.add_argument("--group-layers", type=layers)
    average = "the head reads the mean of class and group tokens; default: for other data than the digits"
    parser.add_argument("--average", action=argparse.BooleanOptionalAction, default=None, help=average)
    parser.add_argument("--query-depth", type=int, help="blocks that run for the query; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backbone", help="B, L, or any of timm's vision transformers")
    parser.add_argument("--pretrained", action="store_true", help="download weights for timm's models")
    parser.add_argument("--dataset", default="digits", help="digits, cifar10, cifar100, or a folder with train/ and test/")
    parser.add_argument("--root", default=".", help="where data lies or is downloaded to")
    parser.add_argument("--image-size", type=int, default=224, help="pixels, for other data than digits")
    parser.add_argument("--validate", action="store_true", help="test on a quarter of the training images: to choose the flags above")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="two rounds of one epoch, to see that it runs")
    parser.add_argument("--full", action="store_true", help="the tables of the documentation: both shifts, all rows, three seeds")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures")
    return parser


class Result(NamedTuple):
    """One run: accuracy (rounds, clients) of the global model on each client's own test images, and what was selected.

    `usage` (rounds, groups) counts the cohort's choices in training, `chosen` (test images,) are those of the last global model at
    inference, both None without groups; `values` is that model.
    """

    accuracy: Tensor
    num_test: Tensor
    usage: Tensor | None
    chosen: Tensor | None
    values: dict[str, Tensor]

    def over_rounds(self) -> list[float]:
        """Global accuracy after each round."""
        return [fp.global_accuracy(row[None], self.num_test) for row in self.accuracy]

    def figures(self) -> list[float]:
        """Global, local and worst local accuracy, each as the mean of the last rounds."""
        local, worst = ([reduce(row[None]) for row in self.accuracy] for reduce in (fp.local_accuracy, fp.worst_local_accuracy))
        last = min(LAST, len(self.accuracy))
        return [fp.summarise(history, last=last).last_mean for history in (self.over_rounds(), local, worst)]


def filled(args: Namespace) -> Namespace:
    """Fill in the flags that were left open."""
    given = {key: value for key, value in vars(args).items() if value is not None}
    quick = {"rounds": 2, "epochs": 1} if args.quick else {}
    usual = DIGITS | {"groups": GROUPS[args.shift]} if args.dataset == "digits" else PAPER
    return Namespace(**vars(args) | usual | given | quick)


def prepare(args: Namespace) -> tuple[Federation, Backbone, Namespace]:
    """Load data and backbone, compute every query once, and fill in the flags that were left open."""
    torch.set_num_threads(1 if args.dataset == "digits" else torch.get_num_threads())  # threads only wait in models this tiny
    args = filled(args)
    if args.shift == "label":
        keys = ("root", "image_size", "seed", "classes_per_client", "validate")
        federation = label_shift(args.dataset, num_clients=args.clients, **{key: vars(args)[key] for key in keys})
    elif args.dataset == "digits":
        federation = feature_shift(seed=args.seed, num_clients=args.clients, validate=args.validate)
    else:
        raise ValueError(f"`--shift feature` must come with `--dataset digits`; got {args.dataset}.")
    backbone = load_backbone(args.backbone, pretrained=args.pretrained, image_size=args.image_size, device=args.device)
    sides = [_with_queries(side, backbone, args) for side in (federation.train, federation.test)]
    return federation._replace(train=sides[0], test=sides[1]), backbone, args


def _with_queries(side: Side, backbone: Backbone, args: Namespace) -> Side:
    """The prompts stay out of the query, and no image is varied: one pass serves all clients, rounds and rows."""

    def encode(images: Tensor) -> Tensor:
        images = (images.to(args.device) - backbone.mean) / backbone.std
        return fp.encode_prompted(backbone.encoder, images, depth=args.query_depth).pooled

    queries = fp.precompute(encode, side.split.dataset, batch_size=128)
    return side._replace(queries=queries, labels=side.labels.to(args.device))


def run(federate: Callable[..., Result], names: Sequence[str], args: Namespace) -> tuple[dict[str, Result], Federation, Namespace]:
    """Call `federate(name, federation, backbone, args)` for each name on one split of the data."""
    federation, backbone, args = prepare(args)
    return {name: federate(name, federation, backbone, args) for name in names}, federation, args


def matched(found: Tensor, wanted: Tensor) -> float:
    """Clustering accuracy: the share of samples on the best one-to-one match of groups."""
    table = fp.contingency_table(found, wanted, num_groups=int(found.max()) + 1, num_classes=int(wanted.max()) + 1)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table.numpy()[rows, columns].sum() / table.sum())


def centralised(federation: Federation, num_groups: int, seed: int) -> Tensor:
    """Group the test images by k-means on the queries of all clients' training images: what no federation may do."""
    train, test = (F.normalize(side.queries, dim=1).cpu().numpy() for side in (federation.train, federation.test))
    return torch.as_tensor(KMeans(num_groups, n_init=10, random_state=seed).fit(train).predict(test)).long()


CLUSTERS = ("true groups", "k-means", "dead groups", "effective groups")


def clusters(results: Mapping[str, Result], federation: Federation, args: Namespace) -> dict[str, list[float]]:
    """Hold selections against the true groups and against centralised k-means, and count groups in use; k-means itself comes last."""
    kmeans = centralised(federation, args.groups, args.seed)
    selections = {name: result.chosen for name, result in results.items() if result.chosen is not None} | {"centralised k-means": kmeans}
    figures = {}
    for name, chosen in selections.items():
        health = fp.selection_health(torch.bincount(chosen, minlength=args.groups))
        agreement = [matched(chosen, federation.test.truth), matched(chosen, kmeans)]
        figures[name] = [*agreement, health["dead_groups"], health["effective_groups"]]
    return figures


def frequencies(chosen: Tensor, shards: Sequence[np.ndarray], num_groups: int) -> Tensor:
    """For each client the shares of the groups among its images, (clients, groups)."""
    counts = torch.stack([torch.bincount(chosen[shard], minlength=num_groups) for shard in shards])
    return counts / counts.sum(1, keepdim=True)


def picture(path: Path, results: Mapping[str, Result], federation: Federation, num_groups: int) -> None:
    """Draw group frequencies of every client, selections over rounds, and accuracy over rounds."""
    steered = [name for name in ("SGPT, no momentum", "SGPT") if name in results]
    figure, axes = plt.subplots(1, 2 + len(steered), figsize=(4 * (2 + len(steered)), 3.4), layout="constrained")
    shown = steered[-1]
    axes[0].imshow(frequencies(results[shown].chosen, federation.test.shards, num_groups), cmap="Blues", aspect="auto")
    axes[0].set(title=f"{shown}: group frequency", xlabel="group", ylabel="client")
    for axis, name in zip(axes[1:-1], steered, strict=True):
        usage = results[name].usage
        axis.stackplot(range(1, len(usage) + 1), (usage / usage.sum(1, keepdim=True)).T.numpy())
        axis.set(title=f"{name}: share of each group", xlabel="round", ylim=(0, 1), xmargin=0)
    for name, result in results.items():
        _history(axes[-1], name, result)
    axes[-1].set(title="global accuracy", xlabel="round", ylabel="%")
    axes[-1].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _history(axis: Axes, name: str, result: Result) -> None:
    history = np.array(result.over_rounds())
    axis.plot(range(1, len(history) + 1), 100 * history, label=name)


def newcomers(results: Mapping[str, Result], unseen: int) -> str:
    """Compare clients that never took part with the others, by the mean of the last rounds and of clients."""
    means = {name: result.accuracy[-LAST:].mean(0) for name, result in results.items()}
    lines = [[name, percent(mean[:-unseen].mean().item()), percent(mean[-unseen:].mean().item())] for name, mean in means.items()]
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
            table(["method", *ACCURACY], [[name, *map(percent, result.figures())] for name, result in results.items()]),
            "\nTest images on the best one-to-one match of groups, %, and groups in use:",
            table(["selection", *CLUSTERS], [[name, *map(percent, line[:2]), *map(_count, line[2:])] for name, line in figures.items()]),
            f"\nPicture: {args.out}/sgpt.png",
        ]
    )


def full(federate: Callable[..., Result], names: Sequence[str], args: Namespace) -> Iterator[str]:
    """Yield the tables of the documentation as they are done: both shifts, all rows, three seeds; then layers of groups, one seed."""
    for shift in ("label", "feature"):
        runs = [run(federate, names, Namespace(**vars(args) | {"shift": shift, "seed": seed})) for seed in range(3)]
        accuracy = {name: np.array([results[name].figures() for results, _, _ in runs]) for name in names}
        gains = {name: accuracy[name] - accuracy["FedVPT-D"] for name in names}
        lines = [[name, *map(mean_and_deviation, accuracy[name].T), *map(mean_and_deviation, gains[name].T[[0, 2]])] for name in names]
        yield f"\n{shift} shift, accuracy:\n" + table(["method", *ACCURACY, "global - FedVPT-D", "worst - FedVPT-D"], lines)
        each = [clusters(*each) for each in runs]
        figures = {name: np.array([line[name] for line in each]).T for name in each[0]}
        lines = [[name, *map(mean_and_deviation, of[:2]), *(_count(row.mean()) for row in of[2:])] for name, of in figures.items()]
        yield f"\n{shift} shift, clusters:\n" + table(["selection", *CLUSTERS], lines)
        results, federation, filled = runs[0]
        shown = {name: results[name] for name in ("FedVPT", "FedVPT-D", "SGPT, no momentum", "SGPT")}
        picture(args.out / f"sgpt_{shift}.png", shown, federation, filled.groups)
    _, backbone, _ = prepare(args)
    at = {layer: run(federate, ["SGPT"], Namespace(**vars(args) | {"group_layers": (layer,)})) for layer in range(backbone.encoder.depth)}
    lines = [[layer, *map(percent, results["SGPT"].figures())] for layer, (results, _, _) in at.items()]
    yield "\nlabel shift, groups at one layer alone, one seed:\n" + table(["layer", *ACCURACY], lines)
    bars(args.out / "sgpt_layers.png", {str(layer): results["SGPT"].figures() for layer, (results, _, _) in at.items()})


def bars(path: Path, figures: Mapping[str, Sequence[float]]) -> None:
    """Draw accuracy by the layer where groups enter."""
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    for position, (name, values) in enumerate(zip(ACCURACY, zip(*figures.values(), strict=True), strict=True)):
        axis.bar(np.arange(len(figures)) + 0.25 * (position - 1), 100 * np.array(values), 0.25, label=name)
    axis.set(xlabel="layer of the group prompts", ylabel="%", xticks=range(len(figures)), xticklabels=list(figures))
    axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _count(value: float) -> str:
    return f"{value:.1f}"
