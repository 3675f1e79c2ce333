"""Checks of images where they are given to a model: channels, size, device and dtype."""

from typing import NamedTuple

import torch.nn as nn
from torch import Tensor

from fedprompt._checks import check_images, wrong_value


class Sizes(NamedTuple):
    """Sizes (height, width) of the images that a model takes, in pixels.

    Attributes:
        own: Size of the model's images, or None if it has none.
        patch: Other sizes are multiples of this one. If None, there are no other sizes.
    """

    own: tuple[int, int] | None
    patch: tuple[int, int] | None


ANY_SIZE = Sizes(None, (1, 1))


def fitted(images: Tensor, model: nn.Module, sizes: Sizes) -> Tensor:
    """Return images in the dtype of the model's first layer, after all checks."""
    check_images(images)
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    first = next(convolutions, None)
    if first is not None:
        _check_channels(images, first.in_channels)
    _check_size(images, sizes)
    return cast("images", images, model if first is None else first)


def cast(argument: str, inputs: Tensor, model: nn.Module) -> Tensor:
    """Return images or tokens in a model's dtype; they must be on its device."""
    weight = next(model.parameters())
    if inputs.device != weight.device:
        rule = f"be on the trunk's device {weight.device}"
        raise wrong_value(argument, rule, inputs.device)
    return inputs.to(weight.dtype)


def _check_channels(images: Tensor, channels: int) -> None:
    shape = tuple(images.shape)
    if shape[1] == channels:
        return
    hint = ""
    if shape[3] in (1, channels):
        hint = " in front of height and width; call images.permute(0, 3, 1, 2)"
    elif shape[1] == 1:
        hint = f"; for gray images, call images.expand(-1, {channels}, -1, -1)"
    raise wrong_value("images", f"have {channels} channels{hint}", shape)


def _check_size(images: Tensor, sizes: Sizes) -> None:
    size = tuple(images.shape[2:])
    if size == sizes.own:
        return
    if sizes.patch is None:
        rule = f"have the model's size {sizes.own}, because its positions are fixed"
        raise wrong_value("images", rule, size)
    if any(not side or side % step for side, step in zip(size, sizes.patch, strict=True)):
        rule = f"have a size that is a multiple of the patches' {sizes.patch}"
        raise wrong_value("images", rule, size)
