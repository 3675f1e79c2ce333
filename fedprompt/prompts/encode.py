"""Forward pass of a frozen transformer with any number of prompt streams."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from fedprompt._checks import check_count, check_images, check_labels, kind, wrong_type, wrong_value
from fedprompt.interfaces import Encoded, PromptStream, Trunk


def encode_prompted(
    trunk: Trunk,
    images: Float[Tensor, "batch channels height width"],
    *streams: PromptStream,
    depth: int | None = None,
    dtype: torch.dtype | None = None,
) -> Encoded:
    """Encode images with prompt tokens next to the patch tokens.

    The tokens of each stream form one contiguous span right after the class and register tokens.
    Spans are in the order of the arguments, and tokens within a span in the order of their
    layers. Before each of its layers, a stream appends new tokens to its span. If the stream
    replaces, the new tokens take the place of the whole span. Prompts have no positional
    embedding.

    Prompts are removed before the model's last norm and pooling, so every kind of pooling
    ignores them. Nothing is written into the backbone. Clients can share it, and several
    prompted passes can run over it at the same time.

    Args:
        trunk: Frozen backbone from :func:`vit_trunk`, or a custom :class:`Trunk`.
        images: Input images of the backbone. A trunk from :func:`vit_trunk` casts them to its
            dtype.
        *streams: Streams from prompt modules, or made by hand. Their tokens are cast to the
            dtype of the backbone. Without streams, the result is that of the plain backbone.
        depth: Number of blocks to run. The last norm and the pooling follow in any case, as in
            SGPT's early query. If None, all blocks run.
        dtype: Floating-point dtype of the result. If None, it is float32, or float64 if the
            backbone's is.

    Returns:
        The pooled features, and the tokens of each stream after the last block and norm.

    Raises:
        ValueError: If `depth` or a layer is outside the trunk, tokens have the wrong width,
            batch size or device, or the trunk is no longer frozen.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> from fedprompt import ShallowPrompts, vit_trunk
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> prompts = ShallowPrompts(3, trunk.dim, patch_size=4)
        >>> encoded = encode_prompted(trunk, torch.zeros(5, 3, 16, 16), prompts())
        >>> encoded.pooled.shape, encoded.streams[0].shape
        (torch.Size([5, 8]), torch.Size([5, 3, 8]))
    """
    if not isinstance(trunk, Trunk):
        raise wrong_type("trunk", "be a Trunk, such as vit_trunk(model)", type(trunk).__name__)
    check_images(images)
    depth = _checked_depth(trunk, depth)
    _check_dtype(dtype)
    tokens, context = trunk.embed(images)
    for position, stream in enumerate(streams):
        _check_stream(f"streams[{position}]", stream, trunk, tokens, depth)
    spans = [tokens[:, :0] for _ in streams]
    for layer in range(depth):
        if any(layer in stream.layers for stream in streams):
            prefix, spans, rest = _split(tokens, trunk.prefix, spans)
            spans = [
                _entered(stream, layer, span) for stream, span in zip(streams, spans, strict=True)
            ]
            tokens = torch.cat([prefix, *spans, rest], 1)
        tokens = trunk.block(layer, tokens, context, sum(span.shape[1] for span in spans))
    prefix, spans, rest = _split(tokens, trunk.prefix, spans)
    plain = torch.cat([prefix, rest], 1) if streams else tokens
    pooled, outputs = trunk.pool(plain), tuple(trunk.normalize(span) for span in spans)
    # The half precisions are promoted to float32: losses and aggregators need its digits.
    dtype = dtype or torch.promote_types(pooled.dtype, torch.float32)
    return Encoded(pooled.to(dtype), tuple(tokens.to(dtype) for tokens in outputs))


def batch_streams(
    streams: Sequence[PromptStream], owner: Integer[Tensor, " batch"]
) -> PromptStream:
    """Merge the streams of several clients, so that each sample gets the prompts of its owner.

    Several clients can then train in one forward pass of a shared trunk. Losses and gradients
    equal those of separate passes: the gradient of a sample reaches its owner's prompts only.

    Args:
        streams: One stream for each client, all with the same layers, lengths and `replace`,
            without a batch axis.
        owner: Position in `streams` of each sample's client. The range is checked on CPU tensors
            only, to avoid a GPU synchronization.

    Returns:
        A stream with tokens (batch, prompts, dim).

    Raises:
        ValueError: If there is no stream, streams differ in layout, or an owner is out of range.

    Example:
        >>> first = PromptStream({0: torch.zeros(1, 2)})
        >>> second = PromptStream({0: torch.ones(1, 2)})
        >>> batch_streams([first, second], torch.tensor([1, 0, 1])).layers[0][:, 0, 0]
        tensor([1., 0., 1.])
    """
    if not streams:
        raise wrong_value("streams", "contain at least one stream", "none")
    first = streams[0]
    for position, stream in enumerate(streams):
        if not isinstance(stream, PromptStream):
            raise wrong_type(
                f"streams[{position}]", "be a PromptStream; call the prompt module", kind(stream)
            )
        if _layout(stream) != _layout(first):
            rule = f"have the layers, lengths and `replace` of the first stream {_layout(first)}"
            raise wrong_value(f"streams[{position}]", rule, _layout(stream))
    for layer, tokens in first.layers.items():
        if tokens.ndim != 2:
            raise wrong_value(
                "streams",
                "contain tokens of shape (prompts, dim)",
                f"{tuple(tokens.shape)} at layer {layer}",
            )
    check_labels("owner", owner, len(streams), sync=False)
    layers = {
        layer: torch.stack([stream.layers[layer] for stream in streams])[owner.long()]
        for layer in first.layers
    }
    return PromptStream(layers, first.replace)


def _entered(stream: PromptStream, layer: int, span: Tensor) -> Tensor:
    """Return a stream's span with the tokens that enter before a layer."""
    if layer not in stream.layers:
        return span
    new = stream.layers[layer].to(span.dtype).expand(span.shape[0], -1, -1)
    return new if stream.replace else torch.cat([span, new], 1)


def _split(tokens: Tensor, prefix: int, spans: list[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    lengths = [span.shape[1] for span in spans]
    first, *middle, rest = torch.split(
        tokens, [prefix, *lengths, tokens.shape[1] - prefix - sum(lengths)], 1
    )
    return first, middle, rest


def _layout(stream: PromptStream) -> tuple[dict[int, tuple[int, ...]], bool]:
    return {layer: tuple(tokens.shape) for layer, tokens in stream.layers.items()}, stream.replace


def _checked_depth(trunk: Trunk, depth: int | None) -> int:
    if depth is None:
        return trunk.depth
    check_count("depth", depth)
    if depth > trunk.depth:
        raise wrong_value("depth", f"be at most the trunk's {trunk.depth} blocks", depth)
    return depth


def _check_dtype(dtype: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise wrong_type("dtype", "be a floating-point torch.dtype or None", kind(dtype))


def _check_stream(
    argument: str, stream: PromptStream, trunk: Trunk, tokens: Tensor, depth: int
) -> None:
    if not isinstance(stream, PromptStream):
        raise wrong_type(argument, "be a PromptStream; call the prompt module", kind(stream))
    if not isinstance(stream.replace, bool):
        raise wrong_type(f"{argument}.replace", "be True or False", kind(stream.replace))
    for layer, prompts in stream.layers.items():
        if layer not in range(depth):
            raise wrong_value(
                f"{argument}.layers", f"be among the {depth} blocks 0 to {depth - 1}", layer
            )
        if not isinstance(prompts, Tensor) or not prompts.is_floating_point():
            raise wrong_type(
                f"{argument}.layers[{layer}]", "be a floating-point tensor", kind(prompts)
            )
        if prompts.ndim not in (2, 3) or prompts.shape[-1] != trunk.dim:
            rule = f"have shape (prompts, {trunk.dim}) or (batch, prompts, {trunk.dim})"
            raise wrong_value(f"{argument}.layers[{layer}]", rule, tuple(prompts.shape))
        if prompts.ndim == 3 and prompts.shape[0] != tokens.shape[0]:
            raise wrong_value(
                f"{argument}.layers[{layer}]",
                f"have the batch of {tokens.shape[0]} images",
                tuple(prompts.shape),
            )
        if prompts.device != tokens.device:
            raise wrong_value(
                f"{argument}.layers[{layer}]",
                f"be on the trunk's device {tokens.device}",
                prompts.device,
            )
