"""Forward pass of a frozen transformer with any number of prompt streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.interfaces import Encoded, PromptStream, ResumableTrunk, Trunk
from fedprompt.prompts import _streams

_Size = int | tuple[int, int]
_Streams = Sequence[PromptStream]
_Begun = tuple[Tensor, list[int], Any]
"""Tokens before the first block that runs, lengths of the streams in them, and the context."""


def encode_prompted(
    trunk: Trunk,
    images: Num[Tensor, "batch ..."],
    *streams: PromptStream,
    depth: int | None = None,
    dtype: torch.dtype | None = None,
) -> Encoded:
    """Encode images with prompt tokens next to the patch tokens.

    The tokens of each stream form one span after the class and register tokens, in the order of the
    arguments. Before each of its layers, a stream appends new tokens to its span. If the stream
    replaces, the new tokens take the place of the whole span. Prompts have no positional embedding.

    Prompts are removed before the model's last norm and pooling. Nothing is written into the
    backbone, so clients can share it, even at the same time.

    If all trainable prompts are late, run the first blocks once with :func:`encode_front`, and go
    on from their tokens in every round with :func:`encode_from`.

    Args:
        trunk: Frozen backbone from :func:`vit_trunk`, or a custom :class:`Trunk`.
        images: Inputs of the trunk. A trunk from :func:`vit_trunk` takes floating-point images
            (batch, channels, height, width) and casts them to its dtype. A custom one may take
            uint8, spectrograms or token ids.
        *streams: Streams from prompt modules, or made by hand. Their tokens are cast to the dtype
            of the backbone. Without streams, the backbone is unchanged.
        depth: Number of blocks after which the pass ends. The last norm and the pooling follow in
            any case, as in SGPT's early query. If None, all blocks run.
        dtype: Floating-point dtype of the result. If None, it is float32, or float64 if the
            backbone's is.

    Returns:
        The pooled features, the tokens of each stream and the patch tokens, after the last block
        and norm.

    Raises:
        ValueError: If `depth` or a layer is outside the trunk, tokens have the wrong width, batch
            size or device, or the trunk is no longer frozen.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> from fedprompt import ShallowPrompts, vit_trunk
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> prompts = ShallowPrompts(3, trunk.dim, patch_size=4)
        >>> encoded = encode_prompted(trunk, torch.zeros(5, 3, 16, 16), prompts())
        >>> encoded.pooled.shape, encoded.streams[0].shape, encoded.patches.shape
        (torch.Size([5, 8]), torch.Size([5, 3, 8]), torch.Size([5, 16, 8]))
    """
    depth = _streams.check_pass(trunk, streams, depth, dtype)
    return _encoded(trunk, range(depth), _embedded(trunk, images, streams), streams, dtype)


def encode_from(
    trunk: Trunk,
    tokens: Float[Tensor, "batch seq dim"],
    *streams: PromptStream,
    start: int,
    image_size: int | tuple[int, int] | None = None,
    depth: int | None = None,
    dtype: torch.dtype | None = None,
) -> Encoded:
    """Encode images from their tokens before a later block, as :func:`encode_prompted` does.

    The features are the same as in a full pass from the images.

    Args:
        trunk: Frozen backbone.
        tokens: Tokens from :func:`encode_front` for the same `start` and streams, in any
            floating-point dtype.
        *streams: The same streams as in a full pass. Prompts of layers below `start` are already
            among the tokens. They must not require gradients, and only their number is read.
        start: First block to run, at least 1.
        image_size: Size in pixels of the images behind the tokens, one number or (height, width).
            Only models need it that take images of any size and have rotary positions.
        depth: Number of blocks after which the pass ends, as in :func:`encode_prompted`.
        dtype: Floating-point dtype of the result, as in :func:`encode_prompted`.

    Returns:
        The same as :func:`encode_prompted`.

    Raises:
        TypeError: If the trunk is not a :class:`~fedprompt.interfaces.ResumableTrunk`.
        ValueError: If `start`, `depth` or a layer is outside the trunk, tokens have the wrong
            width, number, batch size or device, or the trunk is no longer frozen.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=3, num_heads=2)
        >>> trunk, images = vit_trunk(model), torch.zeros(5, 3, 16, 16)
        >>> late = LayeredPrompts(3, trunk.dim, layers=[2])
        >>> tokens = encode_front(trunk, images, start=2)  # once for all rounds
        >>> pooled = encode_from(trunk, tokens, late(), start=2).pooled
        >>> torch.equal(pooled, encode_prompted(trunk, images, late()).pooled)
        True
    """
    depth = _streams.check_pass(trunk, streams, depth, dtype)
    check.count("start", start, at_most=depth - 1, of="the last block that runs")
    resumed = _resumed(trunk, tokens, streams, start, image_size)
    return _encoded(trunk, range(start, depth), resumed, streams, dtype)


def encode_front(
    trunk: Trunk, images: Num[Tensor, "batch ..."], *streams: PromptStream, start: int
) -> Float[Tensor, "batch seq dim"]:
    """Run the first blocks of a trunk, so that :func:`encode_from` can go on from there.

    Blocks before the first trainable prompt return the same tokens in every round.
    :func:`precompute` keeps them: ``seq * dim * itemsize`` bytes for each image.

    Args:
        trunk: Frozen backbone.
        images: Inputs of the trunk, such as images.
        *streams: Streams whose prompts of layers below `start` enter, for example the frozen
            prompts of another training stage. The tokens are valid until these prompts change.
            Prompts of later layers are not read.
        start: Number of blocks to run, at least 1.

    Returns:
        Tokens before block `start`, in the order prefix, prompts of each stream, patches.

    Example:
        >>> from functools import partial
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=3, num_heads=2)
        >>> trunk, images = vit_trunk(model), torch.zeros(5, 3, 16, 16)
        >>> tokens = precompute(partial(encode_front, trunk, start=2), images, batch_size=5)
        >>> tokens.shape, tokens[0].nbytes
        (torch.Size([5, 17, 8]), 544)
    """
    depth = _streams.check_pass(trunk, streams, None)
    check.count("start", start, at_most=depth, of="the number of the trunk's blocks")
    tokens, lengths, context = _embedded(trunk, images, streams)
    return _run(trunk, range(start), tokens, context, streams, lengths)[0]


def _encoded(
    trunk: Trunk, layers: range, began: _Begun, streams: _Streams, dtype: torch.dtype | None
) -> Encoded:
    """Run blocks from tokens, numbers of prompts and a context, and pool the result."""
    before, lengths, context = began
    tokens, lengths = _run(trunk, layers, before, context, streams, lengths)
    prefix, spans, patches = _split(tokens, trunk.prefix, lengths)
    pooled = trunk.pool(torch.cat([prefix, patches], 1) if streams else tokens)
    rule = "pool one vector of features for an image"
    check.require(pooled.ndim == 2, "trunk", rule, f"features of shape {tuple(pooled.shape)}")
    # The half precisions are promoted to float32: losses and aggregators need its digits.
    dtype = dtype or torch.promote_types(pooled.dtype, torch.float32)
    *outputs, patches = (trunk.normalize(part).to(dtype) for part in (*spans, patches))
    return Encoded(pooled.to(dtype), tuple(outputs), patches)


def pooled_features(
    trunk: Trunk, tokens: Tensor, context: Any, prompts: Sequence[Tensor]
) -> Float[Tensor, "batch features"]:
    """Run all blocks with the prompts of each layer in place of those before, or without any."""
    streams = [PromptStream(dict(enumerate(prompts)), replace=True)]
    tokens, lengths = _run(trunk, range(trunk.depth), tokens, context, streams, [0])
    prefix, _, patches = _split(tokens, trunk.prefix, lengths)
    return trunk.pool(torch.cat([prefix, patches], 1))


def _embedded(trunk: Trunk, images: Tensor, streams: _Streams) -> _Begun:
    """Return the tokens of images, the number of prompts of each stream (none), and the context."""
    tokens, context = trunk.embed(images)
    _streams.check_fit(streams, tokens)
    return tokens, [0 for _ in streams], context


def _resumed(
    trunk: Trunk, tokens: Tensor, streams: _Streams, start: int, image_size: _Size | None
) -> _Begun:
    """Return cached tokens, the number of prompts of each stream among them, and the context."""
    if not isinstance(trunk, ResumableTrunk):
        rule = f"have the method `resume` of a ResumableTrunk, because `start` is {start}"
        raise check.wrong_type("trunk", rule, type(trunk).__name__)
    rule = f"be a floating-point tensor of shape (batch, seq, {trunk.dim})"
    check.number_tensor("tokens", tokens, rule, ndim=3, read=True)
    check.shape("tokens", tokens, (*tokens.shape[:2], trunk.dim))
    lengths = [
        _length_before(start, f"streams[{position}]", stream)
        for position, stream in enumerate(streams)
    ]
    if tokens.shape[1] <= trunk.prefix + sum(lengths):
        parts = f"the {trunk.prefix} of the prefix and {sum(lengths)} prompts before block {start}"
        raise check.wrong("tokens", f"have a patch besides {parts}", f"{tokens.shape[1]} tokens")
    prefix, spans, rest = _split(tokens, trunk.prefix, lengths)
    size = None if image_size is None else convert.height_and_width("image_size", image_size)
    plain, context = trunk.resume(torch.cat([prefix, rest], 1), start=start, image_size=size)
    prefix, _, rest = _split(plain, trunk.prefix, [])
    tokens = torch.cat([prefix, *(span.to(plain.dtype) for span in spans), rest], 1)
    _streams.check_fit(streams, tokens)
    return tokens, lengths, context


def _run(
    trunk: Trunk, layers: range, tokens: Tensor, context: Any, streams: _Streams, lengths: list[int]
) -> tuple[Tensor, list[int]]:
    """Run blocks; return the tokens, and the number of prompts of each stream among them."""
    for layer in layers:
        if any(layer in stream.layers for stream in streams):
            prefix, spans, rest = _split(tokens, trunk.prefix, lengths)
            pairs = zip(streams, spans, strict=True)
            spans = [_entered(stream, layer, span) for stream, span in pairs]
            tokens = torch.cat([prefix, *spans, rest], 1)
            lengths = [span.shape[1] for span in spans]
        tokens = trunk.block(layer, tokens, context, sum(lengths))
    return tokens, lengths


def _entered(stream: PromptStream, layer: int, span: Tensor) -> Tensor:
    """Return a stream's span with the tokens that enter before a layer."""
    if layer not in stream.layers:
        return span
    new = stream.layers[layer].to(span.dtype).expand(span.shape[0], -1, -1)
    return new if stream.replace else torch.cat([span, new], 1)


def _length_before(start: int, argument: str, stream: PromptStream) -> int:
    """Return the number of a stream's prompts among the tokens before block `start`."""
    early = sorted(layer for layer in stream.layers if layer < start)
    for layer in early:
        rule = f"not require gradients, because block {layer} is before `start`"
        fits = not torch.is_grad_enabled() or not stream.layers[layer].requires_grad
        check.require(fits, f"{argument}.layers[{layer}]", rule, "a tensor that does")
    lengths = [stream.layers[layer].shape[-2] for layer in early]
    return sum(lengths[-1:] if stream.replace else lengths)


def _split(
    tokens: Tensor, prefix: int, lengths: Sequence[int]
) -> tuple[Tensor, list[Tensor], Tensor]:
    first, *middle, rest = torch.split(
        tokens, [prefix, *lengths, tokens.shape[1] - prefix - sum(lengths)], 1
    )
    return first, middle, rest
