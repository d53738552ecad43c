"""Reinforcement learning: four loops that wait for each other only through declared bounds.

      ┌──────────┐ groups  ┌─────────┐ full batches ┌───────┐ weights ┌─────────┐
      │ dispatch │────────▶│ collect │─────────────▶│ train │────────▶│ publish │
      └────▲─────┘         └─────────┘              └───▲───┘         └────┬────┘
           └──── version ≥ k - max_staleness ───────────┴── version ≥ k - 1┘

    dispatch  plans batch k and starts its groups          unblocked by publish of version k - max_staleness
    collect   files finished groups under their batch      unblocked by any finished group
    train     takes batch k whole, its quota met exactly   unblocked by collect, and by publish of version k - 1
    publish   hands version k + 1 to every engine, probes  unblocked by train

Batch k is trained by the update from version k to k + 1. Its groups start only when version k - max_staleness is
served, so no token in it can be older than that: staleness is bounded by admission, and finished work is never thrown
away. The weight segment has two slots; that is why train waits for publish of version k - 1.

Every wait has the deadline `rl.stall_timeout_s` and raises `RunStalled` with the part's name when it passes. The first
error of any loop ends the others.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.config import RlConfig
from orchestrator.errors import ParityBroken, RunStalled
from orchestrator.run.batch import BatchBuilder
from orchestrator.run.fleet import Fleet, WorkerHandle
from orchestrator.run.guard import FailureGuard
from orchestrator.run.sampler import BatchPlan, Sampler
from orchestrator.run.telemetry import SyncRecord, Telemetry, UpdateRecord
from reward.score import Status
from reward.task import Task
from rollout_workers.config import EngineConfig
from rollout_workers.parity import compare
from rollout_workers.types import Episode
from rollout_workers.worker import GroupRequest
from trainer.learner import Published

SMALLEST_GROUP = 2
"""Valid episodes below which a group has no baseline and is played again."""

T = TypeVar("T")
OnUpdate = Callable[[int, Mapping[str, Any]], Awaitable[None]]
"""Called after each update with the new version and the sampler's state before the next batch (for a checkpoint)."""


@dataclass(slots=True)
class _Batch:
    """A batch between plan and training."""

    plan: BatchPlan
    groups: dict[str, list[list[Episode]]] = field(default_factory=dict)

    def add(self, episodes: list[Episode]) -> None:
        self.groups.setdefault(episodes[0].domain, []).append(episodes)

    @property
    def full(self) -> bool:
        return {name: len(groups) for name, groups in self.groups.items()} == self.plan.quota


class _Seat:
    """A worker and the groups it plays now."""

    def __init__(self, worker: WorkerHandle) -> None:
        self.worker = worker
        self.playing: set[str] = set()
        self.tainted: set[str] = set()
        """Groups that ran while the worker's weights turned out wrong; they are played again."""
        self.proven = asyncio.Event()
        """Clear from the start of a weight update until its probe has passed."""
        self.proven.set()


class RlLoop:
    """The loops over one fleet. Make one for a run; `run` may be called once."""

    def __init__(
        self,
        fleet: Fleet,
        sampler: Sampler,
        builder: BatchBuilder,
        telemetry: Telemetry,
        rl: RlConfig,
        engine: EngineConfig,
        *,
        probe: tuple[tuple[int, ...], ...],
        seed: int,
    ) -> None:
        """`probe`: token sequences on which engine and trainer are compared after each publish."""
        self._learner = fleet.learner
        self._seats = [_Seat(worker) for worker in fleet.workers]
        self._sampler = sampler
        self._builder = builder
        self._telemetry = telemetry
        self._rl = rl
        self._engine = engine
        self._probe = probe
        self._seed = seed
        self._guard = FailureGuard(threshold=2 * rl.group_size)
        self._batches: dict[int, _Batch] = {}
        self._finished: asyncio.Queue[tuple[int, list[Episode]]] = asyncio.Queue()
        self._trained: asyncio.Queue[Published] = asyncio.Queue()
        self._changed = asyncio.Condition()
        self._served = 0
        self._update: asyncio.Task[None] | None = None

    async def run(self, first: int, last: int, on_update: OnUpdate) -> None:
        """Train updates `first` to `last - 1`; every engine already serves version `first`."""
        self._served = first
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._dispatch(first, last, loops))
                loops.create_task(self._collect((last - first) * self._rl.groups_per_batch))
                loops.create_task(self._train(first, last, on_update))
                loops.create_task(self._publish(last - first))
        except BaseExceptionGroup as group:
            if self._update is not None:
                self._update.cancel()
            raise _first_error(group) from None

    async def settle(self) -> None:
        """After `run` was cancelled: wait for the update that the trainer was at, which it makes in any case."""
        if self._update is not None:
            await self._update

    async def publish(self, published: Published) -> None:
        """Hand a version to every engine and prove it. Raises `ParityBroken` when an engine fails the probe twice."""
        await asyncio.gather(*(self._sync(seat, published) for seat in self._seats))
        async with self._changed:
            self._served = published.version
            self._changed.notify_all()

    def sampler_state(self, version: int) -> Mapping[str, Any]:
        """The sampler's state before the batch that `version` is trained on was planned."""
        batch = self._batches.get(version)
        return batch.plan.state_before if batch else self._sampler.state_dict()

    # The four loops.

    async def _dispatch(self, first: int, last: int, loops: asyncio.TaskGroup) -> None:
        for index in range(first, last):
            needed = index - self._rl.max_staleness
            await self._until(lambda needed=needed: self._served >= needed, f"the publish of version {needed}")
            plan = self._sampler.plan()
            assert plan.index == index, "the sampler and the loop count the same batches"
            self._batches[index] = _Batch(plan)
            for tasks in plan.tasks.values():
                for slot, task in enumerate(tasks):
                    loops.create_task(self._play(index, slot, task))

    async def _collect(self, missing: int) -> None:
        for _ in range(missing):
            index, episodes = await self._within(self._finished.get(), "any group to finish")
            valid = [episode for episode in episodes if episode.score.status is not Status.INFRA_ERROR]
            self._sampler.observe(episodes[0].domain, sum(e.policy_tokens for e in valid) / len(valid))
            async with self._changed:
                self._batches[index].add(episodes)
                self._changed.notify_all()

    async def _train(self, first: int, last: int, on_update: OnUpdate) -> None:
        for index in range(first, last):
            idle_from = time.monotonic()
            await self._until(
                lambda i=index: i in self._batches and self._batches[i].full, f"the groups of batch {index}"
            )
            await self._until(lambda i=index: self._served >= i - 1, f"the publish of version {index - 1}")
            batch = self._batches.pop(index)
            self._update = asyncio.create_task(self._train_on(index, batch, time.monotonic() - idle_from))
            await asyncio.shield(self._update)  # a trained update without a record would be missing from every count
            await on_update(index + 1, self.sampler_state(index + 1))

    async def _train_on(self, index: int, batch: _Batch, waited_s: float) -> None:
        started = time.monotonic()
        built = self._builder.build(index, batch.groups)
        assert built.staleness <= self._rl.max_staleness, "admission let a token in that is too old"
        outcome = await self._within(self._learner.train(built.samples), f"the trainer's update {index}")
        self._trained.put_nowait(outcome.published)
        train_s = time.monotonic() - started
        self._telemetry.updated(UpdateRecord(index, batch.plan.quota, built, outcome.metrics, train_s, waited_s))

    async def _publish(self, count: int) -> None:
        for _ in range(count):
            await self.publish(await self._within(self._trained.get(), "a trained version"))

    # Groups.

    async def _play(self, index: int, slot: int, task: Task) -> None:
        """Play a group until it has a baseline. A task that fails twice gives its place to the domain's next one."""
        attempt = 0
        while True:
            name = f"{task.domain}/{task.id}@{index}.{slot}.{attempt}"
            request = GroupRequest(
                id=name,
                task=task,
                size=self._rl.group_size,
                temperature=self._engine.sampling.temperature,
                retries=self._rl.episode_retries,
                seed=random.Random(f"{self._seed}/{name}").getrandbits(31),  # noqa: S311 (no secret)
            )
            seat = min(self._seats, key=lambda seat: len(seat.playing))
            seat.playing.add(name)
            try:
                episodes = await self._within(seat.worker.run_group(request), f"group {name}")
                await self._within(seat.proven.wait(), "the parity probe of an engine")
            finally:
                seat.playing.discard(name)
            self._telemetry.played(episodes)
            self._guard.observe(episodes)
            valid = sum(episode.score.status is not Status.INFRA_ERROR for episode in episodes)
            if valid >= SMALLEST_GROUP and name not in seat.tainted:
                self._finished.put_nowait((index, episodes))
                return
            seat.tainted.discard(name)
            attempt += 1
            if attempt % 2 == 0:
                task = self._sampler.replace(task)

    # Weights.

    async def _sync(self, seat: _Seat, published: Published) -> None:
        """Load and probe; on a gap reload once, and have what was generated in between played again."""
        seat.proven.clear()
        gap = float("nan")
        for _ in range(2):
            update = await self._within(seat.worker.update_weights(published.manifest), "an engine's weight update")
            probed_from = time.monotonic()
            answers = await self._within(seat.worker.probe(self._probe), "an engine's parity probe")
            gap = compare(answers, published.probe_logprobs).max_gap
            probe_s = time.monotonic() - probed_from
            self._telemetry.synced(SyncRecord(published.version, published.export_s + update.seconds, probe_s, gap))
            if gap <= self._engine.parity_tolerance:
                seat.proven.set()
                return
            seat.tainted |= seat.playing
        raise ParityBroken(
            f"engine and trainer differ by {gap:.2g} nats at version {published.version}, also after a reload; "
            f"engine.parity_tolerance is {self._engine.parity_tolerance:g}: use float32, or raise it if that is meant"
        )

    # Waiting.

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        await self._within(wait(), what)

    async def _within(self, awaitable: Awaitable[T], what: str) -> T:
        deadline = asyncio.timeout(self._rl.stall_timeout_s)
        try:
            async with deadline:
                return await awaitable
        except TimeoutError:
            if not deadline.expired():
                raise
            raise RunStalled(f"waited {self._rl.stall_timeout_s:g} s (rl.stall_timeout_s) for {what}") from None


def _first_error(group: BaseExceptionGroup) -> BaseException:
    """The error that ended the loops: the first in the group that is not itself a group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
