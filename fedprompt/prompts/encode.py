"""Run a frozen trunk with any number of prompt streams: a loop over its blocks, with prompts as plain tensors."""

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
) -> Encoded:
    """Encode images with prompt tokens beside the patches.

    Each stream owns one contiguous span right after the class and register tokens, in the order given, with its tokens in order of entry.
    Before a layer, a stream's new tokens are appended to its span, or take the place of the whole span if the stream replaces. Prompts
    have no positional embedding. They are left out before the model's own norm and pooling, so every kind of pooling ignores them.
    Nothing is written into the backbone: clients share it, and any number of prompted passes may run over it at once.

    Args:
        trunk: From :func:`vit_trunk`, or your own.
        images: What the backbone takes.
        *streams: From prompt modules or made by hand. None: exactly the plain backbone. Tokens are cast to the backbone's dtype.
        depth: Run only this many first blocks; None runs all. The last norm and the pooling follow all the same (SGPT's early query).

    Returns:
        The pooled features, and each stream's own tokens after the last block and norm.

    Raises:
        TypeError: If `trunk` is no :class:`Trunk`, a stream is no :class:`PromptStream` of floating-point tokens, or `images` are of the
            wrong kind.
        ValueError: If `depth` or a layer lies outside the trunk, tokens have the wrong width, batch or device, or the
            trunk is no longer frozen.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> from fedprompt import ShallowPrompts, vit_trunk
        >>> trunk = vit_trunk(VisionTransformer(img_size=16, patch_size=4, num_classes=0, embed_dim=8, depth=2, num_heads=2))
        >>> prompts = ShallowPrompts(3, trunk.dim, patch_size=4)
        >>> encoded = encode_prompted(trunk, torch.zeros(5, 3, 16, 16), prompts())
        >>> encoded.pooled.shape, encoded.streams[0].shape
        (torch.Size([5, 8]), torch.Size([5, 3, 8]))
    """
    if not isinstance(trunk, Trunk):
        raise wrong_type("trunk", "be a Trunk, such as vit_trunk(model)", type(trunk).__name__)
    check_images(images)
    depth = _checked_depth(trunk, depth)
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
    return Encoded(trunk.pool(plain), tuple(trunk.normalize(span) for span in spans))


def batch_streams(
    streams: Sequence[PromptStream], owner: Integer[Tensor, " batch"]
) -> PromptStream:
    """Give each sample the prompts of its own client: several clients in one forward of one shared trunk.

    Losses and gradients equal those of separate runs: each sample's gradient reaches its owner's prompts alone.

    Args:
        streams: One for each client, all with the same layers, lengths and `replace`, without a batch axis.
        owner: For each sample the index of its client in `streams`; looked at on a CPU only, because looking costs a sync on a GPU.

    Returns:
        A stream with tokens (batch, prompts, dim).

    Raises:
        TypeError: If a stream is no :class:`PromptStream` or `owner` does not hold integers.
        ValueError: If there is no stream, streams differ in layout, or an owner lies outside them.

    Example:
        >>> first, second = PromptStream({0: torch.zeros(1, 2)}), PromptStream({0: torch.ones(1, 2)})
        >>> batch_streams([first, second], torch.tensor([1, 0, 1])).layers[0][:, 0, 0]
        tensor([1., 0., 1.])
    """
    if not streams:
        raise wrong_value("streams", "hold at least one stream", "none")
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
                "hold tokens of shape (prompts, dim)",
                f"{tuple(tokens.shape)} at layer {layer}",
            )
    check_labels("owner", owner, len(streams), sync=False)
    layers = {
        layer: torch.stack([stream.layers[layer] for stream in streams])[owner.long()]
        for layer in first.layers
    }
    return PromptStream(layers, first.replace)


def _entered(stream: PromptStream, layer: int, span: Tensor) -> Tensor:
    """The stream's span before a layer: its old tokens, if they stay, and then its new ones."""
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
                f"{argument}.layers", f"lie in the {depth} blocks that run, 0 to {depth - 1}", layer
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
                f"lie on the trunk's device {tokens.device}",
                prompts.device,
            )
