"""Fewer bytes: FedAvg of prompts and heads, with a codec between each client and the server.

Five clients hold real handwritten digits and share one tiny vision transformer::

    python examples/studies/fewer_bytes.py

With ``--full``, the study makes the table of its page (three seeds, ten rounds). Clients send their
changes since the broadcast as safetensors blobs. The numbers that a sparse codec leaves out are
read as 0. The server adds the mean change.
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import fedprompt as fp
from embedded.tasks import Backbone, Task
from studies.prompted import class_accuracy, flags, logits, new_model, run
from studies.tables import mean_and_deviation, table

# Adds the mean change to the values.
ADD = partial(torch.optim.SGD, lr=1.0, maximize=True)
# The codec, and whether clients use error feedback.
ROWS = {
    "float32, no codec": (None, False),
    "float16": (fp.codecs.float16(), False),
    "int8": (fp.codecs.int8(), False),
    "top 10 %": (fp.codecs.top_k(fraction=0.1), False),
    "top 10 %, error feedback": (fp.codecs.top_k(fraction=0.1), True),
    "top 1 %": (fp.codecs.top_k(fraction=0.01), False),
    "top 1 %, error feedback": (fp.codecs.top_k(fraction=0.01), True),
}


def train(
    model: nn.ModuleDict,
    backbone: Backbone,
    batches: Iterator[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Take one step on each batch."""
    for images, labels in batches:
        loss = F.cross_entropy(logits(model, backbone, images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def federate(
    name: str, task: Task, backbones: list[Backbone], shards: list[np.ndarray], args: Namespace
) -> tuple[Tensor, fp.Ledger]:
    """Run one row of the table; return accuracy (rounds, classes) and a ledger."""
    codec, remembers = ROWS[name]
    backbone = backbones[0]
    model = new_model(backbone, task.num_classes, args)
    values, server = fp.snapshot(model), fp.descend(ADD)
    state, memory, history, ledger = server.init(values), {}, [], fp.Ledger()
    for server_round in tqdm(range(args.rounds), desc=name, unit="round"):
        payloads = []
        for k, shard in enumerate(shards):
            fp.load_values(model, values)
            optimizer = task.recipe.make_optimizer(model.parameters(), server_round / args.rounds)
            stream = fp.stream_generator(args.seed, server_round=server_round, client=k)
            batches = task.train.training(
                shard, args.device, size=args.batch_size, steps=args.steps, generator=stream
            )
            train(model, backbone, batches, optimizer)
            change = message = fp.delta(fp.collect(model, weight=len(shard)), values)
            if codec:
                before = memory[k] if remembers and k in memory else codec.init(change)
                message, memory[k] = codec.encode(change, before)
            header = fp.wire.Header(server_round=server_round, client_id=str(k))
            blob = fp.wire.encode_payload(message, header=header)
            ledger.record(
                message, direction="up", client=k, server_round=server_round, framed=len(blob)
            )
            arrived, _ = fp.wire.decode_payload(
                blob, expect=fp.wire.Expected(message), max_bytes=len(blob)
            )
            payloads.append(codec.decode(arrived, like=change) if codec else arrived)
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        predict = partial(logits, model, backbone)
        history.append(class_accuracy(predict, task, args.device))
    return torch.stack(history), ledger


def measure(args: Namespace) -> str:
    """Run every row for each seed, and compare bytes and accuracy with the first row."""
    seeds = range(3) if args.full else [args.seed]
    results = [
        run(federate, list(ROWS), Namespace(**vars(args) | {"seed": seed})) for seed in seeds
    ]
    lines = []
    for name in ROWS:
        framed = {result[name].ledger.total(direction="up", framed=True) for result in results}
        plain = results[0][next(iter(ROWS))].ledger.total(direction="up", framed=True)
        accuracy, first = (
            np.array([result[row].final() for result in results])
            for row in (name, next(iter(ROWS)))
        )
        gain = "" if name == next(iter(ROWS)) else mean_and_deviation(accuracy - first)
        (sent,) = framed  # equal for all seeds, because it depends only on the model
        lines.append([name, sent, f"{plain / sent:.1f}", mean_and_deviation(accuracy), gain])
    return table(["codec", "bytes up", "times fewer", "accuracy", "gain"], lines)


def main() -> None:
    parser = flags("Codecs")
    parser.set_defaults(backbones=["B"])
    args = parser.parse_args()
    args.rounds = args.rounds or (10 if args.full else None)
    print(measure(args))


if __name__ == "__main__":
    main()
