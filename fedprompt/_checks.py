"""A facade until the rooms are moved."""

from fedprompt._entries import *  # noqa: F403
from fedprompt._refusals import *  # noqa: F403
from fedprompt._refusals import INTEGERS, LARGEST_INT, LONGEST  # noqa: F401
