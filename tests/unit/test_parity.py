"""The comparison of engine and trainer log-probabilities."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_workers.parity import compare

VALUES = st.lists(st.floats(-20, 0), min_size=1, max_size=5)


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_equal_answers_have_no_gap(answers: list[list[float]]) -> None:
    result = compare(answers, answers)
    assert (result.max_gap, result.mean_gap, result.tokens) == (0.0, 0.0, sum(map(len, answers)))


def test_gaps_are_absolute_and_over_all_sequences() -> None:
    result = compare([[-1.0, -2.0], [-3.0]], [[-1.5, -2.0], [-2.0]])
    assert (result.max_gap, result.mean_gap, result.tokens) == (1.0, 0.5, 3)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_value_that_is_not_finite_is_never_within_tolerance(value: float) -> None:
    assert compare([[-1.0, value]], [[-1.0, value]]).max_gap == math.inf


@pytest.mark.parametrize("trainer", [[[-1.0]], [[-1.0, -2.0], [-1.0]]])
def test_answers_to_different_questions_are_an_error(trainer: list[list[float]]) -> None:
    with pytest.raises(ValueError):
        compare([[-1.0, -2.0]], trainer)


def test_a_probe_without_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least two"):
        compare([[]], [[]])
