"""Splits of samples into study and quiz, into a few of each class, and of classes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import base_new_split, few_shot, group_split, study_quiz_split
from refusals import refused


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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2).filter(lambda own: len({*own}) > 1), st.floats(0, 1))
def test_a_group_is_on_one_side(groups: list[int], share: float) -> None:
    sides = group_split(groups, share=max(share, 1e-9), generator=np.random.default_rng(0))
    kept, held = ({groups[place] for place in side} for side in sides)
    assert sorted(np.concatenate(sides)) == list(range(len(groups)))
    assert not kept & held
    assert len(held) == min(max(round(share * len({*groups})), 1), len({*groups}) - 1)


# A few samples of each class.


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_every_class_has_its_shots(labels: list[int], shots: int, seed: int) -> None:
    """A class has `shots` samples, or all that it has."""
    kept = few_shot(np.array(labels), shots=shots, generator=np.random.default_rng(seed))
    assert kept.dtype == np.int64
    assert (np.diff(kept) > 0).all()
    sizes, chosen = np.bincount(labels), np.bincount(np.array(labels)[kept])
    assert chosen.tolist() == np.minimum(sizes, shots).tolist()


# Base and new classes.


@pytest.mark.parametrize("num_classes", [2, 3, 10, 37, 101, 998])
def test_base_classes_are_the_first_half_and_the_middle_one(num_classes: int) -> None:
    """Compare with the rule of CoCoOp's code: the first ``ceil(n / 2)`` classes are base."""
    base, new = base_new_split(num_classes)
    assert base.tolist() == list(range(math.ceil(num_classes / 2)))
    assert new.tolist() == list(range(math.ceil(num_classes / 2), num_classes))
    assert base.dtype == new.dtype == np.int64


DRAW = np.random.default_rng(0)
test_wrong_calls_are_refused_by_name = refused(globals())("""
study_quiz_split([0, 1], quiz_size=0, generator=DRAW) -> ValueError: `quiz_size` must be at least 1;
study_quiz_split([0, -1], quiz_size=1, generator=DRAW) -> ValueError: `labels` must be at least 0;
few_shot(labels=[0, 1], shots=0, generator=DRAW) -> ValueError: `shots` must be at least 1; got 0
few_shot(labels=[], shots=1, generator=DRAW) -> ValueError: `labels` must hold at least one label;
few_shot(labels=[0, 1], shots=1, generator=0) -> TypeError: `generator` must be a torch.Generator
group_split(['ann'] * 3, share=0.5, generator=DRAW) -> ValueError: `len(set(groups))` must be at
group_split(['ann', 'bob'], share=1.1, generator=DRAW) -> ValueError: `share` must be at most 1; got
group_split(['ann', 'bob'], share=0.0, generator=DRAW) -> ValueError: `share` must be above 0; got
base_new_split(1) -> ValueError: `num_classes` must be at least 2; got 1
""")
