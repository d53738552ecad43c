"""The histogram of latencies."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.latency import Latencies

SECONDS = st.floats(1e-5, 100)


@given(st.lists(SECONDS, min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_within_one_percent(seconds: list[float], q: float) -> None:
    latencies = Latencies()
    for value in seconds:
        latencies.observe(value)
    exact = sorted(seconds)[math.ceil(q * len(seconds)) - 1]
    assert latencies.quantile_ms(q) == pytest.approx(exact * 1000, rel=0.0101)


@given(st.lists(SECONDS), st.lists(SECONDS))
def test_merging_equals_observing_all(first: list[float], second: list[float]) -> None:
    parts = [Latencies(), Latencies(), Latencies()]
    for value in first:
        parts[0].observe(value)
    for value in second:
        parts[1].observe(value)
    for value in first + second:
        parts[2].observe(value)
    parts[0].merge(pickle.loads(pickle.dumps(parts[1])))  # noqa: S301 - our own bytes
    assert parts[0] == parts[2]
    assert parts[0].count == len(first) + len(second)


def test_without_observations_there_is_no_quantile() -> None:
    assert math.isnan(Latencies().quantile_ms(0.5))
