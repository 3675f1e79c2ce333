"""What a client holds back from its own samples."""

import numpy as np

from fedprompt._checks import check_count
from fedprompt.data._arguments import Indices, Labels, check_generator, label_array


def study_quiz_split(labels: Labels, *, quiz_size: int, generator: np.random.Generator) -> tuple[Indices, Indices]:
    """Hold out a client's quiz samples, on which it never trains (FedL2G).

    Do it once, before the first round. A client of at most `quiz_size` samples gets them all as its quiz and an empty study set: it has
    nothing to train on, and uploads nothing instead of failing.

    Args:
        labels: Of the client's samples, none being fine; only their number matters.
        quiz_size: At least 1; one batch in FedL2G.
        generator: Source of randomness.

    Returns:
        Positions of study and quiz in `labels`, ascending, int64. They are disjoint, and every sample is in one of them.

    Raises:
        TypeError: If `labels` are not integers, `quiz_size` not an integer, or `generator` not a numpy Generator.
        ValueError: If a label is negative or `quiz_size` below 1.

    Example:
        >>> study_quiz_split([1, 0, 1, 2, 0], quiz_size=2, generator=np.random.default_rng(0))
        (array([0, 1, 3]), array([2, 4]))

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024.
    """
    check_count("quiz_size", quiz_size)
    check_generator(generator)
    order = generator.permutation(len(label_array(labels))).astype(np.int64)
    return np.sort(order[quiz_size:]), np.sort(order[:quiz_size])
