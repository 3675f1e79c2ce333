"""The frozen CLIP classifies with a handwritten sentence, and nothing is trained.

The sentence contains the class name, such as "a photo of a three.". It is the reference that shows
how much training adds. Radford et al., "Learning Transferable Visual Models From Natural Language
Supervision", ICML 2021.

Up: nothing. Down: nothing.

Deviations: there is one sentence for each class, without an ensemble.

Compared: its definition, float64, largest difference 6.9e-15 (2026-11).
"""

from collections.abc import Iterator
from functools import partial

import fedprompt as fp
from methods.federation import ClipFederation, Predictions

FAMILIES = ("CLIP",)
TRAITS = ()
SEARCH = {}


def zero_shot(federation: ClipFederation) -> Iterator[Predictions]:
    """Zero-shot CLIP."""
    classify = partial(fp.cosine_logits, text=federation.handwritten_text(), scale=federation.scale)
    for _ in range(federation.rounds):
        yield Predictions(everyone=lambda tokens: classify(tokens[:, 0]))
