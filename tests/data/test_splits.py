"""Splits of a client's samples into study and quiz."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import study_quiz_split


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_quiz_has_its_size_and_the_study_the_rest(
    num_samples: int, quiz_size: int, seed: int
) -> None:
    study, quiz = study_quiz_split(
        [0] * num_samples, quiz_size=quiz_size, generator=np.random.default_rng(seed)
    )
    assert len(quiz) == min(quiz_size, num_samples)
    assert sorted([*study, *quiz]) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [0, 1, 9, 10])
def test_a_small_client_has_an_empty_study_set(num_samples: int) -> None:
    study, quiz = study_quiz_split(
        [1] * num_samples, quiz_size=10, generator=np.random.default_rng(0)
    )
    assert study.tolist() == []
    assert quiz.tolist() == list(range(num_samples))
    assert study.dtype == quiz.dtype == np.int64


def test_every_sample_is_in_the_quiz_equally_often() -> None:
    # 3 of 12 samples: each in a quarter of 1600 draws, 400, within 5 sqrt(1600 * 3 / 16) = 87.
    drawn = [
        study_quiz_split([0] * 12, quiz_size=3, generator=np.random.default_rng(seed))[1]
        for seed in range(1600)
    ]
    np.testing.assert_allclose(
        np.bincount(np.concatenate(drawn), minlength=12), 400, rtol=0, atol=87
    )


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("labels", "quiz_size", "error", "message"),
    [
        ([0, 1], 0, ValueError, "`quiz_size` must be at least 1; got 0"),
        ([0, 1], 0.5, TypeError, "`quiz_size` must be an integer; got 0.5"),
        ([0, -1], 1, ValueError, "`labels` must be at least 0; got values from -1 to 0"),
        ([0.0], 1, TypeError, r"`labels\[0\]` must be an integer; got 0.0"),
    ],
)
def test_study_quiz_split_names_a_bad_argument(
    labels: object, quiz_size: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        study_quiz_split(labels, quiz_size=quiz_size, generator=np.random.default_rng(0))
