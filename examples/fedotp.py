"""FedOTP: each client has one text context that all share and one that it keeps.

Five clients hold emoji of different classes. Optimal transport divides the patches of an image
between the two contexts (Li et al., CVPR 2024)::

    python examples/fedotp.py
"""

from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import digits
import fedprompt as fp
from fedprompt import samples

NUM_CLIENTS = 5


def federate(
    federation: digits.Federation, tower: fp.TextTower, match: partial, parts: tuple[str, ...]
) -> float:
    """Return the mean accuracy of the clients, each on its own mix of classes.

    Contexts named "shared" are averaged after each round; those named "private" are not sent.
    """
    names = tower.class_names(samples.CLASS_NAMES)
    torch.manual_seed(0)
    clients = []
    for _ in range(NUM_CLIENTS):
        contexts = {part: fp.ContextPrompts(tower.dim, length=8) for part in parts}
        clients.append(nn.ModuleDict(contexts))

    def text_of(client: nn.ModuleDict) -> Tensor:
        contexts = torch.cat([context() for context in client.values()])
        return tower(fp.prompted_text(contexts, names))

    values = fp.snapshot(clients[0], only=["shared"]) if "shared" in parts else {}
    server, name = fp.overwrite(), " + ".join(parts)
    state = server.init(values)
    for server_round in (bar := tqdm(range(federation.rounds), name, unit="round")):
        payloads = []
        for k, client in enumerate(clients):
            fp.load_values(client, values)
            optimizer = torch.optim.Adam(client.parameters(), 5e-3)
            for patches, labels in federation.batches(k, server_round, size=32):
                loss = F.cross_entropy(match(patches, text_of(client)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if values:
                size = len(federation.shards[k])
                payloads.append(fp.collect(client, weight=size, only=["shared"]))
        if payloads:
            values, state = server.step(values, fp.weighted_mean(payloads), state)
        accuracy = []
        for k, client in enumerate(clients):
            fp.load_values(client, values)
            text = text_of(client).detach()
            accuracy.append(federation.accuracy(partial(match, text=text), k))
        bar.write(f"{name}, round {server_round + 1}: {100 * np.mean(accuracy):.1f} %")
    return float(np.mean(accuracy))


@torch.no_grad()
def emoji(clip: nn.Module, quick: bool) -> digits.Federation:
    """Divide the sample emoji over clients by their classes, and encode their patches once."""
    torch.set_num_threads(1)  # the network is tiny: more threads are slower
    sides = list[Tensor]()
    for side, few in zip(samples.emoji(), (400, 100), strict=True):
        images, labels = (part[: few if quick else None] for part in side[:2])
        parts = samples.preprocess(images).split(256)
        sides += [torch.cat([fp.image_tokens(clip, part)[1] for part in parts]), labels]
    draw, classes = np.random.default_rng(0), len(samples.CLASS_NAMES)
    shards = fp.data.dirichlet(sides[1], NUM_CLIENTS, alpha=0.3, min_size=20, generator=draw)
    length = (2, 4) if quick else (15, 8)
    return digits.Federation(*sides, list(map(torch.from_numpy, shards)), *length, None, classes)


def main() -> None:
    clip, quick = samples.clip(), digits.parser(__doc__).parse_args().quick
    tower, federation = fp.TextTower(clip, samples.tokenize), emoji(clip, quick)
    solver, scale = partial(fp.transport.newton, epsilon=0.1), clip.logit_scale.exp().item()
    match = partial(fp.transport_logits, solver=solver, mass=0.8, scale=scale)
    run = partial(federate, federation, tower, match)
    sent, alone, both = map(run, (("shared",), ("private",), ("shared", "private")))
    print(
        f"Tested on its own mix of classes, a client with a shared and a private context reaches "
        f"{100 * both:.1f} %, with a shared one only {100 * sent:.1f} %, and with a private one "
        f"only, which is local training, {100 * alone:.1f} %."
    )


if __name__ == "__main__":
    main()
