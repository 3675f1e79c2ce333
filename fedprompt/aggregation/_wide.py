"""Float64 sums of products with an extended exponent, so that finite terms never overflow."""

import torch
from torch import Tensor

from fedprompt.interfaces.nouns import per_row

UNIT = 1200
"""Exponent of the unit of a high sum. 2**60 terms below 2**2048, scaled by 2**60, still fit."""

HALF_UNIT = 2.0 ** (-UNIT // 2)  # 2**-1200 itself is below the smallest float64
LARGEST = torch.finfo(torch.float64).max


class WideSum:
    """Running float64 sum of products, split into two parts when one part would overflow.

    `low` is the ordinary sum. If a term would make a coordinate of `low` overflow, it is added to
    the same coordinate of `high` instead, in units of 2**1200. `high` is None until then, and the
    sum is bitwise identical to ``low += value * factor``.
    """

    def __init__(self, start: Tensor) -> None:
        self.low = start
        self.high: Tensor | None = None

    def add(self, value: Tensor, factor: Tensor | float = 1.0) -> None:
        """Add finite values times finite factors."""
        total = self.low + value * factor
        fits = total.isfinite()
        self.low = torch.where(fits, total, self.low)
        if not bool(fits.all()):
            self._add_high(torch.where(fits, 0.0, (value * HALF_UNIT) * (factor * HALF_UNIT)))

    def add_sum(self, other: "WideSum", factor: float) -> None:
        """Add another sum times a factor of at most 2**60."""
        self.add(other.low, factor)
        if other.high is not None:
            self._add_high(other.high * factor)

    def over(self, divisor: "WideSum") -> Tensor:
        """Divide each row by its sum in `divisor`, or by 1 if that is 0. The result is finite."""
        if self.high is None and divisor.high is None:
            safe = torch.where(divisor.low > 0, divisor.low, 1.0)
            return (self.low / per_row(safe, self.low)).clamp(-LARGEST, LARGEST)
        mantissa, exponent = self._parts()
        row_mantissa, row_exponent = divisor._parts()
        safe = torch.where(row_mantissa > 0, row_mantissa, 1.0)
        shift = exponent - per_row(row_exponent, exponent)
        return _times_power(mantissa / per_row(safe, mantissa), shift)

    def saturated(self) -> Tensor:
        """Return the sum as float64, clamped to the largest finite number."""
        return self.low if self.high is None else _times_power(*self._parts())

    def _add_high(self, term: Tensor) -> None:
        self.high = term if self.high is None else self.high + term

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Return mantissa and exponent. The low sum is used where the high terms cancel."""
        if self.high is None:
            return _split(self.low)
        wide = self.high != 0
        high = self.high + self.low * HALF_UNIT * HALF_UNIT
        mantissa, exponent = _split(torch.where(wide, high, self.low))
        return mantissa, torch.where(wide, exponent + UNIT, exponent)


def _split(number: Tensor) -> tuple[Tensor, Tensor]:
    """Return mantissa and exponent; ``torch.frexp`` loses the gradient beyond float32."""
    exponent = torch.frexp(number.detach()).exponent
    return _times_power(number, -exponent), exponent


def _times_power(mantissa: Tensor, exponent: Tensor) -> Tensor:
    """Multiply by a power of two in two steps, because the power itself may overflow."""
    half = exponent.div(2, rounding_mode="floor")
    for part in (half, exponent - half):
        mantissa = mantissa * torch.exp2(part.double())
    return mantissa.clamp(-LARGEST, LARGEST)
