"""FedHPL: clients with different backbones tune prompts and teach each other by class logits.

Five clients with three different frozen vision transformers hold different mixes of handwritten
digits. They send mean logits of each class, never parameters (Ma et al., 2024)::

    python examples/fedhpl.py
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from embedded.vit import load_vit

SIZES = ("S", "B", "L", "S", "B")  # the backbone of each client


def logits_of(client: nn.ModuleDict, trunk: fp.Trunk, images: Tensor) -> Tensor:
    return client["head"](fp.encode_prompted(trunk, images, client["prompts"]()).pooled)


def federate(federation: digits.Federation, *, teach: bool) -> tuple[list[Tensor], Tensor]:
    """Return accuracy (clients,) after each round, and at the end (clients, classes)."""
    torch.manual_seed(0)
    trunks = [fp.vit_trunk(load_vit(size)) for size in SIZES]
    dims = [trunk.dim for trunk in trunks]
    clients = []
    for trunk in trunks:
        prompts = fp.DeepPrompts(8, trunk.dim, trunk.depth, patch_size=4)
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
        predict = [partial(logits_of, *pair) for pair in zip(clients, trunks, strict=True)]
        history.append(torch.tensor([federation.accuracy(each) for each in predict]))
        bar.write(f"{name}, round {server_round + 1}: {100 * history[-1].mean():.1f} %")
    return history, torch.stack([federation.class_accuracy(each) for each in predict])


def main() -> None:
    parser = digits.parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the picture")
    args = parser.parse_args()
    split = partial(fp.dirichlet, num_clients=len(SIZES), alpha=0.3, min_size=20)
    federation = digits.federation(split, rounds=6, steps=12, quick=args.quick)
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    fp.plots.partition(federation.labels, federation.shards, axes=left).legend(fontsize=6, ncols=2)
    final, missing = [], []
    for teach in (False, True):
        history, by_class = federate(federation, teach=teach)
        final.append(100 * history[-1].mean())
        missing.append(100 * by_class[federation.held() == 0].mean())
        means = 100 * torch.stack(history).mean(1)
        right.plot(range(1, len(means) + 1), means, label="FedHPL" if teach else "alone")
    right.set(xlabel="round", ylabel="accuracy in %, mean over clients")
    right.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / "fedhpl.png", dpi=120)
    print(
        f"FedHPL {final[1]:.1f} % against {final[0]:.1f} % alone; on classes that a client does "
        f"not hold, {missing[1]:.1f} % against {missing[0]:.1f} %: a class without images has no "
        f"loss that could use its teacher. Picture: {args.out / 'fedhpl.png'}"
    )


if __name__ == "__main__":
    main()
