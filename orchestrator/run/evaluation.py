"""Held-out measurement before and after training, paired task by task.

Each task is played once, at `engine.sampling.eval_temperature`. The interval of a domain's change is Student's t on the
per-task differences d_i, with the paired standard error √(Σ(d−d̄)²/(n(n−1))) (arXiv 2411.00640, section on paired
differences); the macro change is the mean over domains, its variance the sum of theirs over D².
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from orchestrator.run.fleet import WorkerHandle
from reward.score import Status
from reward.task import Task
from rollout_workers.types import Episode
from rollout_workers.worker import GroupRequest


@dataclass(frozen=True, slots=True)
class DomainScores:
    """Pass or fail of a domain's held-out tasks, for example `DomainScores({"add-3-5": True}, {"add-3-5": 1.0})`."""

    passed: Mapping[str, bool]
    """By task id; tasks that ended in an infrastructure error are absent."""
    reward: Mapping[str, float]
    """Total on [0, 1] by task id."""

    @property
    def pass_rate(self) -> float:
        """Share of passed tasks; NaN when nothing could be graded."""
        return sum(self.passed.values()) / len(self.passed) if self.passed else math.nan


@dataclass(frozen=True, slots=True)
class Delta:
    """A change with its interval, for example `Delta(0.2, 0.5, 0.3, (0.21, 0.39), 100)`."""

    baseline: float
    """Mean before, over the paired tasks."""
    final: float
    """Mean after, over the same."""
    delta: float
    """Difference."""
    interval: tuple[float, float]
    """Confidence interval of the difference."""
    n: int
    """Paired tasks (for the macro figure: domains)."""
    variance: float
    """Squared standard error of the difference."""


async def evaluate(
    workers: Sequence[WorkerHandle],
    tasks: Mapping[str, Sequence[Task]],
    *,
    temperature: float,
    retries: int,
    label: str,
) -> dict[str, DomainScores]:
    """Play every task once, spread over the workers. `label` names the measurement in episode ids."""

    async def one(index: int, task: Task) -> Episode:
        request = GroupRequest(f"{task.domain}/{task.id}@{label}", task, 1, temperature, retries, seed=index)
        return (await workers[index % len(workers)].run_group(request))[0]

    flat = [task for rows in tasks.values() for task in rows]
    episodes = await asyncio.gather(*(one(index, task) for index, task in enumerate(flat)))
    valid = [episode for episode in episodes if episode.score.status is not Status.INFRA_ERROR]
    return {
        name: DomainScores(
            {e.task_id: e.score.passed for e in valid if e.domain == name},
            {e.task_id: e.score.total for e in valid if e.domain == name},
        )
        for name in tasks
    }


def paired_delta(before: DomainScores, after: DomainScores, confidence: float) -> Delta:
    """The change of a domain's pass rate over the tasks that both measurements graded."""
    shared = sorted(before.passed.keys() & after.passed.keys())
    n = len(shared)
    if n == 0:
        return Delta(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, math.nan)
    first = [float(before.passed[task]) for task in shared]
    last = [float(after.passed[task]) for task in shared]
    changes = [b - a for a, b in zip(first, last, strict=True)]
    mean = sum(changes) / n
    variance = sum((d - mean) ** 2 for d in changes) / (n * (n - 1)) if n > 1 else math.nan
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * math.sqrt(variance) if n > 1 else math.nan
    return Delta(sum(first) / n, sum(last) / n, mean, (mean - half, mean + half), n, variance)


def macro_delta(deltas: Sequence[Delta], confidence: float) -> Delta:
    """The unweighted mean over domains, with a normal interval."""
    count = len(deltas)
    variance = sum(delta.variance for delta in deltas) / count**2
    mean = sum(delta.delta for delta in deltas) / count
    half = float(stats.norm.ppf((1 + confidence) / 2)) * math.sqrt(variance)
    return Delta(
        sum(delta.baseline for delta in deltas) / count,
        sum(delta.final for delta in deltas) / count,
        mean,
        (mean - half, mean + half),
        count,
        variance,
    )
