"""Prompted text the slow way: whole sentences of token ids, one at a time, every position, by the model's own text tower.

Nothing is shared, truncated or gathered: the sentence is tokenised with a word in the place of each context token, those words' embeddings
are then replaced by the context, and the feature is read at the largest id (CLIP's end of text).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

WORD = "x"  # one token, and no class of these tests is called so


def sentence(name: str, num_context: int, before: int) -> str:
    return " ".join([WORD] * before + [name] + [WORD] * (num_context - before)) + " ."


def text_features(
    clip_model: nn.Module, tokenizer: Callable, context: Tensor, names: Sequence[str], before: int
) -> Tensor:
    """Features (prompts, classes, features); context (prompts, length, dim), or (prompts, classes, length, dim)."""
    return torch.stack(
        [
            torch.stack(
                [
                    _feature(clip_model, tokenizer, own if own.ndim == 2 else own[c], name, before)
                    for c, name in enumerate(names)
                ]
            )
            for own in context
        ]
    )


def ends(tokenizer: Callable, names: Sequence[str], num_context: int, before: int) -> Tensor:
    return tokenizer([sentence(name, num_context, before) for name in names]).argmax(1)


def published(tokenizer: Callable, name: str, num_context: int, before: int) -> list[int | None]:
    """Ids of a sentence as the code of CoOp and FedOTP puts it together; None in the place of a context token.

    They tokenise the whole sentence with the full stop right behind the name, count the tokens of the name without it, and cut there.
    """
    (ids,) = tokenizer([" ".join([WORD] * num_context + [name]) + "."]).tolist()
    name_length = len(tokenizer.encode(name))
    start, behind = ids[:1], ids[1 + num_context : ids.index(max(ids)) + 1]
    return [
        *start,
        *[None] * before,
        *behind[:name_length],
        *[None] * (num_context - before),
        *behind[name_length:],
    ]


def _feature(
    clip_model: nn.Module, tokenizer: Callable, context: Tensor, name: str, before: int
) -> Tensor:
    text = getattr(clip_model, "text", clip_model)
    (ids,) = tokenizer([sentence(name, len(context), before)])
    word = tokenizer([WORD])[0, 1]
    tokens, rest = [], iter(context)
    for position, token in enumerate(ids):
        embedding = next(rest) if token == word else text.token_embedding.weight[token]
        tokens.append(embedding + text.positional_embedding[position])
    assert next(rest, None) is None
    hidden = text.ln_final(text.transformer(torch.stack(tokens)[None], attn_mask=text.attn_mask))
    pooled = hidden[0, ids.argmax()]
    projection = text.text_projection
    if projection is None:
        return pooled
    return projection(pooled) if isinstance(projection, nn.Module) else pooled @ projection
