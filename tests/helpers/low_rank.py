"""LoRA by hand: gradient steps of products that are added to the weights of a network."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.func import functional_call

import fedprompt as fp
from fedprompt import tuning

RATE = 0.5
ONE_ROUND = {"rounds": 1, "cohort_size": 5, "make_optimizer": torch.optim.SGD}
RANKS = (2, 1, 3, 3, 1)
SIZES = {0: 2, 1: 1, 4: 1}
"""Ranks of five clients, and the same as an argument, with a full rank of 3."""


def initial(federation, *, rank=2):
    """Return the head's weight and bias, and A and B of each layer, as the methods draw them."""
    tune = partial(tuning.lora, rank=rank)
    model = federation.new_model(tune=tune)
    return list(fp.snapshot(model).values())


def trained(federation, client, values, *, skip=(), server_round=0, changes=(0.0, 0.0)):
    """Take steps on the batches of a round. `changes` are added to the weights of the layers."""
    network = federation.trunk.model
    for images, labels in federation.batches(client, server_round):
        values = [each.clone().requires_grad_() for each in values]
        weight, bias, *factors = values
        weights = {}
        for layer, change in enumerate(changes):
            a, b = factors[2 * layer : 2 * layer + 2]
            frozen = network.blocks[layer].attn.qkv.weight
            weights[f"blocks.{layer}.attn.qkv.weight"] = frozen + change + b @ a
        logits = functional_call(network, weights, (images,)) @ weight.T + bias
        steps = torch.autograd.grad(F.cross_entropy(logits, labels), values)
        values = [
            (each if position in skip else each - RATE * step).detach()
            for position, (each, step) in enumerate(zip(values, steps, strict=True))
        ]
    return values


def mean(federation, sent):
    """Average lists of tensors, weighted by the numbers of examples of clients 0, 1, 2..."""
    sizes = [federation.num_examples(client) for client in range(len(sent))]
    columns = zip(*sent, strict=True)
    return [
        sum(size * each for size, each in zip(sizes, column, strict=True)) / sum(sizes)
        for column in columns
    ]


def cut(values, rank):
    """Keep the first columns of B and the first rows of A; heads are whole."""
    return [
        *values[:2],
        *(v[:rank] if k % 2 == 0 else v[:, :rank] for k, v in enumerate(values[2:])),
    ]


def of_sizes(federation):
    """Return the values of rank 3, whose first rows are those that rank 1 and 2 begin with."""
    values = initial(federation, rank=3)
    for rank in (2, 1):
        for place, own in enumerate(initial(federation, rank=rank)[2:], 2):
            values[place][: own.shape[0], : own.shape[1]] = own
    return values


def sent_by(federation, values, **now):
    starts = [cut(values, rank) for rank in RANKS]
    return [trained(federation, client, each, **now) for client, each in enumerate(starts)]
