"""Paired intervals against scipy and by simulation; the macro figure; infrastructure errors stay out."""

import math
import random

import numpy as np
import pytest
from scipy import stats

from orchestrator.run.evaluation import DomainScores, evaluate, macro_delta, paired_delta
from orchestrator.run.fake import FakeWorker, Play
from reward.task import Task
from rollout_workers.worker import GroupRequest


def scores(values: list[int]) -> DomainScores:
    return DomainScores(
        {f"t{i}": float(v) for i, v in enumerate(values)}, {f"t{i}": float(v) for i, v in enumerate(values)}
    )


def test_the_interval_is_the_paired_t_interval() -> None:
    rng = random.Random(0)
    before = [int(rng.random() < 0.3) for _ in range(80)]
    after = [int(rng.random() < 0.7) for _ in range(80)]
    delta = paired_delta(scores(before), scores(after), 0.95)
    wanted = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert delta.interval == pytest.approx((wanted.low, wanted.high))
    assert delta.delta == pytest.approx(np.mean(after) - np.mean(before))
    assert delta.n == 80


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(400):
        before = (rng.random(60) < 0.3).astype(int)
        after = (rng.random(60) < 0.5).astype(int)
        low, high = paired_delta(scores(before.tolist()), scores(after.tolist()), 0.95).interval
        covered += low <= 0.2 <= high
    assert 0.91 < covered / 400 < 0.98


def test_only_tasks_that_both_measurements_graded_are_paired() -> None:
    before = DomainScores({"a": False, "b": True}, {})
    after = DomainScores({"b": True, "c": True}, {})
    delta = paired_delta(before, after, 0.95)
    assert (delta.n, delta.baseline, delta.final) == (1, 1.0, 1.0)
    assert math.isnan(delta.interval[0])


def test_nothing_in_common_is_unknown_and_not_zero() -> None:
    assert math.isnan(paired_delta(DomainScores({}, {}), scores([1]), 0.95).delta)


def test_the_macro_variance_is_that_of_a_mean_of_independent_domains() -> None:
    parts = [
        paired_delta(scores([0, 0, 1, 0]), scores([1, 1, 1, 0]), 0.95),
        paired_delta(scores([0] * 9), scores([1] * 4 + [0] * 5), 0.95),
    ]
    macro = macro_delta(parts, 0.95)
    assert macro.delta == pytest.approx((0.5 + 4 / 9) / 2)
    assert macro.variance == pytest.approx((parts[0].variance + parts[1].variance) / 4)
    half = 1.959964 * math.sqrt(macro.variance)
    assert macro.interval == pytest.approx((macro.delta - half, macro.delta + half), abs=1e-5)


async def test_a_task_counts_with_the_mean_of_its_graded_episodes() -> None:
    def script(request: GroupRequest, index: int) -> Play:
        return Play(error="dead") if index == 3 else Play(float(index == 0))

    tasks = {"a": [Task(f"a{i}", "a", "eval", "") for i in range(2)]}
    worker = FakeWorker(script)
    result = await evaluate([worker], tasks, samples=4, temperature=1.0, retries=0, label="x")
    assert result["a"].passed == pytest.approx({"a0": 1 / 3, "a1": 1 / 3})
    seeds = [range(request.seed, request.seed + request.size) for request in worker.requests]
    assert len({seed for block in seeds for seed in block}) == 8, "no two episodes share a seed"


async def test_each_task_is_played_once_over_all_workers_and_errors_are_left_out() -> None:
    tasks = {"a": [Task(f"a{i}", "a", "eval", "") for i in range(5)], "b": [Task("b0", "b", "eval", "")]}
    workers = [FakeWorker(lambda r, i: Play(error="dead") if r.task.id == "a2" else Play(1.0)) for _ in range(2)]
    result = await evaluate(workers, tasks, samples=1, temperature=0.0, retries=0, label="x")
    assert sorted(r.task.id for w in workers for r in w.requests) == ["a0", "a1", "a2", "a3", "a4", "b0"]
    assert sorted(result["a"].passed) == ["a0", "a1", "a3", "a4"]
    assert result["a"].pass_rate == result["b"].pass_rate == 1.0
    assert {len(w.requests) for w in workers} == {3}
