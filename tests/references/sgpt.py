"""SGPT, Eqs. 2-11 and the additions of its code, as slow and simple loops in float64.

Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized
Federated Learning", CVPR 2024.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from fedprompt.interfaces import Selection

Row = list[float]
Values = dict[str, Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


class Model(NamedTuple):
    """Frozen network and the choices of a run; defaults are those of the gallery."""

    network: nn.Module
    shared_layers: Sequence[int] = (0, 1, 2)
    group_layers: Sequence[int] = (3, 4, 5)
    replace: bool = False
    averaged: bool = False
    query_depth: int | None = None
    decay: float = 0.5
    key_decay: float = 0.5
    blocks: Sequence[Sequence[str]] = (("shared", "head"), ("groups", "selector", "head"))
    insert_nearest: bool = False
    offset: float = 5e-4
    live: bool = True


def cosine(one: Row, other: Row) -> float:
    return (
        sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)
    )


def choices(query: list[Row], keys: list[Row], usage: Row | None, *, offset: float) -> list[int]:
    """Return the group of each query: Eq. 5, or Eq. 6 with the offset of the authors' code."""
    total = sum(usage or [])
    chosen = []
    for own in query:
        costs = [1 - cosine(own, key) for key in keys]
        if total:
            costs = [
                cost * (count / total + offset) for cost, count in zip(costs, usage, strict=True)
            ]
        chosen.append(costs.index(min(costs)))
    return chosen


def literal_keys(query: Tensor, keys: Tensor, *, usage: Tensor | None = None) -> Selection:
    """Select as Eq. 6 is printed: the argmax of (cos - 1) q. KNOWN WRONG.

    An unused group has the score 0. This is the maximum, independent of its cosine.
    """
    similarity = torch.nn.functional.normalize(query) @ torch.nn.functional.normalize(keys).T
    weights = torch.ones(len(keys)) if usage is None else usage / usage.sum().clamp(min=1)
    indices = ((similarity - 1) * weights).argmax(1)
    return Selection(indices, similarity.gather(1, indices[:, None])[:, 0].detach())


def attended(block: nn.Module, tokens: Tensor) -> Tensor:
    """Run a block of a plain timm ViT."""
    normed = F.layer_norm(tokens, tokens.shape[2:], *block.norm1.parameters(), block.norm1.eps)
    three = F.linear(normed, *block.attn.qkv.parameters()).chunk(3, 2)
    heads = [part.unflatten(2, (block.attn.num_heads, -1)) for part in three]
    scores = torch.einsum("bqhd,bkhd->bhqk", *heads[:2]) / math.sqrt(heads[0].shape[-1])
    mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(3), heads[2]).flatten(2)
    tokens = tokens + F.linear(mixed, *block.attn.proj.parameters())
    normed = F.layer_norm(tokens, tokens.shape[2:], *block.norm2.parameters(), block.norm2.eps)
    hidden = F.gelu(F.linear(normed, *block.mlp.fc1.parameters()))
    return tokens + F.linear(hidden, *block.mlp.fc2.parameters())


def encoded(
    model: Model, images: Tensor, *streams: Mapping[int, Tensor], depth: int | None = None
) -> list[Tensor]:
    """Return the class token, and the tokens of each stream, after the last norm (Eqs. 2 and 3)."""
    network = model.network
    kernel, bias = network.patch_embed.proj.parameters()
    parts = F.unfold(images, kernel.shape[2:], stride=kernel.shape[2:]).transpose(1, 2)
    patches = F.linear(parts, kernel.flatten(1), bias)
    first = network.cls_token.expand(len(images), -1, -1)
    spans = [torch.cat([first, patches], 1) + network.pos_embed]
    spans += [patches[:, :0] for _ in streams]
    for layer, block in enumerate(network.blocks[:depth]):
        for number, stream in enumerate(streams, 1):
            if layer in stream:
                kept = spans[number][:, :0] if model.replace else spans[number]
                new = stream[layer].expand(len(images), -1, -1)
                spans[number] = torch.cat([kept, new], 1)
        sizes = [span.shape[1] for span in spans]
        spans = list(attended(block, torch.cat(spans, 1)).split(sizes, 1))
    norm = network.norm
    after = [F.layer_norm(span, span.shape[2:], *norm.parameters(), norm.eps) for span in spans]
    return [after[0][:, 0], *after[1:]]


def query(model: Model, images: Tensor) -> Tensor:
    return encoded(model, images, depth=model.query_depth)[0].detach()


def logits(model: Model, values: Values, images: Tensor, chosen: list[int] | None) -> Tensor:
    """Classify with the groups of the images (Alg. 3), or without groups (Block I)."""
    streams = []
    if any("shared" in block for block in model.blocks):
        streams.append(dict(zip(model.shared_layers, values["shared.tokens"], strict=True)))
    if chosen is not None:
        own = torch.stack([values["groups.tokens"][group] for group in chosen])
        streams.append({layer: own[:, place] for place, layer in enumerate(model.group_layers)})
    read, *outputs = encoded(model, images, *streams)
    if model.averaged and chosen is not None:
        read = (read + outputs[-1].sum(1)) / (1 + outputs[-1].shape[1])
    return F.linear(read, values["head.weight"], values["head.bias"])


def predictions(model: Model, values: Values, images: Tensor) -> Tensor:
    """Classify new images, with the nearest group if any block trains groups."""
    keys = values["selector.keys"].tolist()
    grouped = any("groups" in block for block in model.blocks)
    nearest = choices(query(model, images).tolist(), keys, None, offset=model.offset)
    return logits(model, values, images, nearest if grouped else None)


def trained(
    model: Model, values: Values, usage: Row, batches: Batches, sgd: Mapping[str, float]
) -> tuple[Values, Row]:
    """Train a client block by block, with a new optimizer for each (Alg. 1)."""
    values, counts = dict(values), [0.0] * len(usage)
    size = len(batches) // len(model.blocks)
    for number, block in enumerate(model.blocks):
        last = number == len(model.blocks) - 1
        names = [name for name in values if name.split(".")[0] in block]
        velocity = {name: torch.zeros_like(values[name]) for name in names}
        for images, labels in batches[number * size : None if last else (number + 1) * size]:
            leaves = {name: values[name].clone().requires_grad_() for name in names}
            now, chosen, loss = values | leaves, None, 0.0
            if "groups" in block:
                features, keys = query(model, images), now["selector.keys"]
                before = [old + model.live * new for old, new in zip(usage, counts, strict=True)]
                rows = features.tolist(), keys.tolist()
                chosen = choices(*rows, before, offset=model.offset)
                for group in chosen:
                    counts[group] += 1
                loss = -sum(
                    own @ keys[group] / own.norm() / keys[group].norm()
                    for own, group in zip(features, chosen, strict=True)
                ) / len(images)
                if model.insert_nearest:
                    chosen = choices(*rows, None, offset=model.offset)
            loss = loss + F.cross_entropy(logits(model, now, images, chosen), labels)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            for name, gradient in zip(names, gradients, strict=True):
                step = gradient + sgd["weight_decay"] * values[name]
                velocity[name] = sgd["momentum"] * velocity[name] + step
                values[name] = values[name] - sgd["lr"] * velocity[name]
    return values, counts


def server(
    model: Model, before: Values, sent: list[Values], counts: list[Row], sizes: Row
) -> Values:
    """Average keys by selections and all else by size, with the momentum of Eq. 7 (Alg. 2)."""
    after = {
        name: sum(size * own[name] for size, own in zip(sizes, sent, strict=True)) / sum(sizes)
        for name in before
    }
    keys = before["selector.keys"].clone()
    for group, total in enumerate(map(sum, zip(*counts, strict=True))):
        if total:  # the paper divides by 0 here
            own = zip(counts, sent, strict=True)
            mean = sum(count[group] * one["selector.keys"][group] for count, one in own) / total
            keys[group] = model.key_decay * keys[group] + (1 - model.key_decay) * mean
    groups = model.decay * before["groups.tokens"] + (1 - model.decay) * after["groups.tokens"]
    return after | {"selector.keys": keys, "groups.tokens": groups}
