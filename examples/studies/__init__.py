"""The studies of our pages: problems of real images, and the rows that run on them."""

from functools import partial

from fedprompt import compare
from studies import ablations, codecs, digits, emoji, patches, photos, privacy, reproduction, sizes
from studies.core import Machine, Study

MODULES = (digits, emoji, photos, patches, ablations, codecs, privacy, reproduction, sizes)

STUDIES: dict[str, Study] = {
    name: study for module in MODULES for name, study in module.STUDIES.items()
}
"""All studies by name."""


def problem(name: str, partition: str, files: Machine) -> compare.Problem:
    """Make the problem of a partition; another process makes it in the same way."""
    again = partial(problem, name, partition, files)
    return STUDIES[name].problem(partition, files, again=again)
