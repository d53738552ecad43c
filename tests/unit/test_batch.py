"""From groups to samples: masks, advantages, weights, staleness; episodes without signal stay out."""

import pytest

from orchestrator.run.batch import BatchBuilder
from reward.score import Score, Status
from rollout_workers.types import Episode


def episode(domain: str, reward: float, tokens: int = 3, version: int = 0, status: Status = Status.OK) -> Episode:
    score = Score.infra_error("x") if status is Status.INFRA_ERROR else Score({}, reward, reward == 1, status)
    return Episode(
        id="e",
        domain=domain,
        task_id="t",
        token_ids=(9, 9) + (1,) * tokens,
        loss_mask=(0, 0) + (1,) * tokens,
        logprobs=(0.0, 0.0) + (-0.5,) * tokens,
        versions=(-1, -1) + (version,) * tokens,
        turns=(),
        score=score,
        seconds=0.0,
    )


def build(groups, weights=None, version: int = 1):
    return BatchBuilder(weights or dict.fromkeys(groups, 1.0), deviation_memory=8).build(version, groups)


def test_samples_carry_credit_on_policy_tokens_alone() -> None:
    built = build({"a": [[episode("a", 0.0), episode("a", 1.0)]]})
    assert [sample.advantages[:2] for sample in built.samples] == [(0.0, 0.0)] * 2
    assert [sample.weights[:2] for sample in built.samples] == [(0.0, 0.0)] * 2
    low, high = (sample.advantages[2] for sample in built.samples)
    assert low == -high < 0


def test_weights_sum_to_the_domains_shares_whatever_lengths_and_counts() -> None:
    groups = {
        "short": [[episode("short", 0.0, 2), episode("short", 1.0, 2)]],
        "long": [[episode("long", float(i % 2), 100) for i in range(8)] for _ in range(3)],
    }
    built = build(groups, {"short": 1.0, "long": 3.0})
    mass = {tag: sum(sum(s.weights) for s in built.samples if s.tag == tag) for tag in groups}
    assert mass == pytest.approx({"short": 0.25, "long": 0.75})


def test_groups_without_signal_stay_out_and_are_counted() -> None:
    groups = {"a": [[episode("a", 1.0)] * 3, [episode("a", 0.0), episode("a", 1.0)]]}
    built = build(groups)
    assert len(built.samples) == 2
    part = built.domains["a"]
    assert (part.groups, part.groups_with_signal, part.episodes, part.trained_tokens) == (2, 1, 5, 6)
    assert part.pass_rate == pytest.approx(4 / 5)


def test_infrastructure_errors_leave_everything() -> None:
    broken = episode("a", 0.0, status=Status.INFRA_ERROR)
    with_error = build({"a": [[episode("a", 0.0), episode("a", 1.0), broken]]})
    without = build({"a": [[episode("a", 0.0), episode("a", 1.0)]]})
    assert with_error.samples == without.samples
    assert with_error.domains == without.domains


def test_staleness_is_that_of_the_oldest_policy_token() -> None:
    groups = {
        "a": [[episode("a", 0.0, tokens=1, version=5), episode("a", 1.0, tokens=3, version=3)]],
        "b": [[episode("b", 0.0, version=5), episode("b", 1.0, version=4)]],
    }
    built = build(groups, version=5)
    assert built.staleness == 2
    assert {name: (part.staleness, part.mean_staleness) for name, part in built.domains.items()} == {
        "a": (2, 1.5),
        "b": (1, 0.5),
    }


def test_scale_of_one_domain_changes_no_sample() -> None:
    """Rule 5: the same outcomes on a scale 1000 times larger train exactly the same."""
    small = {"a": [[episode("a", r) for r in (0.0, 0.25, 1.0)]], "b": [[episode("b", 0.0), episode("b", 1.0)]]}
    large = {"a": [[episode("a", 1000 * r) for r in (0.0, 0.25, 1.0)]], "b": small["b"]}
    for one, other in zip(build(small).samples, build(large).samples, strict=True):
        assert one.advantages == pytest.approx(other.advantages)
        assert one.weights == other.weights
