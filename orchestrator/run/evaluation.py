"""Held-out measurement before and after training, paired task by task.

Each task is played `evaluation.samples` times at `engine.sampling.eval_temperature`, and its mean counts. The interval
of a domain's change is Student's t on the per-task differences d_i, with the paired standard error √(Σ(d−d̄)²/(n(n−1)))
(arXiv 2411.00640, section on paired differences); the macro change is the mean over domains, its variance the sum of
theirs over D².
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

from orchestrator.run.fleet import WorkerHandle
from reward.score import Status
from reward.task import Task
from rollout_workers.types import Episode
from rollout_workers.worker import GroupRequest


@dataclass(frozen=True, slots=True)
class DomainScores:
    """How a domain's held-out tasks went, for example `DomainScores({"add-3-5": 0.75}, {"add-3-5": 0.8})`."""

    passed: Mapping[str, float]
    """Share of a task's episodes that passed, by task id; tasks whose episodes could not be graded are absent."""
    reward: Mapping[str, float]
    """Their mean total on [0, 1], by task id."""

    @property
    def pass_rate(self) -> float:
        """Mean over tasks; NaN when nothing could be graded."""
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
    samples: int,
    temperature: float,
    retries: int,
    label: str,
) -> dict[str, DomainScores]:
    """Play every task `samples` times, spread over the workers. `label` names the measurement in episode ids."""

    async def one(index: int, task: Task) -> list[Episode]:
        name = f"{task.domain}/{task.id}@{label}"
        request = GroupRequest(name, task, samples, temperature, retries, seed=index * samples)
        played = await workers[index % len(workers)].run_group(request)
        return [episode for episode in played if episode.score.status is not Status.INFRA_ERROR]

    flat = [task for rows in tasks.values() for task in rows]
    graded = [played for played in await asyncio.gather(*(one(i, task) for i, task in enumerate(flat))) if played]
    return {
        name: DomainScores(
            {played[0].task_id: fmean(e.score.passed for e in played) for played in graded if played[0].domain == name},
            {played[0].task_id: fmean(e.score.total for e in played) for played in graded if played[0].domain == name},
        )
        for name in tasks
    }


def paired_delta(before: DomainScores, after: DomainScores, confidence: float) -> Delta:
    """The change of a domain's pass rate over the tasks that both measurements graded."""
    shared = sorted(before.passed.keys() & after.passed.keys())
    n = len(shared)
    if n == 0:
        return Delta(math.nan, math.nan, math.nan, (math.nan, math.nan), 0, math.nan)
    first = [before.passed[task] for task in shared]
    last = [after.passed[task] for task in shared]
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
