"""From raw components to a score."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.config import DomainConfig
from reward.errors import DomainError, RewardOutOfRange, VerifierFailed
from reward.score import Status
from reward.scoring import bounds, lowest, score
from reward.task import Task

TASK = Task("t1", "demo", "train", "go", {"tests": [1, 2, 3, 4], "limit": 8.0})


def domain(**components):
    return DomainConfig.model_validate(
        {"name": "demo", "environment": "env.py:Env", "components": {"success": {"range": [0, 1]}, **components}}
    )


def test_components_are_scaled_weighted_and_inverted():
    config = domain(
        tests={"range": [0, "tests"], "weight": 2, "kind": "progress"},
        steps={"range": [1, 5], "weight": 1, "kind": "cost"},
    )
    result = score(config, TASK, {"success": 1, "tests": 3, "steps": 2}, Status.OK)
    assert result.total == pytest.approx((1 + 2 * 0.75 + 1 * 0.75) / 4)
    assert result.passed
    assert result.components == {"success": 1.0, "tests": 3.0, "steps": 2.0}


def test_only_outcomes_at_the_top_pass():
    config = domain(tests={"range": [0, "tests"]})
    assert score(config, TASK, {"success": 1, "tests": 4}, Status.OK).passed
    assert not score(config, TASK, {"success": 1, "tests": 3}, Status.OK).passed
    assert not score(config, TASK, {"success": 0, "tests": 4}, Status.OK).passed


@given(st.floats(0, 1), st.floats(1, 5))
def test_a_gated_cost_never_makes_failing_better_than_passing(share, steps):
    config = domain(steps={"range": [1, 5], "kind": "cost", "weight": 0.3, "when": "success"})
    partial = score(config, TASK, {"success": share, "steps": steps}, Status.OK)
    full = score(config, TASK, {"success": 1, "steps": 5}, Status.OK)
    assert partial.passed or partial.total <= full.total
    if share < 1 - 1e-6:
        assert partial.total == pytest.approx(share / 1.3)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.floats(0, 1), st.sampled_from([1e-3, 1e3]))
def test_the_total_does_not_depend_on_the_unit_of_the_range(low, width, share, unit):
    def total(factor):
        config = domain(points={"range": [low * factor, (low + width) * factor], "kind": "progress"})
        raw = {"success": 0, "points": min(low + share * width, low + width) * factor}
        return score(config, TASK, raw, Status.OK).total

    assert total(unit) == pytest.approx(total(1.0), abs=1e-6)
    assert 0 <= total(unit) <= 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", [1], {}], ids=repr)
def test_what_is_no_finite_number_is_a_verifiers_failure(value):
    with pytest.raises(VerifierFailed, match=r"domain 'demo': component 'success'"):
        score(domain(), TASK, {"success": value}, Status.OK)


def test_missing_and_undeclared_components_are_a_verifiers_failure():
    with pytest.raises(VerifierFailed, match="'success' is None"):
        score(domain(), TASK, {}, Status.OK)
    with pytest.raises(VerifierFailed, match="'bonus' was returned but is not declared"):
        score(domain(), TASK, {"success": 1, "bonus": 1}, Status.OK)


@pytest.mark.parametrize("value", [True, np.float32(1), np.int64(1), 1])
def test_booleans_and_numpy_numbers_are_numbers(value):
    result = score(domain(), TASK, {"success": value}, Status.OK)
    assert result.total == 1.0
    assert type(result.components["success"]) is float


@pytest.mark.parametrize("value", [-0.01, 1.01, 1 + 1e-8, 1000])
def test_leaving_the_range_names_domain_component_value_range_and_remedy(value):
    with pytest.raises(RewardOutOfRange) as error:
        score(domain(), TASK, {"success": value}, Status.OK)
    for part in ("'demo'", "'success'", f"{value:g}", "[0, 1]", "components.success.range", "domain.toml"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [1 + 1e-10, 1 - 1e-10, 1.0])
def test_rounding_at_the_top_is_the_top(value):
    result = score(domain(), TASK, {"success": value}, Status.OK)
    assert result.passed
    assert result.total == 1.0


def test_an_upper_end_may_be_a_number_or_a_lists_length():
    config = domain(tests={"range": [0, "tests"]}, limit={"range": [0, "limit"]})
    assert bounds("tests", config.components["tests"], TASK) == (0.0, 4.0)
    assert bounds("limit", config.components["limit"], TASK) == (0.0, 8.0)


@pytest.mark.parametrize(
    "data", [{}, {"tests": "4"}, {"tests": True}, {"tests": []}, {"tests": 0}, {"tests": math.nan}]
)
def test_an_upper_end_that_the_task_does_not_give_is_the_domains_fault(data):
    config = domain(tests={"range": [0, "tests"]})
    with pytest.raises(DomainError, match=r"`components\.tests\.range`.*`?data\.tests"):
        bounds("tests", config.components["tests"], Task("t1", "demo", "train", "go", data))


def test_the_lowest_values_score_nothing():
    config = domain(steps={"range": [1, 5], "kind": "cost"}, tests={"range": [-2, "tests"], "kind": "progress"})
    worst = lowest(config, TASK)
    assert worst == {"success": 0.0, "steps": 5.0, "tests": -2.0}
    assert score(config, TASK, worst, Status.POLICY_FAILURE).total == 0.0


def test_status_detail_and_labels_travel():
    result = score(domain(), TASK, {"success": 0}, Status.TRUNCATED, "too long", {"kind": "sum"})
    assert (result.status, result.detail, result.labels) == (Status.TRUNCATED, "too long", {"kind": "sum"})
