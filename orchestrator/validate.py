"""Proves that a domain's grading means something: reference solutions score full marks, doing nothing does not.

Runs in one process, without engine or cluster; sandboxes are real.
"""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.run.guardian import Guardian
from reward.domain import Domain, load_domain
from reward.score import Status
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.chat import ByteChat
from rollout_workers.demonstration import demonstrate
from rollout_workers.environment import EnvironmentContext
from rollout_workers.types import Episode
from rollout_workers.worker import NoSandboxes
from sandboxes.base import SandboxProvider
from sandboxes.config import SandboxConfig
from sandboxes.pool import LocalProvider, SandboxHost

SHOWN = 10
"""Problems that are told; the rest is counted."""
AT_ONCE = 16
"""Tasks in progress."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found."""

    name: str
    """Domain."""
    digest: str
    """Its version."""
    tasks: int
    """Tasks in both splits."""
    played: int
    """Tasks with a reference solution."""
    passed: int
    """Of them, those whose solution passes."""
    idle_passed: int
    """Of them, those that an empty answer passes."""
    problems: tuple[str, ...]
    """Sentences about the first few tasks that are not sound."""

    @property
    def sound(self) -> bool:
        """Whether every reference solution passes and no empty answer does."""
        return 0 < self.played == self.passed and self.idle_passed == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "sound": self.sound}


async def validate(folder: Path) -> Validation:
    """Play all tasks that have a reference solution, twice. Raises `DomainError` for a folder that cannot be read."""
    domain = load_domain(folder)
    tasks = [task for task in (*domain.train, *domain.eval) if task.solution]
    async with _providers(domain) as context:
        solved = await _play(tasks, context)
        idle = await _play([replace(task, solution=("",) * domain.config.max_turns) for task in tasks], context)
    problems = [_problem(e) for e in solved if not e.score.passed]
    problems += [
        f"{e.task_id}: an empty answer passes; change the task or what grades it" for e in idle if e.score.passed
    ]
    if not tasks:
        problems = ["no task has a `solution`, so nothing can be validated; add some"]
    elif len(problems) > SHOWN:
        problems = [*problems[:SHOWN], f"… and {len(problems) - SHOWN} more"]
    return Validation(
        domain.name,
        domain.digest,
        len(domain.train) + len(domain.eval),
        len(tasks),
        sum(e.score.passed for e in solved),
        sum(e.score.passed for e in idle),
        tuple(problems),
    )


def _problem(episode: Episode) -> str:
    score = episode.score
    if score.status is Status.INFRA_ERROR:
        return f"{episode.task_id}: the reference solution could not be played: {score.detail}"
    return f"{episode.task_id}: the reference solution does not pass: {dict(score.components)} {score.detail}"


async def _play(tasks: Sequence[Task], context: EnvironmentContext) -> list[Episode]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(task: Task) -> Episode:
        async with slots:
            return await demonstrate(task, context, ByteChat())

    return list(await asyncio.gather(*(one(task) for task in tasks)))


@contextlib.asynccontextmanager
async def _providers(domain: Domain) -> AsyncIterator[EnvironmentContext]:
    """Verifiers, and sandboxes when the domain is played in them; gone when the block ends."""
    run = f"validate-{secrets.token_hex(4)}"
    scratch = Path(tempfile.mkdtemp(prefix="crosstrain-"))
    verifiers = VerifierPool(2)
    with Guardian(run, paths=[scratch]):
        try:
            if domain.config.environment == "single_turn":
                yield EnvironmentContext(domain, NoSandboxes(), verifiers)
                return
            host = SandboxHost(SandboxConfig(pool_size=4), run, scratch)
            await host.start()
            try:
                provider: SandboxProvider = LocalProvider(host)
                yield EnvironmentContext(domain, provider, verifiers)
            finally:
                await host.close()
        finally:
            await verifiers.close()
