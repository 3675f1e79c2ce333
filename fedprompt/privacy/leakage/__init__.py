"""What messages and models give away about training images, and a bound on epsilon.

Each measurement has a score of candidate images, and :func:`measured` makes the AUC and the true
positives at 1 % false positives of it, against held-out images and a run without the members:

- membership from messages: :func:`observed` and :func:`message_scores` for a curious server,
  :func:`probed` and :func:`message_scores` for one that sends crafted answers;
- membership from a published model: :func:`confidences`, and :func:`likelihood_ratios`;
- reconstruction from one message: :func:`reconstructed` and :func:`similarities`.

An attack that does not work is a result only if it works on a model that leaks. Such a control is
:class:`MemorizingClassifier`, or a client with one image.
"""

from fedprompt.privacy.leakage.messages import (
    Received,
    crafted_answer,
    message_scores,
    observed,
    probed,
)
from fedprompt.privacy.leakage.published import MemorizingClassifier, confidences, likelihood_ratios
from fedprompt.privacy.leakage.reconstruction import descent, reconstructed, similarities
from fedprompt.privacy.leakage.success import Leakage, Success, epsilon_bound, measured, success

__all__ = [
    "Leakage",
    "MemorizingClassifier",
    "Received",
    "Success",
    "confidences",
    "crafted_answer",
    "descent",
    "epsilon_bound",
    "likelihood_ratios",
    "measured",
    "message_scores",
    "observed",
    "probed",
    "reconstructed",
    "similarities",
    "success",
]
