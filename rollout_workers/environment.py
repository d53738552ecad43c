"""The one interaction protocol. Every domain's environment speaks it; `episode.py` drives it.

An environment is made for one episode and never used again; whoever builds it closes it. Text goes in and out: tokens
are the business of `episode.py`, which never lets an action be tokenised a second time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from reward.domain import Domain
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from sandboxes.base import SandboxProvider


@dataclass(frozen=True, slots=True)
class Observation:
    """What the policy sees next, for example `Observation("a.txt\\n")`; the last one has `done=True`."""

    text: str
    """Content of the next user message; not shown when `done`."""
    done: bool = False
    """Whether the episode is over and ready to be graded."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """What an environment may use. Passed to its constructor."""

    domain: Domain
    """The domain whose tasks it plays."""
    sandboxes: SandboxProvider
    """Where sandboxes come from. Acquire late, release early: they are fewer than episodes."""
    verifiers: VerifierPool
    """Runs verifiers in processes of their own, under a deadline."""


class Environment(Protocol):
    """Constructed as `Class(context)`. Any exception but `PolicyFailed` makes the episode an `infra_error`."""

    async def reset(self, task: Task) -> Observation:
        """Set the task up; the text is the first user message (usually `task.prompt`)."""
        ...

    async def step(self, action: str) -> Observation:
        """Carry out one policy message. Raises `PolicyFailed` when it cannot be acted on."""
        ...

    async def grade(self) -> Mapping[str, float]:
        """Raw value of each component that the domain declares. Called once, after the last step, also when
        truncated."""
        ...

    async def close(self) -> None:
        """Give everything back. Called once on every way out, also after a failed `reset`."""
        ...
