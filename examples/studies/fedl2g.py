"""FedL2G: clients of any architecture follow guide vectors that learn to lower their losses.

The method is by Zhang et al. (2024). Ten clients train eight different networks from scratch on
real handwritten digits::

    python examples/studies/fedl2g.py

With ``--full``, the study makes the table of its page. With the data and a GPU, this command runs
the setting of the paper::

    python examples/studies/fedl2g.py --group HtFE8 --dataset cifar100 --root DIR \
        --clients 20 --alpha 0.1 --dim 512 --learning-rate 0.01 --constant \
        --methods FedL2G-f --weight 1 --guide-learning-rate 100 --rounds 1000 --warm-up 50
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.tasks import Task
from embedded.zoo import encoder
from studies import fedl2g_report as report
from studies.memory import rounds, variant

Pairs = list[tuple[Tensor, Tensor]]


class Client(nn.Module):
    """Network of any width with a head; features are pooled or projected to the common width."""

    def __init__(
        self, network: nn.Module, width: int, num_classes: int, *, guided: str, args: Namespace
    ) -> None:
        super().__init__()
        self.network, self.guided = network, guided
        self.adapt = nn.Linear(width, args.dim) if args.project else nn.AdaptiveAvgPool1d(args.dim)
        self.head = nn.Linear(args.dim, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the guided outputs (features or logits), and logits."""
        features = self.adapt(self.network(2 * images - 1))  # pixels from -1 to 1
        logits = self.head(features)
        return (features if self.guided == "features" else logits), logits


def own_gradient(
    client: Client, guides: fp.Weighted, batches: Pairs, quiz: Pairs, **step: float
) -> fp.Weighted:
    """Compute FedL2G's gradient of the quiz loss after a study step by the guides (Eq. 5-7)."""
    return fp.guide_gradient(client.train(), guides, batches[0], quiz, **step)


@torch.no_grad()
def own_means(
    client: Client, guides: fp.Weighted, batches: Pairs, quiz: Pairs, **step: float
) -> fp.Weighted:
    """Average the client's logits (FedDistill) or features (FedProto) over each class."""
    client.eval()
    return fp.weighted_mean(
        [
            fp.class_means(client(images)[0], labels, num_classes=len(guides.weight))
            for images, labels in batches
        ]
    )


class Method(NamedTuple):
    """Row of the table.

    Attributes:
        guided: Guided outputs, "logits" or "features".
        weight: Weight of the guide loss.
        payload: Function that computes a client's payload. If None, no guides are sent.
        learning_rate: Learning rate of the guides. If None, guides are the means of the clients.
        share: Names of the parameters that clients average.
    """

    guided: str = "logits"
    weight: float = 0.0
    payload: Callable[..., fp.Weighted] | None = None
    learning_rate: float | None = None
    share: tuple[str, ...] = ()


# Weights and rates were chosen on held-out training images, with one seed.
METHODS = {
    "local only": Method(),
    # The next row shows the effect of the images held back for the quiz.
    "local only, quiz held back": Method(learning_rate=0.0),
    "LG-FedAvg": Method(share=("head",)),
    "FedDistill": Method("logits", 0.01, own_means),
    "FedProto": Method("features", 0.1, own_means),
    "fixed random logits": Method("logits", 1.0, own_gradient, 0.0),
    "FedL2G-l": Method("logits", 1.0, own_gradient, 10.0),
    "fixed random features": Method("features", 3.0, own_gradient, 0.0),
    "FedL2G-f": Method("features", 3.0, own_gradient, 10.0),
}


def tuned(name: str, args: Namespace) -> Method:
    """Look up a row; the flags change the weight and the learning rate of its guides."""
    method = METHODS[name]
    weight = args.weight if args.weight is not None and method.payload else method.weight
    learns = args.guide_learning_rate is not None and method.learning_rate
    return method._replace(
        weight=weight, learning_rate=args.guide_learning_rate if learns else method.learning_rate
    )


def new_client(k: int, task: Task, guided: str, args: Namespace) -> Client:
    torch.manual_seed(args.seed * 1000 + k)  # the same initial weights for every method
    network, width = encoder(args.group, k, args.image_size)
    return Client(network, width, task.num_classes, guided=guided, args=args).to(args.device)


def train(
    client: Client, batches: Pairs, guides: fp.Weighted, *, weight: float, learning_rate: float
) -> float:
    """Follow the guides for one epoch (Eq. 4); return the mean loss without the guide term."""
    optimizer, losses = torch.optim.SGD(client.train().parameters(), learning_rate), []
    for images, labels in batches:
        guided, logits = client(images)
        loss = fp.guided_loss(guided, logits, labels, guides, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(client.parameters(), 100.0)
        optimizer.step()
        losses.append(F.cross_entropy(logits.detach(), labels).item())
    return float(np.mean(losses))


def beginning(
    method: Method, num_classes: int, args: Namespace
) -> tuple[fp.Weighted, fp.ServerUpdate[Tensor, fp.Weighted]]:
    """Make the guides before the first round, and the server's update rule for them."""
    size = (num_classes, args.dim if method.guided == "features" else num_classes)
    if method.learning_rate is None:  # guides are the clients' means; all rows are still unknown
        unknown = torch.zeros(num_classes, device=args.device)
        return fp.Weighted(torch.zeros(size, device=args.device), unknown), fp.overwrite()
    stream = fp.stream_generator(args.seed, server_round=0, purpose="guides")
    rule = fp.descend(partial(torch.optim.SGD, lr=method.learning_rate), max_norm=100.0)
    guides = torch.randn(size, generator=stream).to(args.device)
    return fp.Weighted(guides, torch.ones(num_classes, device=args.device)), rule


class Sent(NamedTuple):
    """Payloads of one client in one round; None is not sent."""

    guides: fp.Weighted | None
    head: dict[str, fp.Weighted] | None


def client_round(
    k: int,
    server_round: int,
    memory: Namespace,
    method: Method,
    task: Task,
    own: np.ndarray,
    quiz: Pairs,
    args: Namespace,
) -> Sent:
    """Train client `k` after the warm-up, and return its payloads."""
    warm_up = args.warm_up if method.learning_rate is not None else 0
    progress = 0.0 if args.constant else max(0, server_round - warm_up) / args.rounds
    rate = args.learning_rate * (1 + np.cos(np.pi * progress)) / 2
    step = {"weight": method.weight, "learning_rate": rate}
    client, stream = memory.clients[k], partial(fp.stream_generator, args.seed)
    batches = report.epoch(task, own, stream(server_round=server_round, client=k), args)
    if batches and server_round >= warm_up:
        memory.losses[k] = train(client, batches, memory.guides, **step)
    guides = None
    if batches and method.payload:
        guides = method.payload(client, memory.guides, batches, quiz, **step)
    head = fp.collect(client, weight=len(own), only=method.share) if method.share else None
    return Sent(guides, head)


def federate(name: str, task: Task, shards: list[report.Shard], args: Namespace) -> report.Run:
    """Run one row of the table; return accuracy and loss of each client after each round."""
    method = tuned(name, args)
    learned = method.learning_rate is not None
    clients = nn.ModuleList([new_client(k, task, method.guided, args) for k in range(len(shards))])
    # Only FedL2G holds a quiz back.
    own = [
        shard.study if learned else np.concatenate([shard.study, shard.quiz]) for shard in shards
    ]
    quizzes = [list(task.train.batches(shard.quiz, args.device)) for shard in shards]
    guides, server = beginning(method, task.num_classes, args)
    warm_up = args.warm_up if learned else 0
    # Initial loss of a client that has not taken part yet.
    guessing = float(np.log(task.num_classes))
    memory = Namespace(clients=clients, guides=guides, state=server.init(guides.value), shared={})
    memory.losses, memory.history, memory.ledger = [guessing] * len(clients), [], fp.Ledger()
    for server_round in rounds(memory, warm_up + args.rounds, name, args):
        sent = []
        draw = fp.stream_generator(args.seed, server_round=server_round, purpose="cohort")
        size = round(args.participation * len(clients))
        for k in fp.cohort(range(len(clients)), size=size, generator=draw):
            record = partial(memory.ledger.record, client=k, server_round=server_round)
            fp.load_values(clients[k], memory.shared)
            known = memory.guides.value[memory.guides.weight > 0]
            record(memory.shared | ({"guides": known} if method.payload else {}), direction="down")
            sent.append(
                client_round(k, server_round, memory, method, task, own[k], quizzes[k], args)
            )
            if sent[-1].guides is not None:
                record({"guides": sent[-1].guides}, direction="up")
            if sent[-1].head is not None:
                record(sent[-1].head, direction="up")
        if payloads := [each.guides for each in sent if each.guides is not None]:
            mean = fp.weighted_mean(payloads)
            value, memory.state = server.step(memory.guides.value, mean, memory.state)
            memory.guides = fp.Weighted(value, memory.guides.weight + mean.weight)
        if heads := [each.head for each in sent if each.head is not None]:
            memory.shared = {name: mean.value for name, mean in fp.weighted_mean(heads).items()}
        if server_round >= warm_up:
            pairs = zip(clients, shards, strict=True)
            tests = [report.accuracy(each, task.test, shard.test, args) for each, shard in pairs]
            memory.history.append([tests, memory.losses.copy()])
    accuracy, curves = torch.tensor(memory.history, dtype=torch.float64).unbind(1)
    return report.Run(clients, memory.guides.value, accuracy, curves, memory.ledger)


def full(args: Namespace) -> str:
    """Run every row of the documentation's table for three seeds."""
    settings = {
        "Dirichlet 0.3, all clients": {},
        "two classes each, all clients": {"classes_per_client": 2},
        "Dirichlet 0.3, half of the clients": {"participation": 0.5},
    }
    lines = []
    for setting, given in settings.items():
        seeds = [
            report.run(federate, list(METHODS), variant(args, **given, seed=seed))
            for seed in range(3)
        ]
        for name in METHODS:
            lines.append(
                [
                    setting,
                    name,
                    *report.line(
                        [runs[name] for _, _, runs in seeds], [shards for _, shards, _ in seeds]
                    ),
                ]
            )
    return report.table(["setting", "method", *report.COLUMNS], lines)


def main() -> None:
    parser = report.flags("FedL2G")
    parser.add_argument(
        "--methods", default="local only,FedProto,FedL2G-f", help=f"of {', '.join(METHODS)}; or all"
    )
    parser.add_argument(
        "--weight",
        type=float,
        help="weight of the guide loss; default: tuned for the digits for each method",
    )
    parser.add_argument(
        "--guide-learning-rate", type=float, help="learning rate of the guides; default: likewise"
    )
    args = parser.parse_args()
    if args.full:
        print(full(args))
        return
    names = list(METHODS) if args.methods == "all" else args.methods.split(",")
    task, shards, runs = report.run(federate, names, args)
    print(report.summary(task, shards, runs, args))


if __name__ == "__main__":
    main()
