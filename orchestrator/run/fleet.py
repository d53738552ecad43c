"""What the loop needs of the processes below it.

`orchestrator/cluster.py` provides it with Ray actors, tests without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reward.task import Task
from rollout_workers.engines.base import EngineStats, WeightUpdate
from rollout_workers.types import Episode
from rollout_workers.worker import GroupRequest
from sandboxes.latency import Latencies
from sandboxes.pool import PoolStats
from trainer.learner import Published, StepOutcome
from trainer.sample import Sample
from trainer.sft import Demonstration, SftMetrics


class WorkerHandle(Protocol):
    """A rollout worker somewhere; see `rollout_workers/worker.py`."""

    async def prepare(self) -> None: ...
    async def start_engine(self) -> None: ...
    async def run_group(self, request: GroupRequest) -> list[Episode]: ...
    async def demonstrate(self, domain: str, tasks: Sequence[Task]) -> list[Episode]: ...
    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate: ...
    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]: ...
    async def stats(self) -> EngineStats: ...
    async def exec_latencies(self) -> Latencies: ...


class LearnerHandle(Protocol):
    """The trainer somewhere; see `trainer/learner.py`. Calls are carried out one after the other."""

    async def ready(self) -> None: ...
    async def sft(self, demonstrations: Sequence[Demonstration], first: int, steps: int) -> list[SftMetrics]: ...
    async def begin_rl(self, start: Path, probe: Sequence[Sequence[int]]) -> Published: ...
    async def restore(self, start: Path, checkpoint: Path, probe: Sequence[Sequence[int]]) -> Published: ...
    async def train(self, samples: Sequence[Sample]) -> StepOutcome: ...
    async def version(self) -> int: ...
    async def save(self, path: Path) -> None: ...
    async def export(self, path: Path) -> None: ...


class SandboxHostHandle(Protocol):
    """The owner of a node's sandboxes; see `sandboxes/pool.py`."""

    async def start(self) -> None: ...
    async def stats(self) -> PoolStats: ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """Everything a run drives."""

    workers: Sequence[WorkerHandle]
    """At least one."""
    learner: LearnerHandle
    """The one trainer."""
    hosts: Sequence[SandboxHostHandle]
    """Empty when no domain needs a sandbox."""
