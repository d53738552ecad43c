"""A fleet without processes, for tests of the loop: episodes of chosen outcome and duration, a trainer that only
counts.

What the handles promise holds here too: tokens carry the version that was served when they were written, a weight
update changes the version of what follows, and the trainer's versions grow by one a batch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward.score import Score, Status
from reward.task import Task
from rollout_workers.engines.base import EngineStats, WeightUpdate
from rollout_workers.types import Episode
from rollout_workers.worker import GroupRequest
from sandboxes.latency import Latencies
from sandboxes.pool import PoolStats
from trainer.learner import Published, StepOutcome
from trainer.metrics import StepMetrics
from trainer.sample import Sample
from trainer.sft import Demonstration, SftMetrics


@dataclass(frozen=True, slots=True)
class Play:
    """How a fake episode goes."""

    reward: float = 0.0
    """Total; passed when it is 1."""
    tokens: int = 4
    """Policy tokens."""
    seconds: float = 0.0
    """Duration."""
    error: str = ""
    """Not empty: an infrastructure error with this detail."""


Script = Callable[[GroupRequest, int], Play]
"""From a request and the index of the episode in it to how that episode goes."""


def alternating(request: GroupRequest, index: int) -> Play:
    """Every other episode passes."""
    return Play(reward=float(index % 2))


@dataclass
class FakeWorker:
    """Implements `WorkerHandle`."""

    script: Script = alternating
    version: int = 0
    """Version served."""
    gap: Callable[[int], float] = lambda version: 0.0
    """How far the probe's answer is off after the update to a version."""
    updates: list[int] = field(default_factory=list)
    """Versions loaded, in order."""
    requests: list[GroupRequest] = field(default_factory=list)
    """All groups asked for."""

    async def prepare(self) -> None:
        """Nothing to load."""

    async def start_engine(self) -> None:
        """Nothing to start."""

    async def run_group(self, request: GroupRequest) -> list[Episode]:
        """Play the script; all episodes of the group run at once."""
        self.requests.append(request)
        return list(await asyncio.gather(*(self._episode(request, index) for index in range(request.size))))

    async def _episode(self, request: GroupRequest, index: int) -> Episode:
        play = self.script(request, index)
        first = self.version
        await asyncio.sleep(play.seconds)
        # The last token is written when the episode ends, so one that spans an update carries both versions.
        versions = (first,) * (play.tokens - 1) + (self.version,)
        score = (
            Score.infra_error(play.error)
            if play.error
            else Score({"success": play.reward}, play.reward, play.reward == 1.0, Status.OK)
        )
        return Episode(
            id=f"{request.id}.{index}",
            domain=request.task.domain,
            task_id=request.task.id,
            token_ids=(1,) + (2,) * play.tokens,
            loss_mask=(0,) + (1,) * play.tokens,
            logprobs=(0.0,) + (-1.0,) * play.tokens,
            versions=(-1, *versions),
            turns=(),
            score=score,
            seconds=play.seconds,
        )

    async def demonstrate(self, domain: str, tasks: Sequence[Task]) -> list[Episode]:
        """Every reference solution passes."""
        request = [GroupRequest(f"{domain}/{task.id}@demonstration", task, 1, 0.0, 0, 0) for task in tasks]
        return [await FakeWorker(lambda r, i: Play(1.0))._episode(r, 0) for r in request]

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """Serve the manifest's version."""
        await asyncio.sleep(0)
        self.version = manifest["version"]
        self.updates.append(self.version)
        return WeightUpdate(self.version, manifest["checksum"], 0.0)

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """What `FakeLearner` answers, plus the gap."""
        off = self.gap(self.version)
        return [tuple(-1.0 + off for _ in sequence[1:]) for sequence in sequences]

    async def stats(self) -> EngineStats:
        """No counters."""
        return EngineStats(0, 0, 0, 0, 0)

    async def exec_latencies(self) -> Latencies:
        """No commands."""
        return Latencies()


@dataclass
class FakeLearner:
    """Implements `LearnerHandle`."""

    seconds: float = 0.0
    """Duration of a step."""
    batches: list[tuple[Sample, ...]] = field(default_factory=list)
    """All batches trained."""
    started: int = 0
    """Batches begun."""
    current: int = 0
    """Version."""
    probe: tuple[tuple[int, ...], ...] = ()

    async def ready(self) -> None:
        """Nothing to make."""

    async def sft(self, demonstrations: Sequence[Demonstration], first: int, steps: int) -> list[SftMetrics]:
        """Nothing is learnt."""
        return [SftMetrics(0.0, 0.0, 0.0, 0, 0.0)] * steps

    async def begin_rl(self, start: Path, probe: Sequence[Sequence[int]]) -> Published:
        """Version 0."""
        self.probe = tuple(tuple(sequence) for sequence in probe)
        return self._published()

    async def restore(self, start: Path, checkpoint: Path, probe: Sequence[Sequence[int]]) -> Published:
        """The version in the checkpoint."""
        self.current = int((checkpoint / "version").read_text())
        return await self.begin_rl(start, probe)

    async def train(self, samples: Sequence[Sample]) -> StepOutcome:
        """Count the batch."""
        self.started += 1
        await asyncio.sleep(self.seconds)
        self.batches.append(tuple(samples))
        self.current += 1
        return StepOutcome(StepMetrics(0.0, 1.0, 1e-3, 1, {}, {}, {}, [], self.seconds), self._published())

    async def version(self) -> int:
        """Batches so far."""
        return self.current

    async def save(self, path: Path) -> None:
        """Write the version."""
        await asyncio.to_thread(path.mkdir)
        await asyncio.to_thread((path / "version").write_text, str(self.current))

    async def export(self, path: Path) -> None:
        """Write an empty directory."""
        await asyncio.to_thread(path.mkdir)

    def _published(self) -> Published:
        answers = tuple(tuple(-1.0 for _ in sequence[1:]) for sequence in self.probe)
        return Published(self.current, {"version": self.current, "checksum": ""}, answers, 0.0)


class FakeHost:
    """Implements `SandboxHostHandle`."""

    async def start(self) -> None:
        """Nothing to start."""

    async def stats(self) -> PoolStats:
        """No counters."""
        return PoolStats()
