"""Checks of the arguments of prompted passes, and initial values."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._random_streams import device_of
from fedprompt.interfaces import PromptStream, Trunk


def depth_of(trunk: Trunk, depth: int | None) -> int:
    """Return the number of blocks after which a pass over a trunk ends."""
    check.instance("trunk", trunk, Trunk, "be a Trunk, such as vit_trunk(model)")
    if depth is None:
        return trunk.depth
    check.count("depth", depth, at_most=trunk.depth, of="the number of the trunk's blocks")
    return depth


def check_pass(
    trunk: Trunk, streams: Sequence[PromptStream], depth: int | None, dtype: object = None
) -> int:
    """Require prompts of the trunk's width at layers that run, and a floating-point dtype or None.

    Returns:
        Number of blocks after which the pass ends.
    """
    depth = depth_of(trunk, depth)
    for position, stream in enumerate(streams):
        argument = f"streams[{position}]"
        nouns.stream(argument, stream, trunk.dim)
        for layer in stream.layers:
            last = f"the last of {depth} blocks"
            check.count(f"{argument}.layers", layer, at_least=0, at_most=depth - 1, of=last)
    fits = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    check.typed(fits, "dtype", "be a floating-point torch.dtype or None", dtype)
    return depth


def check_fit(streams: Sequence[PromptStream], tokens: Tensor) -> None:
    """Require prompts that fit the batch and the device of the tokens."""
    for position, stream in enumerate(streams):
        for layer, prompts in stream.layers.items():
            argument = f"streams[{position}].layers[{layer}]"
            if prompts.ndim == 3 and prompts.shape[0] != tokens.shape[0]:
                rule = f"have the batch of {tokens.shape[0]} images"
                raise check.wrong(argument, rule, tuple(prompts.shape))
            check.same_device(argument, prompts, tokens.device, "the trunk's device")


def normal_values(
    shape: tuple[int, ...], std: float, generator: torch.Generator | None
) -> Float[Tensor, "*shape"]:
    """Draw initial values from a normal distribution, on the device of the generator."""
    return torch.empty(shape, device=device_of(generator)).normal_(0, std, generator=generator)


def vpt_uniform(
    shape: tuple[int, ...], patch_size: tuple[int, int], generator: torch.Generator | None
) -> Float[Tensor, "*shape"]:
    """Draw VPT's initial values for tokens of width ``shape[-1]``."""
    height, width = patch_size
    bound = math.sqrt(6 / (3 * height * width + shape[-1]))
    values = torch.empty(shape, device=device_of(generator))
    return values.uniform_(-bound, bound, generator=generator)
