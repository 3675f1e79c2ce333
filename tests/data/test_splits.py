"""Splits of samples into study and quiz, into a few of each class, and of classes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt.data import base_new_split, few_shot, group_split, leave_one_out, study_quiz_split


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_quiz_has_its_size_and_the_study_the_rest(samples: int, size: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    study, quiz = study_quiz_split([1] * samples, quiz_size=size, generator=draw)
    assert study.dtype == quiz.dtype == np.int64
    assert len(quiz) == min(size, samples)
    assert sorted([*study, *quiz]) == list(range(samples))
    assert quiz.tolist() == sorted(quiz)


def test_every_sample_is_in_the_quiz_equally_often() -> None:
    # 3 of 12 samples: each in a quarter of 1600 draws, 400, within 5 sqrt(1600 * 3 / 16) = 87.
    draws = [np.random.default_rng(seed) for seed in range(1600)]
    drawn = [study_quiz_split([0] * 12, quiz_size=3, generator=draw)[1] for draw in draws]
    found = np.bincount(np.concatenate(drawn), minlength=12)
    np.testing.assert_allclose(found, 400, rtol=0, atol=87)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=2).filter(lambda own: len({*own}) > 1), st.floats(0, 1))
def test_a_group_is_on_one_side(groups: list[int], share: float) -> None:
    sides = group_split(groups, share=max(share, 1e-9), generator=np.random.default_rng(0))
    kept, held = ({groups[place] for place in side} for side in sides)
    assert sorted(np.concatenate(sides)) == list(range(len(groups)))
    assert not kept & held
    assert len(held) == min(max(round(share * len({*groups})), 1), len({*groups}) - 1)


def test_each_domain_is_left_out_in_turn() -> None:
    names = ["b", "a", "b", "c"]
    found = {name: [part.tolist() for part in pair] for name, pair in leave_one_out(names).items()}
    assert found == {
        name: [[k for k in range(4) if names[k] != name], [k for k in range(4) if names[k] == name]]
        for name in "abc"
    }


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


@pytest.mark.parametrize("num_classes", [2, 3, 10, 37, 101, 998])
def test_base_classes_are_the_first_half_and_the_middle_one(num_classes: int) -> None:
    """Compare with the rule of CoCoOp's code: the first ``ceil(n / 2)`` classes are base."""
    base, new = base_new_split(num_classes)
    assert base.tolist() == list(range(math.ceil(num_classes / 2)))
    assert new.tolist() == list(range(math.ceil(num_classes / 2), num_classes))
    assert base.dtype == new.dtype == np.int64
