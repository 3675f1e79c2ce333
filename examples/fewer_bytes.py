"""Fewer bytes: late prompts, and a codec between each client and the server.

Five clients average a head and prompts of the last two blocks. The first blocks run once for all
rounds. Clients send what they changed since the broadcast, in whole numbers of 8 bits or as the
largest tenth of the numbers; what is left out is added to the next message (error feedback)::

    python examples/fewer_bytes.py
"""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from fedprompt import samples
from fedprompt.interfaces import ResumableTrunk

NUM_CLIENTS, START = 5, 2  # of 4 blocks
ADD = partial(torch.optim.SGD, lr=1.0, maximize=True)  # adds the mean change to the values
CODECS = {"float32": None, "int8": fp.codecs.int8(), "top 10 %": fp.codecs.top_k(fraction=0.1)}


def federate(trunk: ResumableTrunk, federation: digits.Federation, name: str) -> tuple[float, int]:
    """Return the accuracy after the last round, and the bytes that one client sends in it."""
    codec = CODECS[name]
    torch.manual_seed(0)
    prompts = fp.LayeredPrompts(8, trunk, layers=range(START, trunk.depth), replace=True)
    model = nn.ModuleDict({"prompts": prompts, "head": nn.Linear(trunk.dim, 10)})

    def predict(tokens: Tensor) -> Tensor:
        return model["head"](fp.encode_from(trunk, tokens, model["prompts"](), start=START).pooled)

    values, server = fp.snapshot(model), fp.descend(ADD)
    state, memory = server.init(values), {}
    for server_round in (bar := tqdm(range(federation.rounds), name, unit="round")):
        payloads = []
        for client in range(NUM_CLIENTS):
            fp.load_values(model, values)
            optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
            for tokens, labels in federation.batches(client, server_round):
                loss = F.cross_entropy(predict(tokens), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            new = fp.collect(model, weight=len(federation.shards[client]))
            change = message = fp.delta(new, values)
            if codec is not None:
                left_out = memory[client] if client in memory else codec.init(change)
                message, memory[client] = codec.encode(change, left_out)
                change = codec.decode(message, like=change)  # on the server
            payloads.append(change)
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        accuracy = federation.accuracy(predict)
        bar.write(f"{name}, round {server_round + 1}: {100 * accuracy:.1f} %")
    return accuracy, fp.num_bytes(message)


def main() -> None:
    quick = digits.parser(__doc__).parse_args().quick
    split = partial(fp.data.dirichlet, num_clients=NUM_CLIENTS, alpha=0.3, min_size=20)
    trunk = fp.vit_trunk(samples.vit("B"))
    front = partial(fp.encode_front, trunk, start=START)
    federation = digits.federation(split, rounds=6, steps=12, quick=quick, encode=front)
    runs = {name: federate(trunk, federation, name) for name in CODECS}
    parts = [f"{name} {100 * score:.1f} % for {sent:,}" for name, (score, sent) in runs.items()]
    print(f"Accuracy, and bytes that a client sends in a round: {'; '.join(parts)}.")


if __name__ == "__main__":
    main()
