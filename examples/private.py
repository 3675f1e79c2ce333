"""DP-SGD on prompts: every single image is protected, at a price in accuracy.

Five clients with 240 handwritten digits each average prompts and a head. A client clips the
gradient of every image and adds noise in every step, so that whatever it sends is
differentially private; dp-accounting computes the noise for a given epsilon::

    python examples/private.py
"""

from functools import partial

import dp_accounting
import torch
import torch.nn as nn
import torch.nn.functional as F
from dp_accounting.pld import PLDAccountant
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from fedprompt import samples

NUM_CLIENTS, RATE, MAX_NORM, DELTA = 5, 0.2, 1.0, 1e-4
NO_BOUND = 1e9  # a norm larger than that of any gradient


def training(multiplier: float, *, rate: float, steps: int) -> dp_accounting.DpEvent:
    """Describe steps on Poisson samples of a client's images to an accountant."""
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
    return dp_accounting.SelfComposedDpEvent(step, steps)


def noise_for(epsilon: float, *, steps: int) -> float:
    """Return the noise multiplier of `steps` steps; the coarse grid never underestimates it."""
    accountant = partial(PLDAccountant, value_discretization_interval=1e-3)
    bracket = dp_accounting.ExplicitBracketInterval(0.3, 100)
    event = partial(training, rate=RATE, steps=steps)
    return dp_accounting.calibrate_dp_mechanism(accountant, event, epsilon, DELTA, bracket)


def private_step(optimizer, model: nn.Module, copies: nn.Module, **noise) -> None:
    """Take a step with the noisy mean of the clipped gradients of copies, one for each image."""
    gradients = {name: copy.grad for name, copy in copies.named_parameters()}
    total = fp.privacy.clipped_sum(gradients, max_norm=noise["max_norm"])
    mean = fp.privacy.noisy_mean(total, **noise)
    for name, parameter in model.named_parameters():
        parameter.grad = mean[name].to(parameter)
    optimizer.step()


def federate(federation: digits.Federation, epsilon: float | None, seed: int | None) -> float:
    """Return the accuracy of the averaged model after the last round."""
    multiplier = noise_for(epsilon, steps=federation.rounds * federation.steps) if epsilon else 0.0
    secret = None if seed is None else torch.Generator().manual_seed(seed)
    noise = {"max_norm": MAX_NORM if epsilon else NO_BOUND, "generator": secret}
    torch.manual_seed(0)
    trunk = fp.vit_trunk(samples.vit("B"))
    model = nn.ModuleDict({"prompts": fp.DeepPrompts(4, trunk), "head": nn.Linear(trunk.dim, 10)})

    def logits_of(model: nn.Module, images: Tensor) -> Tensor:
        return model["head"](fp.encode_prompted(trunk, images, model["prompts"]()).pooled)

    name = f"epsilon {epsilon:g}, noise {multiplier:.2f}" if epsilon else "no privacy"
    for server_round in (bar := tqdm(range(federation.rounds), name, unit="round")):
        values, payloads = fp.snapshot(model), []
        for client in range(NUM_CLIENTS):
            fp.load_values(model, values)
            rate = (1 - server_round / federation.rounds) * (3.0 if epsilon else 0.9)
            optimizer = torch.optim.SGD(model.parameters(), rate)
            images, labels = federation.own(client)
            noise["expected_batch_size"] = RATE * len(images)
            for _ in range(federation.steps):
                batch = fp.privacy.poisson_batch(len(images), rate=RATE, generator=secret)
                copies = fp.privacy.per_sample(model, len(batch))  # one gradient for each image
                logits = logits_of(copies, images[batch])
                F.cross_entropy(logits, labels[batch], reduction="sum").backward()
                private_step(optimizer, model, copies, multiplier=multiplier, **noise)
            payloads.append(fp.collect(model, weight=1))
        fp.load_values(model, fp.weighted_mean(payloads))
        accuracy = federation.accuracy(partial(logits_of, model))
        bar.write(f"{name}, round {server_round + 1}: {100 * accuracy:.1f} %")
    return accuracy


def main() -> None:
    parser = digits.parser(__doc__)
    parser.add_argument("--seed", type=int, help="repeatable noise, for tests; never in earnest")
    args = parser.parse_args()
    split = partial(fp.data.iid, num_clients=NUM_CLIENTS)
    federation = digits.federation(split, rounds=10, steps=4, quick=args.quick)
    plain, protected = (federate(federation, epsilon, args.seed) for epsilon in (None, 3.0))
    print(
        f"Epsilon 3 costs {100 * (plain - protected):.1f} points: {100 * protected:.1f} % with "
        f"clipped and noisy gradients, {100 * plain:.1f} % without (delta {DELTA:g})."
    )


if __name__ == "__main__":
    main()
