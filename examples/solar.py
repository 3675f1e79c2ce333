"""Solar cells: clients learn to find defects, each alone, and together (FedVPT-D).

Six clients have photographs of cells in different mixes of module types and defects. All share a
frozen DINOv2 ViT-S/14, and train a head and prompts in its last blocks. The other blocks run once::

    pip install -e ".[photographs]"
    python examples/solar.py --pretrained
"""

import argparse
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

NUM_CLIENTS, START, SIZE = 6, 9, 56  # START is the first block with prompts, SIZE in pixels


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--weights", type=Path, help="file of DINOv2 ViT-S/14, names of timm")
    parser.add_argument("--pretrained", action="store_true", help="timm downloads the weights")
    parser.add_argument("--quick", action="store_true", help="two rounds on a few images")
    args = parser.parse_args()
    if not (args.weights or args.pretrained or args.quick):
        parser.error("add --pretrained or --weights FILE; only --quick has random weights")
    torch.manual_seed(0)
    cells, rng, rounds, steps = solar_cells(), np.random.default_rng(0), 8, 12
    train, test = split_by_runs(cells, torch.arange(len(cells.labels)), share=0.25, rng=rng)
    if args.quick:
        rounds, steps, train, test = 2, 2, train[::8], test[::8]
    pairs, chosen = (cells.domains * 4 + cells.labels)[train], torch.cat([train, test])
    labels, test = (cells.labels[chosen] >= 2).long(), torch.arange(len(train), len(chosen))
    shards = fp.data.dirichlet(pairs, NUM_CLIENTS, alpha=0.3, min_size=20, generator=rng)
    network = load_dino(args.weights, pretrained=args.pretrained, image_size=SIZE)
    trunk = fp.vit_trunk(in_bfloat16(network))
    tokens = encoded(partial(fp.encode_front, trunk, start=START), cells.images[chosen], SIZE)
    prompts = fp.LayeredPrompts(4, trunk, layers=range(START, trunk.depth))
    fp.initialize_at(prompts, fp.mean_patch_tokens(trunk, prepared(cells.images[train[:64]], SIZE)))
    model = nn.ModuleDict({"prompts": prompts, "head": nn.Linear(trunk.num_features, 2)})

    def predict(positions: Tensor) -> Tensor:
        found = fp.encode_from(trunk, tokens[positions], prompts(), start=START)
        return model["head"](found.pooled)

    @torch.no_grad()
    def accuracy() -> float:
        guesses = torch.cat([predict(some).argmax(1) for some in test.split(128)])
        table = fp.selection.contingency_table(guesses, labels[test], 2, 2)
        return 100 * fp.metrics.balanced_accuracy(table)

    def train_client(client: int, server_round: int) -> None:
        rates = [(model["prompts"], 1e-2), (model["head"], 1e-3)]
        groups = [{"params": part.parameters(), "lr": rate} for part, rate in rates]
        optimizer, shard = torch.optim.AdamW(groups), torch.from_numpy(shards[client])
        draw = fp.stream_generator(0, server_round=server_round, client=client)
        for _ in range(steps):
            own = shard[torch.randperm(len(shard), generator=draw)[:16]]
            loss = F.cross_entropy(predict(own), labels[own])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    start, last, server = fp.snapshot(model), {}, fp.overwrite()
    broadcast, state = start, server.init(start)
    for name in ("alone", "together"):
        values = [start] * NUM_CLIENTS
        for server_round in (bar := tqdm(range(rounds), unit="round", desc=name)):
            payloads, before = [], []
            for client in range(NUM_CLIENTS):
                fp.load_values(model, values[client])
                train_client(client, server_round)
                payloads.append(fp.collect(model, weight=len(shards[client])))
                values[client] = fp.snapshot(model)
                before.append(accuracy() if name == "alone" else 0.0)
            last[name] = sum(before) / NUM_CLIENTS
            if name == "together":
                broadcast, state = server.step(broadcast, fp.weighted_mean(payloads), state)
                fp.load_values(model, broadcast)
                values = [broadcast] * NUM_CLIENTS
                last[name] = accuracy()
            bar.write(f"{name}, round {server_round + 1}: {last[name]:.1f} %")
    print(
        f"Alone, clients have a balanced accuracy of {last['alone']:.1f} % on test cells, and "
        f"the average of all clients has {last['together']:.1f} %: each has seen few cells of "
        f"some types and levels. A client sends {fp.num_bytes(payloads[0]):,} bytes a round."
    )


if __name__ == "__main__":
    main()
