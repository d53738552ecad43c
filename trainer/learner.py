"""The trainer as a service: a warm start, policy steps, and after each the published weights with the probe's answers.

A plain class; `orchestrator/cluster.py` makes a Ray actor of it. Publishing belongs to the step because the next step
overwrites the weights: a manifest, its probe values and its version are taken in one place and cannot come apart.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from trainer.channel import node_address
from trainer.config import SftConfig, TrainerConfig
from trainer.policy import Preset, init_policy
from trainer.publish import Publisher
from trainer.sample import Sample
from trainer.sft import Demonstration, SftMetrics, SftStage
from trainer.step import StepMetrics, Trainer


@dataclass(frozen=True, slots=True)
class Published:
    """One policy version, ready for the engines."""

    version: int
    """Number of updates since reinforcement learning began."""
    manifest: Mapping[str, Any]
    """Weight manifest (`docs/weight-sync.md`)."""
    probe_logprobs: tuple[tuple[float, ...], ...]
    """The trainer's log-probabilities of the probe sequences under exactly these weights, in nats."""
    export_s: float
    """Seconds to copy the weights to where engines read them, checksum included."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one optimiser batch did."""

    metrics: StepMetrics
    """Loss, gradient and expert-load figures."""
    published: Published
    """The policy version that came out."""


class Learner:
    """Owns the policy that is trained. `sft` (any number of calls), then `begin_rl` or `restore`, then `train`."""

    def __init__(
        self,
        model: str,
        preset: str,
        config: TrainerConfig,
        sft: SftConfig,
        *,
        seed: int,
        run: str,
        many_machines: bool = False,
    ) -> None:
        """`model`: Hugging Face directory to start from. `ready` makes one that is missing when a `preset` is named.

        `run`: id of the run, part of the shared segments' names. `many_machines`: engines may run on others, so that
        weights are served on this node's address and not on loopback alone.
        """
        self._model = model
        self._preset = preset
        self._config = config
        self._sft = sft
        self._seed = seed
        self._run = run
        self._address = node_address() if many_machines else "127.0.0.1"
        self._device = "cuda" if config.gpus else "cpu"
        self._stage: SftStage | None = None
        self._trainer: Trainer | None = None
        self._publisher: Publisher | None = None
        self._probe: tuple[tuple[int, ...], ...] = ()

    def ready(self) -> None:
        """Make the policy's directory unless it is there. Raises PolicyError and PolicyNotSaved."""
        if self._preset and not Path(self._model).exists():
            init_policy(cast(Preset, self._preset), self._model, self._seed)

    def sft(self, demonstrations: Sequence[Demonstration], first: int, steps: int) -> list[SftMetrics]:
        """Supervised steps `first` to `first + steps - 1`, each on a batch with the same number from every tag.

        Batches are a function of seed and step number alone.
        """
        if self._stage is None:
            self._stage = SftStage(self._model, self._sft, self._config, self._device)
        by_tag: dict[str, list[Demonstration]] = {}
        for demonstration in demonstrations:
            by_tag.setdefault(demonstration.tag, []).append(demonstration)
        each = math.ceil(self._sft.batch_size / len(by_tag))
        metrics = []
        for step in range(first, first + steps):
            draw = Random(f"{self._seed}/sft/{step}")  # noqa: S311 (no secret)
            metrics.append(
                self._stage.sft_step([row for rows in by_tag.values() for row in draw.choices(rows, k=each)])
            )
        return metrics

    def begin_rl(self, start: Path, probe: Sequence[Sequence[int]]) -> Published:
        """Leave the warm start: its policy is saved to `start` and trained from there. Returns version 0.

        `probe`: token sequences that every publish is compared on.
        """
        if self._stage is not None:
            self._stage.save_policy(start)
            self._stage, self._model = None, str(start)
        return self._begin(probe)

    def restore(self, start: Path, checkpoint: Path, probe: Sequence[Sequence[int]]) -> Published:
        """Go on from a checkpoint of the run whose warm start was saved to `start`, if it had one."""
        if start.exists():
            self._model = str(start)
        return self._begin(probe, checkpoint)

    def _begin(self, probe: Sequence[Sequence[int]], checkpoint: Path | None = None) -> Published:
        self._trainer = Trainer(self._model, self._config, self._seed, self._device)
        if checkpoint is not None:
            self._trainer.load_checkpoint(checkpoint)
        self._publisher = Publisher(self._trainer.model, self._run, address=self._address)
        self._probe = tuple(tuple(sequence) for sequence in probe)
        return self._publish()

    def train(self, samples: Sequence[Sample]) -> StepOutcome:
        """One optimiser batch, then its publication."""
        metrics = self._require().train_step(samples)
        return StepOutcome(metrics, self._publish())

    def version(self) -> int:
        """Number of the current weights."""
        return self._require().version

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        self._require().save_checkpoint(path)

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._require().save_policy(path)

    def close(self) -> None:
        """Remove the published weights and end their channel. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self) -> Published:
        trainer = self._require()
        assert self._publisher is not None
        started = time.perf_counter()
        manifest = self._publisher.publish(trainer.version)
        export_s = time.perf_counter() - started
        answers = tuple(tuple(trainer.token_logprobs(sequence)) for sequence in self._probe)
        return Published(trainer.version, manifest, answers, export_s)

    def _require(self) -> Trainer:
        assert self._trainer is not None, "begin_rl() or restore() comes first"
        return self._trainer
