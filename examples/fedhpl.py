"""FedHPL: clients with different backbones tune prompts and teach each other by class logits.

Six clients with three different frozen vision transformers have 30 handwritten digits each. They
send mean logits of each class, never parameters (Ma et al., 2024). Distillation teaches a client
nothing about classes that it lacks. Here, the images of a client are drawn from all classes::

    python examples/fedhpl.py
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import build_samples
import digits
import fedprompt as fp
from fedprompt.interfaces import Trunk

SIZES = ("S", "B", "L") * 2  # the backbone of each client


def logits_of(client: nn.ModuleDict, trunk: Trunk, images: Tensor) -> Tensor:
    return client["head"](fp.encode_prompted(trunk, images, client["prompts"]()).pooled)


def few_images(labels: Tensor, *, generator: np.random.Generator) -> list[np.ndarray]:
    """Give every client 30 images, drawn from all classes."""
    shards = fp.data.iid(labels, num_clients=len(SIZES), generator=generator)
    return [shard[:30] for shard in shards]


def federate(federation: digits.Federation, *, teach: bool) -> Tensor:
    """Return the accuracy of each client after each round, (rounds, clients)."""
    torch.manual_seed(0)
    trunks = [fp.vit_trunk(build_samples.vit(size)) for size in SIZES]
    dims = [trunk.dim for trunk in trunks]
    clients = []
    for trunk in trunks:
        prompts = fp.DeepPrompts(8, trunk)
        clients.append(nn.ModuleDict({"prompts": prompts, "head": nn.Linear(trunk.dim, 10)}))
    teachers = dict.fromkeys(dims, fp.Weighted(torch.zeros(10, 10), torch.zeros(10)))  # unknown
    history = []
    name = "FedHPL" if teach else "alone"
    for server_round in (bar := tqdm(range(federation.rounds), name, unit="round")):
        entries = []
        for k, (client, trunk) in enumerate(zip(clients, trunks, strict=True)):
            optimizer = torch.optim.AdamW(client.parameters(), 1e-2)
            for images, labels in federation.batches(k, server_round):
                logits = logits_of(client, trunk, images)
                loss = F.cross_entropy(logits, labels)
                loss = loss + fp.distillation_loss(logits, labels, teachers[trunk.dim])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                images, labels = federation.own(k)
                logits = logits_of(client, trunk, images)
                correct = logits.argmax(1) == labels
                entries.append(fp.class_means(logits, labels, num_classes=10, keep=correct))
        if teach:
            teachers = fp.heterogeneous_means(entries, dims)
        predictors = [partial(logits_of, *pair) for pair in zip(clients, trunks, strict=True)]
        history.append(torch.tensor([federation.accuracy(predict) for predict in predictors]))
        bar.write(f"{name}, round {server_round + 1}: {100 * history[-1].mean():.1f} %")
    return torch.stack(history)


def main() -> None:
    parser = digits.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    federation = digits.federation(few_images, rounds=16, steps=8, quick=args.quick)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fp.plots.partition(federation.labels, federation.shards, axes=left)
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))  # next to the bars
    final = []
    for teach in (False, True):
        means = 100 * federate(federation, teach=teach).mean(1)
        final.append(means[-1])
        right.plot(range(1, len(means) + 1), means, label="FedHPL" if teach else "alone")
    right.set(xlabel="round", ylabel="accuracy in %, mean over clients")
    right.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "fedhpl.png", dpi=120)
    print(
        f"The mean client reaches {final[1]:.1f} % with FedHPL and {final[0]:.1f} % alone. "
        f"Picture: {args.out / 'fedhpl.png'}"
    )


if __name__ == "__main__":
    main()
