"""FedOTP: each client has a shared and a private text context, matched by optimal transport.

The method is by Li et al. (2024). Five clients hold handwritten digits on cluttered canvases, and
a tiny CLIP was trained on printed digits::

    python examples/studies/fedotp.py

With ``--full``, the study makes the tables of its page. With weights and data, this command runs
the setting of the paper::

    python examples/studies/fedotp.py --model ViT-B-16 --pretrained openai \
        --dataset cifar10 --root DIR --partition pathological --clients 10
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from embedded.clip_tasks import ClipTask
from studies import fedotp_report
from studies.memory import rounds, variant

# Numbers of shared and private contexts, and the rule that matches images to them.
ROWS = {
    "zero-shot": (0, 0, "class token"),
    "local CoOp": (0, 1, "class token"),
    "local, two contexts": (0, 2, "partial"),
    "PromptFL": (1, 0, "class token"),
    "PromptFL, two contexts": (2, 0, "averaging"),
    "shared + private, class token": (1, 1, "class token"),
    "FedOTP, averaging": (1, 1, "averaging"),
    "FedOTP, classical": (1, 1, "classical"),
    "FedOTP": (1, 1, "partial"),
}
MASSES = (0.2, 0.8, 1.0)


def matcher(kind: str, scale: float, args: Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a function of image tokens (pooled first) and text (prompts, classes, dim)."""
    if kind == "class token":
        return lambda tokens, text: torch.stack(
            [fp.cosine_logits(tokens[:, 0], each, scale=scale) for each in text]
        ).mean(0)
    solver = (
        fp.transport.independent
        if kind == "averaging"
        else partial(fp.transport.newton, epsilon=args.epsilon)
    )
    match = partial(
        fp.transport_logits,
        scale=scale,
        solver=solver,
        mass=args.mass if kind == "partial" else 1.0,
    )
    return lambda tokens, text: match(tokens[:, 1:], text)


def new_client(task: ClipTask, num_shared: int, num_private: int, args: Namespace) -> nn.ModuleDict:
    """Make a client's shared and private contexts as two modules; only the first is collected."""
    if num_shared + num_private == 0:
        return nn.ModuleDict(
            {"private": fp.ContextPrompts(task.tower.dim, init=task.tower.words("a photo of a"))}
        )
    # All clients start with equal contexts.
    generator = fp.stream_generator(args.seed, server_round=0, purpose="contexts")
    new = partial(fp.ContextPrompts, task.tower.dim, length=args.num_context, generator=generator)
    numbers = {"shared": num_shared, "private": num_private}
    return nn.ModuleDict(
        {name: new(num_contexts=number) for name, number in numbers.items() if number}
    ).to(args.device)


def features(client: nn.ModuleDict, task: ClipTask) -> Tensor:
    """Encode all class names in a client's contexts (prompts, classes, dim), shared ones first."""
    return task.tower(
        fp.prompted_text(torch.cat([contexts() for contexts in client.values()]), task.names)
    )


def federate(
    name: str, task: ClipTask, shards: list[np.ndarray], args: Namespace
) -> tuple[nn.ModuleList, dict[int, Tensor], fp.Ledger]:
    """Run one row; return clients, accuracy (clients, cells) after some rounds, and a ledger."""
    num_shared, num_private, kind = ROWS[name]
    match, steps = matcher(kind, task.scale, args), args.steps if num_shared + num_private else 0
    clients = nn.ModuleList([new_client(task, num_shared, num_private, args) for _ in shards])
    values = fp.snapshot(clients[0]["shared"]) if num_shared else {}
    server, ledger = fp.overwrite(), fp.Ledger()
    memory = Namespace(
        clients=clients, values=values, state=server.init(values), history={}, ledger=ledger
    )
    for server_round in rounds(memory, args.rounds, name, args):
        payloads = []
        for k, (client, shard) in enumerate(zip(clients, shards, strict=True)):
            optimizer = task.recipe.make_optimizer(client.parameters(), server_round / args.rounds)
            batches = task.train.training(
                shard,
                args.device,
                size=args.batch_size,
                steps=steps,
                epochs=args.epochs,
                generator=fp.stream_generator(args.seed, server_round=server_round, client=k),
            )
            for tokens, labels in batches:
                loss = F.cross_entropy(match(tokens, features(client, task)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if num_shared:
                payloads.append(fp.collect(client["shared"], weight=len(shard)))
                ledger.record(payloads[-1], direction="up", client=k, server_round=server_round)
        if num_shared:
            mean = fp.weighted_mean(payloads)
            memory.values, memory.state = server.step(memory.values, mean, memory.state)
            for k, client in enumerate(clients):
                fp.load_values(client["shared"], memory.values)
                ledger.record(memory.values, direction="down", client=k, server_round=server_round)
        if (server_round + 1) % args.every == 0 or server_round + 1 == args.rounds:
            with torch.no_grad():
                predict = [partial(match, text=features(client, task)) for client in clients]
            accuracy = [task.accuracy(each, args.device) for each in predict]
            memory.history[server_round + 1] = torch.stack(accuracy)
    return clients, memory.history, ledger


@torch.no_grad()
def plans(
    client: nn.ModuleDict, task: ClipTask, index: int, args: Namespace
) -> dict[float, Tensor]:
    """Compute transport plans between the patches of a test image and the contexts of its class.

    There is one plan for each of three masses, in units of the mass of a patch.
    """
    patches = F.normalize(task.test.tokens[index, 1:].float(), dim=-1)
    text = F.normalize(features(client, task)[:, task.test.labels[index]], dim=-1).cpu()
    a, b = torch.full((len(patches),), 1 / len(patches)), torch.full((len(text),), 1 / len(text))
    solve = partial(fp.transport.newton, 1 - patches @ text.T, a, epsilon=args.epsilon)
    return {mass: solve(mass * b).plan * len(patches) for mass in MASSES}


def untrained(args: Namespace) -> str:
    """Classify the test digits with "a photo of a ...", without training, for three seeds."""
    kinds = {"class token": ("class token", 1.0), "averaging": ("averaging", 1.0)} | {
        f"mass {mass}": ("partial", mass) for mass in MASSES
    }
    lines = []
    for smallest, largest in ((32, 32), (16, 24), (12, 16)):
        accuracy = {label: [] for label in kinds}
        for seed in range(3):
            task = fedotp_report.load_task(
                Namespace(**vars(args) | {"smallest": smallest, "largest": largest, "seed": seed})
            )
            with torch.no_grad():
                text = features(new_client(task, 0, 0, args), task)
            for label, (kind, mass) in kinds.items():
                match = matcher(kind, 1.0, Namespace(epsilon=args.epsilon, mass=mass))
                by_cell = task.accuracy(partial(match, text=text), args.device)
                accuracy[label].append(
                    float(by_cell @ task.counts(task.test).float() / len(task.test.labels))
                )
        lines.append(
            [
                f"{smallest} to {largest} of 32 pixels",
                *map(fedotp_report.mean_and_deviation, accuracy.values()),
            ]
        )
    return fedotp_report.table(["side of the digit", *kinds], lines)


def full(args: Namespace) -> str:
    """Run every row of the documentation's tables for three seeds."""
    domains = {"domains": ["plain", "inverted", "noisy"]}
    settings = {
        "filling the canvas, Dirichlet 0.3": {"smallest": 32, "largest": 32},
        "cluttered, Dirichlet 0.3": {},
        "cluttered, two classes each": {"partition": "pathological"},
        "cluttered, by domain": {"partition": "domain"} | domains,
        "cluttered, by domain and Dirichlet 0.3": {"partition": "both"} | domains,
    }
    lines = []
    for setting, flags in settings.items():
        seeds = [
            fedotp_report.run(federate, list(ROWS), variant(args, **flags, seed=seed, every=1000))
            for seed in range(3)
        ]
        lines += [
            [setting, *line]
            for line in fedotp_report.against([runs for _, runs in seeds], "FedOTP, averaging")
        ]
    return "\n\n".join(
        [untrained(args), fedotp_report.table(["setting", "method", *fedotp_report.COLUMNS], lines)]
    )


def main() -> None:
    parser = fedotp_report.flags("FedOTP")
    parser.add_argument("--epsilon", type=float, default=0.1, help="weight of the plan's entropy")
    parser.add_argument(
        "--mass", type=float, default=0.8, help="share of each image's mass that is moved"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="run every row, not only the method and its nearest baselines",
    )
    args = parser.parse_args()
    if args.full:
        print(full(args))
        return
    task, runs = fedotp_report.run(
        federate,
        list(ROWS) if args.all else ["zero-shot", "local CoOp", "PromptFL", "FedOTP"],
        args,
    )
    fedotp_report.draw_plans(
        partial(plans, runs["FedOTP"].clients[0], task, args=args),
        task,
        runs["FedOTP"].result,
        args.out,
    )
    print(fedotp_report.summary(runs, args.out))


if __name__ == "__main__":
    main()
