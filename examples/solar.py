"""Solar cells: clients learn to find defects together, and each alone.

Six clients have photographs of solar cells in different mixes of module types and defects. All
share a frozen DINOv2 ViT-S/14. They train a head, and prompts in its last blocks, whose other
blocks run once for all images. The server averages both (FedVPT-D), or there is no server::

    pip install -e ".[photographs]"
    python examples/solar.py --pretrained
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import fedprompt as fp
from photographs import encoded, in_bfloat16, load_dino, prepared, solar_cells, split_by_runs

NUM_CLIENTS, START, SIZE = 6, 9, 56  # first block with prompts, and pixels


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--weights", type=Path, help="file of DINOv2 ViT-S/14, names of timm")
    parser.add_argument("--pretrained", action="store_true", help="timm downloads the weights")
    parser.add_argument("--quick", action="store_true", help="two rounds on a few images")
    args = parser.parse_args()
    if not (args.weights or args.pretrained or args.quick):
        sys.exit("Weights are missing: add --pretrained, or --weights FILE. --quick needs none.")
    torch.manual_seed(0)
    cells, draw, rounds, steps = solar_cells(), np.random.default_rng(0), 8, 12
    train, test = split_by_runs(cells, torch.arange(len(cells.labels)), share=0.25, rng=draw)
    if args.quick:
        rounds, steps, train, test = 2, 2, train[::8], test[::8]
    chosen = torch.cat([train, test])
    labels, pairs = (cells.labels >= 2).long()[chosen], (cells.domains * 4 + cells.labels)[train]
    test = torch.arange(len(train), len(chosen))
    divide = partial(fp.dirichlet, num_clients=NUM_CLIENTS, alpha=0.3, min_size=20, generator=draw)
    shards = [torch.from_numpy(own) for own in divide(pairs)]
    network = load_dino(args.weights, pretrained=args.pretrained, image_size=SIZE)
    trunk = fp.vit_trunk(in_bfloat16(network))
    tokens = encoded(partial(fp.front_tokens, trunk, start=START), cells.images[chosen], SIZE)
    model = nn.ModuleDict(
        {
            "prompts": fp.LayeredPrompts(4, trunk, layers=range(START, trunk.depth)),
            "norm": nn.LayerNorm(trunk.num_features, elementwise_affine=False),
            "head": nn.Linear(trunk.num_features, 2),
        }
    )
    some = prepared(cells.images[train[:64]], SIZE)
    fp.start_at_tokens(model["prompts"], fp.mean_tokens(trunk, some))

    def predict(images: Tensor) -> Tensor:
        found = fp.encode_prompted(trunk, tokens[images], model["prompts"](), start=START)
        return model["head"](model["norm"](found.pooled))

    @torch.no_grad()
    def accuracy() -> float:
        guesses = torch.cat([predict(images).argmax(1) for images in test.split(128)])
        table = fp.selection.contingency_table(guesses, labels[test], 2, 2)
        return fp.metrics.balanced_accuracy(table)

    def train_client(client: int, server_round: int) -> None:
        groups = [{"params": model["prompts"].parameters()}]
        groups += [{"params": model["head"].parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, 1e-2)
        stream = fp.stream_generator(0, server_round=server_round, client=client)
        for _ in range(steps):
            own = shards[client][torch.randperm(len(shards[client]), generator=stream)[:16]]
            loss = F.cross_entropy(predict(own), labels[own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    start, final = fp.snapshot(model), {}
    for name in ("local training", "FedVPT-D"):
        values = [start] * NUM_CLIENTS
        for server_round in (bar := tqdm(range(rounds), unit="round", desc=name)):
            payloads, alone = [], []
            for client in range(NUM_CLIENTS):
                fp.load_values(model, values[client])
                train_client(client, server_round)
                payloads.append(fp.collect(model, weight=len(shards[client])))
                values[client] = fp.snapshot(model)
                if name == "local training":
                    alone.append(accuracy())
            if name == "FedVPT-D":
                mean = {key: each.value for key, each in fp.weighted_mean(payloads).items()}
                values = [mean] * NUM_CLIENTS
                fp.load_values(model, mean)
                alone = [accuracy()]
            final[name] = 100 * sum(alone) / len(alone)
            bar.write(f"{name}, round {server_round + 1}: {final[name]:.1f} %")
    print(
        f"Alone, clients have a balanced accuracy of {final['local training']:.1f} % on modules "
        f"of nobody, and together {final['FedVPT-D']:.1f} %. A client sends "
        f"{fp.num_bytes(payloads[0]):,} bytes a round."
    )


if __name__ == "__main__":
    main()
