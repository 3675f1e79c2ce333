"""Numbers of generated examples: few by default, more with a factor in the environment."""

import os

from hypothesis import settings

FACTOR = int(os.environ.get("FEDPROMPT_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Return settings for a number of examples, times the factor."""
    return settings(deadline=None, max_examples=count * FACTOR)
