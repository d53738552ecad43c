"""Reference solutions: played, checked, imitated for a while, and kept as the sequences of the parity probe."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random

from orchestrator.run.fleet import LearnerHandle, WorkerHandle
from reward.domain import Domain
from reward.errors import DomainError
from reward.score import Status
from rollout_workers.types import Episode
from trainer.sft import Demonstration

SAMPLE = 8
"""Reference solutions of each domain that are played when no warm start needs more."""
CHUNK = 10
"""Supervised steps between two looks at the progress."""


async def demonstrations(
    workers: Sequence[WorkerHandle], domains: Sequence[Domain], *, count: int, seed: int
) -> list[Episode]:
    """Play reference solutions of training tasks in their environments: `count` of each domain, or all that there are.

    Raises `DomainError` when one does not score full marks: reward or solution is wrong, and training would follow it.
    """

    async def of(domain: Domain, worker: WorkerHandle) -> list[Episode]:
        tasks = [task for task in domain.train if task.solution]
        draw = Random(f"{seed}/demonstrations/{domain.name}")  # noqa: S311 (no secret)
        return await worker.demonstrate(domain.name, draw.sample(tasks, min(count, len(tasks))))

    parts = await asyncio.gather(*(of(d, workers[i % len(workers)]) for i, d in enumerate(domains)))
    for domain, episodes in zip(domains, parts, strict=True):
        for episode in episodes:
            _check(domain, episode)
    return [episode for episodes in parts for episode in episodes]


def _check(domain: Domain, episode: Episode) -> None:
    score = episode.score
    where = f"domain {domain.name!r}, task {episode.task_id!r} ({domain.folder / domain.config.train})"
    if score.status is Status.INFRA_ERROR:
        raise DomainError(f"{where}: the reference solution could not be played: {score.detail}")
    if not score.passed:
        raise DomainError(
            f"{where}: the reference solution does not pass ({dict(score.components)}, {score.status}"
            f"{': ' + score.detail if score.detail else ''}); correct the solution or what grades it"
        )


def probe_sequences(played: Sequence[Episode], each: int = 2) -> tuple[tuple[int, ...], ...]:
    """Token sequences for the parity probe: the first demonstrations of each domain, so that real text is probed."""
    chosen: dict[str, list[tuple[int, ...]]] = {}
    for episode in played:
        rows = chosen.setdefault(episode.domain, [])
        if len(rows) < each:
            rows.append(episode.token_ids)
    return tuple(row for rows in chosen.values() for row in rows)


async def warm_start(
    learner: LearnerHandle,
    played: Sequence[Episode],
    weights: Mapping[str, float],
    steps: int,
    progress: Callable[[int, int], None],
) -> None:
    """Imitate the demonstrations for `steps` optimiser steps. `weights`: the trained domains' shares of the loss."""
    rows = [
        Demonstration(episode.token_ids, episode.loss_mask, episode.domain, weights[episode.domain])
        for episode in played
        if episode.domain in weights
    ]
    if not rows:
        raise DomainError(
            "[sft] asks for a warm start, but no task of a trained domain has a `solution`; add some, or set steps = 0"
        )
    for first in range(0, steps, CHUNK):
        progress(first, steps)
        await learner.sft(rows, first, min(CHUNK, steps - first))
    progress(steps, steps)
