"""FedAvg of visual prompts: clients train prompts and a head, and the server averages them.

Five clients hold different mixes of handwritten digits. All of them share one frozen vision
transformer; only 2,698 numbers are trained and sent (FedVPT). The second command goes on from a
file of the first, which belongs to this transformer and is refused for another one::

    python examples/fedavg.py --save prompts.safetensors
    python examples/fedavg.py --start prompts.safetensors
"""

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import digits
import fedprompt as fp
from fedprompt import samples

NUM_CLIENTS = 5


def flags() -> ArgumentParser:
    parser = digits.parser(__doc__)
    parser.add_argument("--start", type=Path, help="file of prompts and head to start from")
    parser.add_argument("--save", type=Path, help="file for the trained prompts and head")
    return parser


def main() -> None:
    args = flags().parse_args()
    split = partial(fp.data.dirichlet, num_clients=NUM_CLIENTS, alpha=0.3, min_size=20)
    federation = digits.federation(split, rounds=6, steps=12, quick=args.quick)
    torch.manual_seed(0)
    trunk = fp.vit_trunk(samples.vit("B"))
    model = nn.ModuleDict({"prompts": fp.DeepPrompts(8, trunk), "head": nn.Linear(trunk.dim, 10)})
    if args.start:
        fp.load_prompts(model, args.start, trunk=trunk)

    def predict(images: torch.Tensor) -> torch.Tensor:
        return model["head"](fp.encode_prompted(trunk, images, model["prompts"]()).pooled)

    values, server = fp.snapshot(model), fp.overwrite()
    state = server.init(values)
    for server_round in (bar := tqdm(range(federation.rounds), unit="round")):
        payloads, before = [], []
        for client in range(NUM_CLIENTS):
            fp.load_values(model, values)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for images, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(predict(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payloads.append(fp.collect(model, weight=len(federation.shards[client])))
            before.append(federation.accuracy(predict))
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        accuracy = federation.accuracy(predict)
        bar.write(f"round {server_round + 1}: {100 * accuracy:.1f} %")
    if args.save:
        fp.save_prompts(model, args.save, trunk=trunk)
    print(
        f"The average of {NUM_CLIENTS} clients recognizes {100 * accuracy:.1f} % of all digits, "
        f"the clients' own models before averaging {100 * sum(before) / len(before):.1f} %: "
        f"each has seen few examples of some classes. "
        f"Each client {fp.describe(model, payloads[0], trunk=trunk)}."
    )


if __name__ == "__main__":
    main()
