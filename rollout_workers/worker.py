"""One rollout worker: an engine, a chat tokenizer, verifiers, and many episodes in progress at once.

A plain class; `orchestrator/cluster.py` makes a Ray actor of it. All methods run on one event loop. It decides nothing
about training: it plays the groups it is told to play and loads the weights it is told to load.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward.domain import Domain
from reward.score import Status
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.chat import ChatTokenizer
from rollout_workers.config import EngineConfig
from rollout_workers.demonstration import demonstrate
from rollout_workers.engines.base import Engine, EngineStats, WeightUpdate
from rollout_workers.environment import EnvironmentContext
from rollout_workers.episode import run_episode
from rollout_workers.types import Episode
from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.errors import NoCapacity
from sandboxes.latency import Latencies

VERIFIER_PROCESSES = 2
"""Enough to keep one core busy while the other waits on a pipe; graders cost milliseconds."""

DEMONSTRATIONS_AT_ONCE = 32
"""Reference solutions wait for nobody's tokens: more at once would only wait for sandboxes, against their deadlines."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Play one task `size` times, for example `GroupRequest("math/add-3-5@7", task, 8, 1.0, 1, 42)`."""

    id: str
    """Unique in a run; episode ids are `<id>.<index>`."""
    task: Task
    """What to play."""
    size: int
    """Episodes."""
    temperature: float
    """Of sampling; 0 takes the likeliest token."""
    retries: int
    """Times an episode is played again after an infrastructure error."""
    seed: int
    """Episode i samples with seed + i."""


class NoSandboxes:
    """The source of sandboxes of a job none of whose domains needs one."""

    def __init__(self) -> None:
        self.latencies = Latencies()

    async def acquire(self, *, timeout_s: float | None = None) -> Sandbox:
        """Always raises `NoCapacity`."""
        raise NoCapacity(
            "this worker was given no sandboxes; an environment of kind `single_turn` must not ask for one"
        )

    async def release(self, sandbox: Sandbox) -> None:
        """Nothing was acquired."""


EngineFactory = Callable[[str, EngineConfig], Engine]
"""From a Hugging Face directory and settings to an engine that is not started yet."""


def vllm_engine(model: str, config: EngineConfig) -> Engine:
    """The real engine. vLLM is imported here, in the worker's process, and nowhere earlier."""
    from rollout_workers.engines.vllm import VllmEngine

    return VllmEngine(model, config)


class RolloutWorker:
    """Call `prepare`, then `start_engine`; `demonstrate` needs the first alone."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        domains: Sequence[Domain],
        make_engine: EngineFactory = vllm_engine,
    ) -> None:
        """`model`: Hugging Face directory of the policy's architecture, tokenizer and initial weights."""
        self._model = model
        self._config = config
        self._make_engine = make_engine
        self._domains = {domain.name: domain for domain in domains}
        self._sandboxes: SandboxProvider = NoSandboxes()
        self._slots = asyncio.Semaphore(config.max_concurrent_episodes)
        self._verifiers: VerifierPool | None = None
        self._chat: ChatTokenizer | None = None
        self._engine: Engine | None = None

    def use_sandboxes(self, provider: SandboxProvider) -> None:
        """Where the environments' sandboxes come from; without it no domain may need one."""
        self._sandboxes = provider

    async def prepare(self) -> None:
        """Load the tokenizer and start the verifiers."""
        self._chat = ChatTokenizer(self._model)
        self._verifiers = VerifierPool(VERIFIER_PROCESSES)

    async def start_engine(self) -> None:
        """Start the engine; takes seconds to minutes. Raises `EngineConfigError` or `EngineFailed`."""
        engine = self._make_engine(self._model, self._config)
        self._engine = engine
        await engine.start()

    async def run_group(self, request: GroupRequest) -> list[Episode]:
        """Play the episodes of a group concurrently. Infrastructure errors come back as such after the retries."""
        return list(await asyncio.gather(*(self._run_one(request, index) for index in range(request.size))))

    async def demonstrate(self, domain: str, tasks: Sequence[Task]) -> list[Episode]:
        """Play the tasks' reference solutions through their real environments, in order."""

        slots = asyncio.Semaphore(DEMONSTRATIONS_AT_ONCE)

        async def one(task: Task) -> Episode:
            async with slots:
                return await demonstrate(task, self._context(domain), self._require_chat())

        return list(await asyncio.gather(*(one(task) for task in tasks)))

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """Load published weights; see `engines/base.py`."""
        return await self._require_engine().update_weights(manifest)

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """The engine's log-probabilities of fixed sequences, for the parity probe."""
        engine = self._require_engine()
        return list(await asyncio.gather(*(engine.token_logprobs(sequence) for sequence in sequences)))

    async def stats(self) -> EngineStats:
        """The engine's counters."""
        return await self._require_engine().stats()

    async def exec_latencies(self) -> Latencies:
        """Durations of the commands that this worker's episodes ran in sandboxes, seen from here."""
        return self._sandboxes.latencies

    async def close(self) -> None:
        """End engine and verifiers. Idempotent."""
        if self._engine is not None:
            await self._engine.close()
        if self._verifiers is not None:
            await self._verifiers.close()

    async def _run_one(self, request: GroupRequest, index: int) -> Episode:
        attempt = 0
        async with self._slots:
            while True:
                episode = await run_episode(
                    request.task,
                    episode_id=f"{request.id}.{index}",
                    context=self._context(request.task.domain),
                    engine=self._require_engine(),
                    chat=self._require_chat(),
                    max_model_len=self._config.max_model_len,
                    temperature=request.temperature,
                    seed=request.seed + index + attempt * request.size,
                )
                if episode.score.status is not Status.INFRA_ERROR or attempt == request.retries:
                    return episode
                attempt += 1

    def _context(self, domain: str) -> EnvironmentContext:
        assert self._verifiers is not None, "prepare() comes first"
        return EnvironmentContext(self._domains[domain], self._sandboxes, self._verifiers)

    def _require_chat(self) -> ChatTokenizer:
        assert self._chat is not None, "prepare() comes first"
        return self._chat

    def _require_engine(self) -> Engine:
        assert self._engine is not None, "start_engine() comes first"
        return self._engine
