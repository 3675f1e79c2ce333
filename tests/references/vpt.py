"""Prompted vision transformers, token by token in float64, for plain ViTs only.

The reference shares no code with the library or with timm's forward pass.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn as nn
from torch import Tensor

# Tokens (prompts, dim) or (batch, prompts, dim) by layer, and whether they replace earlier ones.
Stream = tuple[Mapping[int, Tensor], bool]


def prompted_vit(
    model: nn.Module,
    images: Tensor,
    streams: Sequence[Stream],
    *,
    depth: int | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Run a plain timm ViT image by image.

    The sequence is a list of (owner, vector). An owner is "prefix", "patch" or the number of a
    stream. A mask (seq, seq) applies to prefix and patches only.

    Returns:
        The pooled features, and the tokens of each stream after the last norm.
    """
    pooled, outputs = [], [[] for _ in streams]
    for sample, image in enumerate(images):
        sequence = _embedded(model, image)
        for layer, block in enumerate(model.blocks[:depth]):
            for number, (layers, replaces) in enumerate(streams):
                if layer in layers:
                    if replaces:
                        sequence = [(owner, token) for owner, token in sequence if owner != number]
                    tokens = layers[layer] if layers[layer].ndim == 2 else layers[layer][sample]
                    # The position of a prompt in the sequence does not matter.
                    sequence = sequence + [(number, token) for token in tokens]
            sequence = _block(block, sequence, mask)
        pooled.append(_pooled(model, sequence))
        last_norm = model.norm if isinstance(model.fc_norm, nn.Identity) else model.fc_norm
        for number, output in enumerate(outputs):
            output.append([_norm(last_norm, token) for owner, token in sequence if owner == number])
    nothing = images.new_zeros(0, model.embed_dim)
    return torch.stack(pooled), [
        torch.stack([torch.stack(tokens) if tokens else nothing for tokens in output])
        for output in outputs
    ]


def _embedded(model: nn.Module, image: Tensor) -> list[tuple[object, Tensor]]:
    height, width = model.patch_embed.patch_size
    kernel, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
    prefix = [model.cls_token[0, 0]] if model.cls_token is not None else []
    prefix += list(model.reg_token[0]) if model.reg_token is not None else []
    patches = [
        (kernel * image[:, row : row + height, column : column + width]).sum((1, 2, 3)) + bias
        for row in range(0, image.shape[1], height)
        for column in range(0, image.shape[2], width)
    ]
    owners = ["prefix"] * len(prefix) + ["patch"] * len(patches)
    return [
        (owner, token + position)
        for owner, token, position in zip(owners, prefix + patches, model.pos_embed[0], strict=True)
    ]


def _norm(norm: nn.LayerNorm, token: Tensor) -> Tensor:
    centered = token - token.mean()
    return centered / (centered.square().mean() + norm.eps).sqrt() * norm.weight + norm.bias


def _block(
    block: nn.Module, sequence: list[tuple[object, Tensor]], mask: Tensor | None
) -> list[tuple[object, Tensor]]:
    attended = _attention(
        block.attn, [_norm(block.norm1, token) for _, token in sequence], _allowed(sequence, mask)
    )
    middle = [token + change for (_, token), change in zip(sequence, attended, strict=True)]
    output = []
    for token in middle:
        hidden = block.mlp.fc1.weight @ _norm(block.norm2, token) + block.mlp.fc1.bias
        hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
        output.append(token + block.mlp.fc2.weight @ hidden + block.mlp.fc2.bias)
    return [(owner, token) for (owner, _), token in zip(sequence, output, strict=True)]


def _attention(attention: nn.Module, tokens: list[Tensor], added: Tensor) -> list[Tensor]:
    heads = attention.num_heads
    query, key, value = zip(
        *[
            (attention.qkv.weight @ token + attention.qkv.bias).reshape(3, heads, -1)
            for token in tokens
        ],
        strict=True,
    )
    output = []
    for position in range(len(tokens)):
        mixed = []
        for head in range(heads):
            scores = torch.stack(
                [query[position][head] @ other[head] for other in key]
            ) / math.sqrt(key[0].shape[1])
            weights = (scores + added[position]).softmax(0)
            mixed.append(
                sum(weight * other[head] for weight, other in zip(weights, value, strict=True))
            )
        output.append(attention.proj.weight @ torch.cat(mixed) + attention.proj.bias)
    return output


def _allowed(sequence: list[tuple[object, Tensor]], mask: Tensor | None) -> Tensor:
    """Return the mask of the attention scores, which is zero from and to prompts."""
    added = torch.zeros(len(sequence), len(sequence), dtype=torch.float64)
    own = [position for position, (owner, _) in enumerate(sequence) if owner in ("prefix", "patch")]
    if mask is not None:
        for row, position in enumerate(own):
            for column, other in enumerate(own):
                added[position, other] = mask[row, column]
    return added


def _pooled(model: nn.Module, sequence: list[tuple[object, Tensor]]) -> Tensor:
    if model.global_pool == "token":  # the class token after the last norm
        return _norm(model.norm, sequence[0][1])
    patches = torch.stack([token for owner, token in sequence if owner == "patch"])
    return _norm(model.fc_norm, patches.mean(0))  # "avg": the norm comes after the mean
