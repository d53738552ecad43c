"""What is known about a run while it runs. The loop writes here; the terminal, Prometheus and the report read.

Nothing here decides anything. Memory is bounded by the number of updates (curves keep a few numbers for each).
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from orchestrator.run.batch import BuiltBatch
from reward.score import Status
from rollout_workers.engines.base import EngineStats
from rollout_workers.types import Episode
from sandboxes.latency import Latencies
from sandboxes.pool import PoolStats
from trainer.step import StepMetrics


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One optimiser batch."""

    index: int
    """The update took version `index` to `index + 1`."""
    quota: Mapping[str, int]
    """Planned groups by domain."""
    built: BuiltBatch
    """What was trained."""
    metrics: StepMetrics
    """The trainer's figures."""
    train_s: float
    """Seconds from batch to new weights in shared memory."""
    waited_s: float
    """Seconds the trainer waited for the batch."""


@dataclass(frozen=True, slots=True)
class SyncRecord:
    """One weight update of one engine, and its proof."""

    version: int
    """Policy version."""
    sync_s: float
    """Seconds of export into shared memory plus pause to resume of the engine."""
    probe_s: float
    """Seconds of the parity probe, during which the engine generates."""
    gap: float
    """Largest difference of log-probabilities in nats."""


class EventSink(Protocol):
    """Where records go line by line."""

    def write(self, kind: str, data: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class DomainTelemetry:
    """Totals of one domain."""

    statuses: Counter[Status] = field(default_factory=Counter)
    """Episodes by status since the start of reinforcement learning."""
    generated_tokens: int = 0
    """Policy tokens of all episodes played."""
    trained_tokens: int = 0
    """Policy tokens that reached the loss."""
    first_error: str = ""
    """Detail of the first infrastructure error."""
    pass_rate: list[float] = field(default_factory=list)
    """Share of passed episodes, an entry an update."""
    reward: list[float] = field(default_factory=list)
    """Mean total on [0, 1], an entry an update."""
    gradient_share: list[float] = field(default_factory=list)
    """Share in the sum of the domains' gradient norms, an entry an update."""


class Telemetry:
    """Collects; see the module's docstring."""

    def __init__(self, domains: Sequence[str], sink: EventSink) -> None:
        self._sink = sink
        self.domains = {name: DomainTelemetry() for name in domains}
        self.phase = "starting"
        self.phase_s: dict[str, float] = {}
        self.first_update = 0
        self.total_updates = 0
        self.last: UpdateRecord | None = None
        self.syncs: list[SyncRecord] = []
        self.staleness_max = 0
        self.engines: tuple[EngineStats, ...] = ()
        self.pools: tuple[PoolStats, ...] = ()
        self.exec_latencies = Latencies()
        self.sft_done = 0
        self.sft_total = 0
        self.rl_started = 0.0
        self._tokens_before = 0
        self._phase_from = time.monotonic()

    def enter(self, phase: str) -> None:
        """A new phase begins: `setup`, `sft`, `eval`, `rl` or `done`. Seconds of a phase entered again add up."""
        now = time.monotonic()
        self.phase_s[self.phase] = self.phase_s.get(self.phase, 0.0) + now - self._phase_from
        self.phase, self._phase_from = phase, now
        self._sink.write("phase", {"phase": phase})

    def begin_rl(self, first: int, total: int) -> None:
        """Reinforcement learning goes from version `first` to `total`."""
        self.first_update, self.total_updates, self.rl_started = first, total, time.monotonic()
        self._tokens_before = self.generated_tokens

    def played(self, episodes: Sequence[Episode]) -> None:
        """Episodes ended, whatever became of them."""
        for episode in episodes:
            domain = self.domains[episode.domain]
            domain.statuses[episode.score.status] += 1
            domain.generated_tokens += episode.policy_tokens
            if episode.score.status is Status.INFRA_ERROR:
                domain.first_error = domain.first_error or episode.score.detail
                self._sink.write("infra_error", {"episode": episode.id, "detail": episode.score.detail})

    def updated(self, record: UpdateRecord) -> None:
        """An optimiser batch was trained."""
        self.last = record
        self.staleness_max = max(self.staleness_max, record.built.staleness)
        for name, part in record.built.domains.items():
            domain = self.domains[name]
            domain.trained_tokens += part.trained_tokens
            domain.pass_rate.append(part.pass_rate)
            domain.reward.append(part.reward)
            domain.gradient_share.append(record.metrics.gradient_share.get(name, 0.0))
        self._sink.write("update", _flat(record))

    def synced(self, record: SyncRecord) -> None:
        """An engine loaded and was probed."""
        self.syncs.append(record)
        self._sink.write("sync", asdict(record))

    def supervised(self, done: int, total: int) -> None:
        """Progress of the warm start in steps."""
        self.sft_done, self.sft_total = done, total

    def observe(
        self, engines: Sequence[EngineStats], pools: Sequence[PoolStats], latencies: Sequence[Latencies]
    ) -> None:
        """Counters of all engines, sandbox hosts and workers."""
        self.engines, self.pools = tuple(engines), tuple(pools)
        total = Latencies()
        for part in latencies:
            total.merge(part)
        self.exec_latencies = total

    @property
    def update(self) -> int:
        """Version that the last update made."""
        return self.last.index + 1 if self.last else self.first_update

    @property
    def generated_tokens(self) -> int:
        """Policy tokens generated in reinforcement learning."""
        return sum(domain.generated_tokens for domain in self.domains.values())

    @property
    def trained_tokens(self) -> int:
        """Policy tokens that reached the loss."""
        return sum(domain.trained_tokens for domain in self.domains.values())

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs for a whole report, JSON-able."""
        return {
            "phase_s": self.phase_seconds(),
            "update": self.update,
            "staleness_max": self.staleness_max,
            "syncs": [[sync.version, sync.sync_s, sync.probe_s, sync.gap] for sync in self.syncs],
            "domains": {
                name: {
                    "statuses": {status.value: count for status, count in domain.statuses.items()},
                    "generated_tokens": domain.generated_tokens,
                    "trained_tokens": domain.trained_tokens,
                    "pass_rate": domain.pass_rate,
                    "reward": domain.reward,
                    "gradient_share": domain.gradient_share,
                }
                for name, domain in self.domains.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add to what an interrupted run had counted. Seconds of the set-up are this run's own on top."""
        for phase, seconds in state["phase_s"].items():
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + seconds
        self.first_update = state["update"]
        self.staleness_max = state["staleness_max"]
        self.syncs = [SyncRecord(*row) for row in state["syncs"]] + self.syncs
        for name, saved in state["domains"].items():
            if name in self.domains:
                self.domains[name] = DomainTelemetry(
                    statuses=Counter({Status(key): count for key, count in saved["statuses"].items()}),
                    generated_tokens=saved["generated_tokens"],
                    trained_tokens=saved["trained_tokens"],
                    pass_rate=list(saved["pass_rate"]),
                    reward=list(saved["reward"]),
                    gradient_share=list(saved["gradient_share"]),
                )

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase, the running one included."""
        running = {self.phase: time.monotonic() - self._phase_from}
        return {name: self.phase_s.get(name, 0.0) + running.get(name, 0.0) for name in {**self.phase_s, **running}}

    def rl_elapsed_s(self) -> float:
        """Seconds since reinforcement learning began."""
        return time.monotonic() - self.rl_started if self.rl_started else 0.0

    def generated_tokens_per_s(self) -> float:
        """Policy tokens a second since reinforcement learning began in this process."""
        elapsed = self.rl_elapsed_s()
        return (self.generated_tokens - self._tokens_before) / elapsed if elapsed else 0.0

    def time_left_s(self) -> float | None:
        """Estimate for the updates that remain; None before the first update."""
        done = self.update - self.first_update
        if done <= 0:
            return None
        return self.rl_elapsed_s() / done * (self.total_updates - self.update)


def _flat(record: UpdateRecord) -> dict[str, Any]:
    """The line of `metrics.jsonl` for one update."""
    metrics = record.metrics
    return {
        "update": record.index + 1,
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "train_s": record.train_s,
        "waited_s": record.waited_s,
        "staleness": record.built.staleness,
        "expert_load": metrics.expert_load,
        "load_violation": metrics.load_violation,
        "domains": {
            name: {
                "quota": record.quota[name],
                "groups": part.groups,
                "groups_with_signal": part.groups_with_signal,
                "episodes": part.episodes,
                "pass_rate": part.pass_rate,
                "reward": part.reward,
                "deviation": part.deviation,
                "trained_tokens": part.trained_tokens,
                "mean_tokens": part.mean_tokens,
                "truncated": part.truncated,
                "staleness": part.staleness,
                "mean_staleness": part.mean_staleness,
                "gradient_share": metrics.gradient_share.get(name, 0.0),
                **(asdict(metrics.tags[name]) if name in metrics.tags else {}),
            }
            for name, part in record.built.domains.items()
        },
    }
