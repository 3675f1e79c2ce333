"""Deep prompts of a text tower: tokens that replace those of the context before later blocks."""

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import PromptedText, PromptStream

Replacement = tuple[int, Float[Tensor, "... _length dim"]]  # streams differ in length
"""First position of the prefix that is replaced, and new tokens, for all contexts or for each."""


def replacements(
    text: PromptedText, streams: Sequence[PromptStream], *, dim: int, depth: int
) -> Mapping[int, Sequence[Replacement]]:
    """Check streams, and return the replacements before each block.

    The streams replace the tokens of the context in the order of the streams.
    """
    by_layer: dict[int, list[Replacement]] = {}
    if not streams:
        return by_layer
    if text.context is None:
        rule = "have the whole context right before the names, as deep prompts replace it there"
        got = "a class-specific context, a name position or sentences without a context"
        raise check.wrong("text", rule, got)
    start = text.prefix.shape[-2] - text.context
    for number, stream in enumerate(streams):
        argument = f"streams[{number}]"
        _check_stream(argument, stream, depth)
        length = 0
        for layer, tokens in stream.layers.items():
            length = _length_of(f"{argument}.layers[{layer}]", tokens, text, dim, length)
            by_layer.setdefault(layer, []).append((start, tokens))
        start += length
    num_tokens = start - text.prefix.shape[-2] + text.context
    rule = f"replace all {text.context} tokens of the context"
    check.require(num_tokens == text.context, "streams", rule, f"{num_tokens} tokens")
    return by_layer


def _check_stream(argument: str, stream: PromptStream, depth: int) -> None:
    check.instance(argument, stream, PromptStream, "be a PromptStream")
    rule = "have replace=True, because they replace the tokens of the context"
    check.require(stream.replace, argument, rule, "replace=False")
    outside = [layer for layer in stream.layers if not 1 <= layer < depth]
    if outside or not stream.layers:
        rule = f"enter before blocks 1 to {depth - 1}, because the context enters before block 0"
        if depth < 2:
            rule = "not be given to a tower of one block"
        raise check.wrong(argument, rule, f"layers {sorted(stream.layers)}")


def _length_of(argument: str, tokens: Tensor, text: PromptedText, dim: int, length: int) -> int:
    """Return the number of tokens, which is `length` in all layers unless `length` is 0."""
    check.number_tensor(argument, tokens)
    axes = tuple(text.prefix.shape[:-2])
    fits = tokens.ndim >= 2 and tokens.shape[:-2] in ((), axes) and tokens.shape[-1] == dim
    if not fits or (length and tokens.shape[-2] != length):
        size = length or "length"
        rule = f"have shape ({size}, {dim}) or {(*axes, size, dim)}".replace("'", "")
        raise check.wrong(argument, rule, tuple(tokens.shape))
    return tokens.shape[-2]
