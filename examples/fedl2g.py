"""FedL2G: clients of any architecture follow guide vectors that learn to help them.

Ten clients train eight different networks from scratch. The server holds one vector for each class,
and descends the gradient of the clients' loss after one training step (Zhang et al., 2024). Guides
that learn are not better than random ones on these digits (docs/results/mechanisms.md)::

    python examples/fedl2g.py
"""

from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from zoo import TINY

NUM_CLIENTS, DIM, WARM_UP, RATE = 10, 32, 5, 0.1


class Client(nn.Module):
    """A network of any width, its features pooled to the width of the guides, and a head."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.pool = network, nn.AdaptiveAvgPool1d(DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features, which follow the guides, and logits."""
        features = self.pool(self.network(2 * images - 1))
        return features, self.head(features)


Quizzes = list[Tensor]  # positions of the images that each client holds back


def federate(
    federation: digits.Federation, studied: digits.Federation, quizzes: Quizzes, weight: float
) -> float:
    """Return the mean accuracy of the clients, each on its own mix of classes."""
    torch.manual_seed(0)
    clients = [Client(make()) for make in islice(cycle(TINY.values()), NUM_CLIENTS)]
    server = fp.descend(partial(torch.optim.SGD, lr=10.0), max_norm=100.0)
    state = server.init(guides := torch.randn(10, DIM))
    name = "guided" if weight else "alone"
    rounds = WARM_UP + federation.rounds if weight else federation.rounds
    for server_round in (bar := tqdm(range(rounds), name, unit="round")):
        after = server_round - (rounds - federation.rounds)  # below 0 only guides learn
        entries = []
        for k, client in enumerate(clients):
            optimizer = torch.optim.SGD(client.train().parameters(), RATE)
            batches = list(studied.batches(k, server_round, size=10))
            for images, labels in batches if after >= 0 else []:
                loss = fp.guidance.guided_loss(*client(images), labels, guides, guide_weight=weight)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(client.parameters(), 100.0)
                optimizer.step()
            if weight:
                quiz = federation.images[quizzes[k]], federation.labels[quizzes[k]]
                step = {"learning_rate": RATE, "guide_weight": weight}
                entries.append(fp.guidance.guide_gradient(client, guides, batches[0], quiz, **step))
        if entries:
            guides, state = server.step(guides, fp.weighted_mean(entries), state)
        if after >= 0:
            logits = [lambda images, client=client: client.eval()(images)[1] for client in clients]
            mean = np.mean([federation.accuracy(predict, k) for k, predict in enumerate(logits)])
            bar.write(f"{name}, round {after + 1}: {100 * mean:.1f} %")
    return mean


def main() -> None:
    quick = digits.parser(__doc__).parse_args().quick
    split = partial(fp.data.dirichlet, num_clients=NUM_CLIENTS, alpha=0.3, min_size=20)
    federation = digits.federation(split, rounds=15, steps=12, quick=quick)
    rng = np.random.default_rng(0)
    study, quizzes = [], []
    for k, shard in enumerate(federation.shards):
        split = fp.data.study_quiz_split(federation.own(k)[1], quiz_size=10, generator=rng)
        study.append(shard[split[0]])
        quizzes.append(shard[split[1]])
    alone = federate(federation, federation, quizzes, weight=0.0)
    studied = replace(federation, shards=study)
    guided = federate(federation, studied, quizzes, weight=3.0)
    print(
        f"Tested on their own mix of classes, guided clients reach {100 * guided:.1f} %, clients "
        f"alone {100 * alone:.1f} %; alone they also train on the {len(quizzes[0])} images that "
        f"a guided client holds back. A client receives {4 * 10 * DIM:,} bytes a round."
    )


if __name__ == "__main__":
    main()
