"""DP-SGD on prompts: every single image is protected at a stated epsilon.

Five clients with 240 handwritten digits each average prompts and heads. They share one tiny vision
transformer::

    python examples/studies/private.py

With ``--full``, the study makes the table of its page (three seeds). A client clips the gradient of
every image and adds noise in every step, so that all its payloads are protected. No other party
has to be trusted. The accountant is from dp-accounting.
"""

import sys
from pathlib import Path

# Makes `studies` and `embedded` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial

import dp_accounting
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from torch import Tensor
from tqdm import tqdm

import fedprompt as fp
from embedded.tasks import Backbone, Split, Task
from studies.prompted import class_accuracy, flags, logits, new_model, run
from studies.tables import mean_and_deviation, table

ROWS = {"no privacy": None, "clipping alone": np.inf, "ε = 8": 8.0, "ε = 3": 3.0, "ε = 1": 1.0}


def training(multiplier: float, *, rate: float, steps: int) -> dp_accounting.DpEvent:
    """Describe the steps that one image may take part in to an accountant."""
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
    return dp_accounting.SelfComposedDpEvent(step, steps)


@cache
def multiplier_for(epsilon: float, *, delta: float, rate: float, steps: int) -> float:
    """Compute the noise multiplier of `steps` steps; the coarse grid never underestimates it."""
    accountant = partial(PLDAccountant, value_discretization_interval=1e-3)
    bracket = dp_accounting.ExplicitBracketInterval(0.3, 100)
    return dp_accounting.calibrate_dp_mechanism(
        accountant, partial(training, rate=rate, steps=steps), epsilon, delta, bracket
    )


def batch_of(
    split: Split, indices: Tensor, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return augmented images and their labels; the batch may be empty."""
    images, labels = split.dataset[indices]
    if len(indices):
        images = split.augment(images, generator)
    return images.to(device), labels.to(device)


def gradient(
    model, backbone, batch, *, max_norm, multiplier, expected, generator
) -> dict[str, Tensor]:
    """Average clipped gradients of single images with noise; if `max_norm` is None, plainly."""
    images, labels = batch
    copies = fp.privacy.per_sample(model, len(images))
    F.cross_entropy(logits(copies, backbone, images), labels, reduction="sum").backward()
    own = {name: parameter.grad for name, parameter in copies.named_parameters()}
    if max_norm is None:
        return {name: each.sum(0) / expected for name, each in own.items()}
    total = fp.privacy.clipped_sum(own, max_norm=max_norm)
    return fp.privacy.noisy_mean(
        total,
        multiplier=multiplier,
        max_norm=max_norm,
        expected_batch_size=expected,
        generator=generator,
    )


def client_round(
    model: nn.ModuleDict,
    backbone: Backbone,
    task: Task,
    shard: Tensor,
    optimizer: torch.optim.Optimizer,
    stream: Callable[..., torch.Generator],
    private: dict[str, float | None],
    args: Namespace,
) -> dict[str, fp.Weighted]:
    """Take private steps on Poisson batches of a client's images; return its payload."""
    draw, vary = stream(purpose="batches"), stream(purpose="augmentation")
    noise = {"generator": stream(purpose="noise"), "expected": args.rate * len(shard)}
    for _ in range(args.steps):
        chosen = shard[fp.privacy.poisson_batch(len(shard), rate=args.rate, generator=draw)]
        batch = batch_of(task.train, chosen, vary, args.device)
        mean = gradient(model, backbone, batch, **noise, **private)
        for key, parameter in model.named_parameters():
            parameter.grad = mean[key].to(parameter)
        optimizer.step()
    return fp.collect(model, weight=1)


def federate(
    name: str, task: Task, backbones: list[Backbone], shards: list[np.ndarray], args: Namespace
) -> tuple[Tensor, fp.Ledger]:
    """Run one row of the table; return accuracy (rounds, classes) and a ledger."""
    epsilon, backbone = ROWS[name], backbones[0]
    multiplier = 0.0
    if epsilon and epsilon < np.inf:
        sampled = {"rate": args.rate, "steps": args.rounds * args.steps}
        multiplier = multiplier_for(epsilon, delta=args.delta, **sampled)
    private = {"max_norm": args.max_norm if epsilon else None, "multiplier": multiplier}
    model = new_model(backbone, task.num_classes, args)
    values, history, ledger = fp.snapshot(model), [], fp.Ledger()
    server = fp.overwrite()
    state = server.init(values)
    described = f"{name}, noise {multiplier:.2f}"
    for server_round in tqdm(range(args.rounds), desc=described, unit="round"):
        payloads = []
        for k, shard in enumerate(map(torch.as_tensor, shards)):
            fp.load_values(model, values)
            scale = (1 + np.cos(np.pi * server_round / args.rounds)) / 2
            rate = args.learning_rate if epsilon else args.plain_learning_rate
            optimizer = torch.optim.SGD(model.parameters(), lr=scale * rate)
            stream = partial(fp.stream_generator, args.seed, server_round=server_round, client=k)
            payloads.append(
                client_round(model, backbone, task, shard, optimizer, stream, private, args)
            )
            ledger.record(payloads[-1], direction="up", client=k, server_round=server_round)
        values, state = server.step(values, fp.weighted_mean(payloads), state)
        fp.load_values(model, values)
        predict = partial(logits, model, backbone)
        history.append(class_accuracy(predict, task, args.device))
    return torch.stack(history), ledger


def main() -> None:
    parser = flags("DP-SGD on prompts")
    parser.add_argument(
        "--rate", type=float, default=0.2, help="probability of each image to be in a batch"
    )
    parser.add_argument(
        "--max-norm", type=float, default=1.0, help="maximum norm of the gradient of one image"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=3.0, help="learning rate with clipping"
    )
    parser.add_argument(
        "--plain-learning-rate", type=float, default=0.9, help="learning rate without clipping"
    )
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.set_defaults(backbones=["B"], partition="iid", rounds=10, steps=4, num_prompts=4)
    args = parser.parse_args()
    if args.dataset != "digits":
        parser.error("batches are drawn from tensors: this study supports only the digits")
    results = [
        run(federate, list(ROWS), Namespace(**vars(args) | {"seed": seed}))
        for seed in (range(3) if args.full else [args.seed])
    ]
    accuracy = {name: [result[name].final() for result in results] for name in ROWS}
    print(
        table(
            ["", "accuracy"],
            [[name, mean_and_deviation(values)] for name, values in accuracy.items()],
        )
    )


if __name__ == "__main__":
    main()
