"""Expected errors."""

import re
from contextlib import AbstractContextManager

import pytest


def raises(error: type[Exception], message: str) -> AbstractContextManager:
    """Expect an error whose text contains `message` literally."""
    return pytest.raises(error, match=re.escape(message))
