"""Reference of prompted text: whole sentences, one at a time, by the model's own text tower.

Nothing is shared, truncated or gathered. The sentence is tokenized with a word in place of each
context token, and the embeddings of these words are replaced by the context. The feature is read
at the largest id, CLIP's end of text.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
from torch import Tensor

WORD = "x"  # one token, and not the name of a class in these tests


def sentence(name: str, length: int, before: int) -> str:
    return " ".join([WORD] * before + [name] + [WORD] * (length - before)) + " ."


def text_features(
    clip_model: nn.Module, tokenizer: Callable, context: Tensor, names: Sequence[str], before: int
) -> Tensor:
    """Return features (contexts, classes, features).

    The context has shape (contexts, length, dim) or (contexts, classes, length, dim).
    """
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


def ends(tokenizer: Callable, names: Sequence[str], length: int, before: int) -> Tensor:
    return tokenizer([sentence(name, length, before) for name in names]).argmax(1)


def published(tokenizer: Callable, name: str, length: int, before: int) -> list[int | None]:
    """Return the ids of a sentence as in the code of CoOp and FedOTP, None for context tokens.

    Their code tokenizes the whole sentence with the full stop right after the name. It counts the
    tokens of the name without the full stop, and splits there.
    """
    (ids,) = tokenizer([" ".join([WORD] * length + [name]) + "."]).tolist()
    name_length = len(tokenizer.encode(name))
    start, after = ids[:1], ids[1 + length : ids.index(max(ids)) + 1]
    return [
        *start,
        *[None] * before,
        *after[:name_length],
        *[None] * (length - before),
        *after[name_length:],
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
