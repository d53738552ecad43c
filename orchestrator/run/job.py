"""A run of a job from its specification to its report: set-up, warm start, baseline, reinforcement learning,
measurement.

runs/<id>/
    job.json         the specification, complete
    events.jsonl     what happened; metrics.jsonl: one line an update
    initial/         the policy that a preset made; start/: the policy after the warm start
    checkpoints/     see `checkpoint.py`
    policy/          the trained policy, a Hugging Face directory
    report.md, report.json, curves.png
    logs/            logs of the actors, kept when the run failed
"""

import asyncio
import contextlib
import fcntl
import math
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.cluster import Cluster
from orchestrator.errors import OrchestratorError, SpecError
from orchestrator.run.batch import BatchBuilder
from orchestrator.run.checkpoint import Checkpoints
from orchestrator.run.evaluation import DomainScores, evaluate, macro_delta, paired_delta
from orchestrator.run.events import EventLog
from orchestrator.run.fleet import Fleet
from orchestrator.run.guardian import RUN_VARIABLE, Guardian
from orchestrator.run.live import LiveView
from orchestrator.run.loop import RlLoop
from orchestrator.run.prometheus import MetricsServer
from orchestrator.run.report import Outcome, build_report, write_report
from orchestrator.run.sampler import Sampler
from orchestrator.run.telemetry import Telemetry
from orchestrator.run.warm_start import SAMPLE, demonstrations, probe_sequences, warm_start
from orchestrator.spec import JobSpec
from reward.domain import Domain, load_domain
from rollout_workers.types import Episode
from trainer.atomic import atomic_file
from trainer.errors import TrainerError

SAVE_TIMEOUT_S = 30.0
"""How long a stopped run waits for its last checkpoint."""
POLL_S = 1.0
"""Seconds between looks at the counters of engines and sandboxes."""


class JobRun:
    """One run. `execute` may be called once."""

    def __init__(self, spec: JobSpec, source: Path, *, runs: Path, console: Console, resume: str = "") -> None:
        """`source`: the job file, for messages. `runs`: where run folders are. `resume`: a run id, or `latest`.

        Raises `SpecError` or `DomainError` before anything is started or written.
        """
        self._spec = spec
        self._domains = _load_domains(spec, source)
        self.id = _find_run(spec, runs, resume) if resume else _new_id(spec.name)
        self.folder = (runs / self.id).resolve()
        self._console = console
        self._checkpoints = Checkpoints(self.folder / "checkpoints", spec.rl.keep_checkpoints)
        self._restored = self._checkpoints.latest() if resume else None
        self._weights = {
            d.name: entry.weight for d, entry in zip(self._domains, spec.domains, strict=True) if entry.weight > 0
        }
        self._sampler = Sampler(
            {d.name: d.train for d in self._domains if d.name in self._weights},
            groups_per_batch=spec.rl.groups_per_batch,
            memory=spec.rl.length_memory,
            seed=spec.seed,
            even_share=spec.rl.even_share,
        )
        self._builder = BatchBuilder(self._weights, deviation_memory=spec.rl.deviation_memory)
        self._baseline: dict[str, DomainScores] = {}

    async def execute(self) -> dict[str, Any]:
        """Run to the end and return the report. Cancelling writes a checkpoint and cleans up."""
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(contextlib.closing(EventLog(self.folder)))
            telemetry = Telemetry([d.name for d in self._domains], log)
            metrics = stack.enter_context(MetricsServer(self._spec.metrics, telemetry))
            self.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_only_one(self.folder))
            with atomic_file(self.folder / "job.json") as file:
                file.write_text(self._spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
            view = LiveView(self._console, telemetry)
            view.say(f"run {self.id}")
            view.say(f"metrics for Prometheus: {metrics.url}")
            self._telemetry, self._view = telemetry, view
            scratch = Path(tempfile.mkdtemp(prefix="crosstrain-"))
            os.environ[RUN_VARIABLE] = self.id  # marks every process started from here on as the run's
            with Guardian(self.id, paths=[scratch]) as guardian:
                deltas = await self._on_cluster(Cluster(self.id, scratch))
            outcome = Outcome(
                self.id,
                deltas,
                macro_delta(list(deltas.values()), self._spec.evaluation.confidence),
                self._spec.evaluation.confidence,
                leaked=len(guardian.leftovers.containers),
            )
            report = build_report(outcome, telemetry)
            await asyncio.to_thread(write_report, self.folder, report, telemetry)
            log.write("finished", {"macro": report["macro"]})
        return report

    async def _on_cluster(self, cluster: Cluster) -> dict[str, Any]:
        """Everything that needs processes. They are gone when this returns or raises."""
        self._telemetry.enter("setup")
        try:
            async with self._view.running():
                await cluster.start()
                if cluster.dashboard:
                    asks = f" (it asks for the token in {cluster.token})" if cluster.token else ""
                    self._view.say(f"Ray dashboard: {cluster.dashboard}{asks}")
                fleet = await cluster.deploy(self._spec, self._domains, self._model())
                return await self._stages(fleet)
        except BaseException:
            cluster.keep_logs(self.folder / "logs")
            raise
        finally:
            await cluster.close()

    async def _stages(self, fleet: Fleet) -> dict[str, Any]:
        spec, telemetry = self._spec, self._telemetry
        await asyncio.gather(*(worker.prepare() for worker in fleet.workers))
        # As many as the warm start can draw at most: playing a solution costs what an episode costs.
        drawn = 0 if self._restored else spec.sft.steps * math.ceil(spec.sft.batch_size / len(self._weights))
        played = await demonstrations(fleet.workers, self._domains, count=max(drawn, SAMPLE), seed=spec.seed)
        probe = probe_sequences(played)
        async with asyncio.TaskGroup() as group:
            for worker in fleet.workers:
                group.create_task(worker.start_engine())
            if not self._restored:
                group.create_task(self._warm_start(fleet, played))
        loop = RlLoop(fleet, self._sampler, self._builder, telemetry, spec.rl, spec.engine, probe=probe, seed=spec.seed)
        version = await self._begin(fleet, loop, probe)
        watcher = asyncio.create_task(self._watch(fleet))
        try:
            await self._reinforce(fleet, loop, version)
            final = await self._evaluate(fleet, "final")
            await fleet.learner.export(self.folder / "policy")
            await self._look(fleet)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        telemetry.enter("done")
        return {
            name: paired_delta(self._baseline[name], final[name], spec.evaluation.confidence) for name in self._baseline
        }

    async def _warm_start(self, fleet: Fleet, played: Sequence[Episode]) -> None:
        if self._spec.sft.steps:
            self._telemetry.enter("sft")
            await warm_start(fleet.learner, played, self._weights, self._spec.sft.steps, self._telemetry.supervised)
            self._telemetry.enter("setup")

    async def _begin(self, fleet: Fleet, loop: RlLoop, probe: tuple[tuple[int, ...], ...]) -> int:
        """Bring trainer and engines to the first version of this run, and have a baseline."""
        start = self.folder / "start"
        if self._restored:
            checkpoint, state = self._restored
            self._load_state(state)
            published = await fleet.learner.restore(start, checkpoint, probe)
            await loop.publish(published)
        else:
            published = await fleet.learner.begin_rl(start, probe)
            await loop.publish(published)
            self._baseline = await self._evaluate(fleet, "baseline")
            await self._save(fleet, 0, self._sampler.state_dict())
        self._view.say(
            "held-out pass rate before: "
            + ", ".join(f"{name} {scores.pass_rate:.2f}" for name, scores in self._baseline.items())
        )
        return published.version

    async def _reinforce(self, fleet: Fleet, loop: RlLoop, version: int) -> None:
        rl = self._spec.rl
        self._telemetry.enter("rl")
        self._telemetry.begin_rl(version, rl.updates)

        async def on_update(version: int, sampler: Mapping[str, Any]) -> None:
            if version % rl.checkpoint_every == 0 or version == rl.updates:
                await self._save(fleet, version, sampler)

        try:
            await loop.run(version, rl.updates, on_update)
        except asyncio.CancelledError:
            try:
                await asyncio.wait_for(self._save_interrupted(fleet, loop), timeout=SAVE_TIMEOUT_S)
            except (OrchestratorError, TrainerError, TimeoutError) as error:
                self._view.say(f"no checkpoint could be saved: {error or 'the trainer did not answer'}")
            raise

    async def _evaluate(self, fleet: Fleet, label: str) -> dict[str, DomainScores]:
        self._telemetry.enter("eval")
        tasks = {d.name: d.eval[: self._spec.evaluation.max_tasks] for d in self._domains}
        return await evaluate(
            fleet.workers,
            tasks,
            samples=self._spec.evaluation.samples,
            temperature=self._spec.engine.sampling.eval_temperature,
            retries=self._spec.rl.episode_retries,
            label=label,
        )

    # Checkpoints.

    async def _save(self, fleet: Fleet, version: int, sampler: Mapping[str, Any]) -> None:
        state = {
            "sampler": sampler,
            "normalizer": self._builder.normalizer.state_dict(),
            "baseline": {name: {"passed": s.passed, "reward": s.reward} for name, s in self._baseline.items()},
            "telemetry": self._telemetry.state_dict(),
        }
        await self._checkpoints.save(version, state, fleet.learner)

    async def _save_interrupted(self, fleet: Fleet, loop: RlLoop) -> None:
        """A checkpoint at the version the trainer has reached, whatever was going on."""
        await loop.settle()
        version = await fleet.learner.version()
        await self._save(fleet, version, loop.sampler_state(version))
        self._view.say(f"checkpoint saved at update {version}; go on with --resume {self.id}")

    def _load_state(self, state: Mapping[str, Any]) -> None:
        self._sampler.load_state_dict(state["sampler"])
        self._builder.normalizer.load_state_dict(state["normalizer"])
        self._baseline = {name: DomainScores(s["passed"], s["reward"]) for name, s in state["baseline"].items()}
        self._telemetry.load_state_dict(state["telemetry"])

    # Small things.

    def _model(self) -> Path:
        return self._spec.policy.path or self.folder / "initial"

    async def _watch(self, fleet: Fleet) -> None:
        while True:
            await self._look(fleet)
            await asyncio.sleep(POLL_S)

    async def _look(self, fleet: Fleet) -> None:
        engines = await asyncio.gather(*(worker.stats() for worker in fleet.workers))
        pools = await asyncio.gather(*(host.stats() for host in fleet.hosts))
        latencies = await asyncio.gather(*(worker.exec_latencies() for worker in fleet.workers))
        self._telemetry.observe(engines, pools, latencies)


def _load_domains(spec: JobSpec, source: Path) -> list[Domain]:
    domains: list[Domain] = []
    for index, entry in enumerate(spec.domains):
        domain = load_domain(entry.path)
        if any(domain.name == other.name for other in domains):
            raise SpecError(
                f"{source}: {spec.domain_key(index)}: the name {domain.name!r} is taken by another domain of the job; "
                "change `name` in its domain.toml"
            )
        domains.append(domain)
    return domains


def _new_id(name: str) -> str:
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _find_run(spec: JobSpec, runs: Path, wanted: str) -> str:
    """The run to go on with. Raises `SpecError` when there is none."""
    if wanted != "latest":
        if not (runs / wanted / "checkpoints").is_dir():
            raise SpecError(f"--resume {wanted}: there is no such run with a checkpoint in {runs}")
        return wanted
    known = sorted(path.parent for path in runs.glob(f"{spec.name}-*/checkpoints") if any(path.glob("[0-9]*")))
    if not known:
        raise SpecError(f"--resume: no run of job {spec.name!r} in {runs} has a checkpoint; run it without --resume")
    return max(known, key=lambda folder: (folder / "checkpoints").stat().st_mtime).name


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the run's folder against a second process."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{folder.name}: another process is running it; wait for it or stop it") from None
        yield
