"""Splits of a client's own samples."""

import numpy as np

from fedprompt._checks import check_count
from fedprompt.data._arguments import Generator, Indices, Labels, label_array, numpy_generator


def study_quiz_split(
    labels: Labels, *, quiz_size: int, generator: Generator
) -> tuple[Indices, Indices]:
    """Hold out a client's quiz samples, on which it never trains (FedL2G).

    Split once, before the first round. A client with at most `quiz_size` samples gets an empty
    study set, so it cannot train and has nothing to upload.

    Args:
        labels: Labels of the client's samples, possibly none. Only their number matters.
        quiz_size: Number of quiz samples, at least 1. FedL2G takes one batch.
        generator: Source of randomness, of numpy or torch.

    Returns:
        Positions of study and quiz in `labels`, ascending, int64. They are disjoint and cover all
        samples.

    Example:
        >>> study_quiz_split([1, 0, 1, 2, 0], quiz_size=2, generator=np.random.default_rng(0))
        (array([0, 1, 3]), array([2, 4]))

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
        Learning", 2024.
    """
    check_count("quiz_size", quiz_size)
    generator = numpy_generator(generator)
    order = generator.permutation(len(label_array(labels))).astype(np.int64)
    return np.sort(order[quiz_size:]), np.sort(order[:quiz_size])
