"""Collapse of SGPT's keys on features in a narrow cone, and its cure: centered queries.

Clients train four keys and nothing else. The default uses the digits of five domains and the
embedded backbone, without a download::

    python examples/studies/narrow_cone.py

With weights of DINOv2 ViT-S/14 in a file, the images are the 2,624 photographs of solar cells from
``pip install elpv-dataset``, at 70 pixels; clients have one of two types of cells::

    python examples/studies/narrow_cone.py --weights FILE
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

# Makes `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.shifts import DOMAINS, feature_shift
from fedprompt import samples

NUM_GROUPS, NUM_CLIENTS, BATCH_SIZE = 4, 10, 32


class Photographs(NamedTuple):
    """Features of the frozen backbone, and the domain of each image."""

    features: Tensor
    domains: Tensor


def digits() -> Photographs:
    """Encode the embedded digits of five domains."""
    trunk = fp.vit_trunk(samples.vit("B"))
    train = feature_shift(seed=0, num_clients=len(DOMAINS), validate=False).train
    images = torch.stack([image for image, _ in train.split.dataset])
    return Photographs(encode(trunk, images), train.truth)


def solar_cells(weights: str) -> Photographs:
    """Encode photographs of solar cells with DINOv2; the domain is the type of the cell."""
    import timm
    from elpv_dataset.utils import load_dataset

    photographs, _, types = load_dataset()
    gray = torch.from_numpy(photographs).float()[:, None] / 255
    small = [F.interpolate(part, 70, mode="bicubic", antialias=True) for part in gray.split(100)]
    model = timm.create_model(
        "vit_small_patch14_dinov2",
        pretrained=True,
        pretrained_cfg_overlay={"file": weights},
        num_classes=0,
        img_size=70,
    )
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    images = (torch.cat(small).expand(-1, 3, -1, -1) - mean) / std
    return Photographs(
        encode(fp.vit_trunk(model.float()), images), torch.from_numpy(types == "poly").long()
    )


def encode(trunk: fp.Trunk, images: Tensor) -> Tensor:
    return fp.precompute(
        lambda batch: fp.encode_prompted(trunk, batch).pooled, images, batch_size=64
    )


def centered(features: Tensor, shards: list[np.ndarray]) -> Tensor:
    """Subtract the mean over clients, which they send once, before the first round."""
    model = nn.ModuleDict({"queries": fp.selection.CenteredQueries(features.shape[1])})
    means = [{"queries.center": fp.selection.query_mean(features[own])} for own in shards]
    fp.load_values(model, fp.weighted_mean(means))
    return model["queries"](features)


def train_keys(
    query: Tensor,
    shards: list[np.ndarray],
    *,
    rounds: int,
    steps: int,
    learning_rate: float,
    seed: int,
) -> Tensor:
    """Train keys in a federation, and return the group of each image."""
    generator = torch.Generator().manual_seed(seed)
    selector = fp.SelectionKeys(NUM_GROUPS, query.shape[1], generator=generator)
    values, usage, server = fp.snapshot(selector), torch.zeros(NUM_GROUPS), fp.ema(decay=0.5)
    state = server.init(values)
    for server_round in range(rounds):
        payloads = []
        for client, shard in enumerate(shards):
            draw = fp.stream_generator(seed, server_round=server_round, client=client)
            fp.load_values(selector, values)
            selector.start_round(usage)
            optimizer = torch.optim.SGD(selector.parameters(), learning_rate)
            for _ in range(steps):
                batch = query[shard[torch.randperm(len(shard), generator=draw)[:BATCH_SIZE]]]
                loss = fp.key_loss(batch, selector.keys, selector(batch).indices)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            rows = {"keys": selector.counts}
            payloads.append(fp.collect(selector, weight=len(shard), rows=rows))
        mean = fp.weighted_mean(payloads)
        values, state = server.step(values, mean, state)
        usage = usage + mean["keys"].weight
    return fp.select_nearest(query, values["keys"]).indices


def main() -> None:
    parser = argparse.ArgumentParser(description="Collapse of keys in a narrow cone")
    parser.add_argument("--weights", help="file with the weights of DINOv2 ViT-S/14")
    parser.add_argument("--quick", action="store_true", help="one seed, two rounds of two steps")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.steps, args.seeds = 2, [2], 1
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The mean cosine of queries")

    features, domains = solar_cells(args.weights) if args.weights else digits()
    draw = np.random.default_rng(0)
    shards = fp.by_domain(domains, NUM_CLIENTS, generator=draw)
    queries = {
        "raw": features, "ReLU": features.relu(), "centered": centered(features, shards),
    }  # fmt: skip
    print("| queries | mean cosine | steps in a round | effective groups | purity |")
    print("|---|---:|---:|---:|---:|")
    for name, query in queries.items():
        for steps in args.steps:
            settings = {"rounds": args.rounds, "learning_rate": args.learning_rate, "steps": steps}
            runs = [
                summary(query, domains, shards, seed=seed, **settings) for seed in range(args.seeds)
            ]
            groups = " ".join(f"{run['effective_groups']:.1f}" for run in runs)
            purity = " ".join(f"{run['purity']:.2f}" for run in runs)
            cosine = runs[0]["mean_cosine"]
            print(f"| {name} | {cosine:.3f} | {steps} | {groups} | {purity} |", flush=True)


def summary(
    query: Tensor, domains: Tensor, shards: list[np.ndarray], **settings: float
) -> dict[str, float]:
    """Train keys, and summarize the groups of all images."""
    indices = train_keys(query, shards, **settings)
    table = fp.selection.contingency_table(indices, domains, NUM_GROUPS, int(domains.max()) + 1)
    return fp.selection.selection_health(table, query)


if __name__ == "__main__":
    main()
