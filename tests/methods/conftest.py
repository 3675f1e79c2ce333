"""Precision of the tests of the gallery."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def float64() -> Iterator[None]:
    """Make federations and models in float64.

    In float32, two orders of a sum differ by up to 5e-4 of an entry after two steps in a context:
    its tokens are small, and the first norm of the tower divides by their size. The order depends
    on the processor.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
