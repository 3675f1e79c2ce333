"""Random numbers for privacy, drawn from the operating system unless a generator is given."""

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._conversions import widened

NEVER_SEEDED = torch.Generator().initial_seed()  # the same for every new generator
CHUNK = 2**15  # random words of 8 bytes for one call to the operating system


def check_source(generator: Any) -> None:
    """Require None or a seeded generator on the CPU."""
    if generator is None:
        return
    check.instance("generator", generator, torch.Generator, "be a torch.Generator or None")
    rule = "be on the CPU"
    check.require(generator.device.type == "cpu", "generator", rule, f"one on {generator.device}")
    rule = "be None (the operating system's entropy) or a seeded generator"
    fits = generator.initial_seed() != NEVER_SEEDED
    check.require(fits, "generator", rule, "a torch.Generator that was never seeded")


def coins(count: int, *, rate: float, generator: torch.Generator | None) -> Int[Tensor, " heads"]:
    """Return the indices of the heads among `count` independent coins."""
    heads = []
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        if generator is None:
            numbers = _random_bits(size, 53).double().mul_(2.0**-53)  # exact in float64: never 1.0
        else:
            numbers = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        heads.append((numbers < rate).nonzero()[:, 0] + start)
    return torch.cat(heads)


def deviation(
    multiplier: float, bound: float, *, dtypes: Iterable[torch.dtype], divisor: float = 1.0
) -> float:
    """Multiply a noise multiplier by a bound. The product may be 0 only if `multiplier` is.

    Noise of this deviation, also after a division by `divisor`, must not be subnormal in any dtype.
    """
    sigma = float(multiplier) * float(bound)
    least = min(sigma, sigma / float(divisor))
    for dtype in dtypes:
        if multiplier > 0 and least < (smallest := torch.finfo(dtype).smallest_normal):
            rule = f"be 0 or give noise of deviation at least {smallest:.2g} in {dtype}"
            raise check.wrong("multiplier", rule, f"{least:.3g}")
    return sigma


def with_noise(
    value: Float[Tensor, "*shape"], *, sigma: float, generator: torch.Generator | None
) -> Float[Tensor, "*shape"]:
    """Add independent normal deviates times `sigma`, in float64."""
    value = widened(value)
    noise = normal(value.shape, generator=generator).to(value.device)
    return noise.mul_(sigma).add_(value)


def normal(shape: Sequence[int], *, generator: torch.Generator | None) -> Float[Tensor, "*shape"]:
    r"""Draw independent standard normal deviates in float64, on the CPU.

    Without a generator, two uniform numbers of 63 random bits each become two deviates (Box and
    Muller): :math:`\sqrt{-2 \ln u}\,(\cos 2\pi v, \sin 2\pi v)`. The largest magnitude is 9.4.

    References:
        Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.
    """
    if generator is not None:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    deviates = torch.empty(math.prod(shape), dtype=torch.float64, device="cpu")
    for start in range(0, len(deviates), CHUNK):
        chunk = deviates[start : start + CHUNK]
        pairs = (len(chunk) + 1) // 2
        bits = _random_bits(2 * pairs, 63).double().reshape(2, pairs)
        radius = bits[0].add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
        angle = bits[1].mul_(2.0**-63 * 2 * math.pi)
        chunk[:pairs] = angle.cos().mul_(radius)
        chunk[pairs:] = angle.sin_().mul_(radius)[: len(chunk) - pairs]
    return deviates.reshape(shape)


def _random_bits(count: int, width: int) -> Int[Tensor, " count"]:
    """Draw integers of `width` random bits (at most 63) from the operating system."""
    words = torch.empty(count, dtype=torch.int64, device="cpu")
    words.view(torch.uint8).numpy()[:] = memoryview(os.urandom(8 * count))
    return words.bitwise_and_(2**width - 1)
