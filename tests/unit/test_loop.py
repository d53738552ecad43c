"""The four loops over a fake fleet: exact quotas, bounded staleness, retries, proofs, and errors that do not hang."""

import asyncio
import random

import pytest

from orchestrator.config import RlConfig
from orchestrator.errors import DomainFailing, ParityBroken, RunStalled
from orchestrator.run.batch import BatchBuilder
from orchestrator.run.fake import FakeLearner, FakeWorker, Play, Script, alternating
from orchestrator.run.fleet import Fleet
from orchestrator.run.loop import RlLoop
from orchestrator.run.sampler import Sampler
from orchestrator.run.telemetry import Telemetry
from reward.task import Task
from rollout_workers.config import EngineConfig
from rollout_workers.worker import GroupRequest

PROBE = ((1, 2, 3),)


class Sink:
    """Keeps records in memory."""

    def __init__(self) -> None:
        self.records: list[tuple[str, dict]] = []

    def write(self, kind, data) -> None:
        self.records.append((kind, dict(data)))


class Setup:
    """A loop over fakes; domains `a`, `b`, `c` with 20 tasks each."""

    def __init__(self, script: Script = alternating, workers: int = 1, gap=lambda version: 0.0, **rl) -> None:
        self.rl = RlConfig(**{"groups_per_batch": 7, "group_size": 4, "stall_timeout_s": 5.0} | rl)
        names = ("a", "b", "c")
        tasks = {name: [Task(f"{name}{i}", name, "train", "") for i in range(20)] for name in names}
        self.workers = [FakeWorker(script, gap=gap) for _ in range(workers)]
        self.learner = FakeLearner(probe=PROBE)
        self.sampler = Sampler(tasks, groups_per_batch=self.rl.groups_per_batch, memory=0.9, seed=0)
        self.telemetry = Telemetry(names, Sink())
        self.loop = RlLoop(
            Fleet(self.workers, self.learner, []),
            self.sampler,
            BatchBuilder(dict.fromkeys(names, 1.0), deviation_memory=16),
            self.telemetry,
            self.rl,
            EngineConfig(),
            probe=PROBE,
            seed=0,
        )
        self.versions: list[int] = []
        self.states: list[dict] = []

    async def run(self, updates: int, first: int = 0) -> None:
        async def on_update(version, sampler) -> None:
            self.versions.append(version)
            self.states.append(dict(sampler))

        await self.loop.run(first, updates, on_update)


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_quotas_are_exact_and_staleness_is_bounded_when_domains_differ_fiftyfold(staleness: int) -> None:
    rng = random.Random(1)

    def script(request: GroupRequest, index: int) -> Play:
        slow = {"a": 0.001, "b": 0.004, "c": 0.05}[request.task.domain]
        return Play(float(index % 2), tokens=rng.randint(1, 9), seconds=slow * rng.random())

    setup = Setup(script, workers=2, max_staleness=staleness)
    await setup.run(12)
    assert setup.versions == list(range(1, 13))
    assert setup.telemetry.staleness_max <= staleness
    updates = [data for kind, data in setup.telemetry._sink.records if kind == "update"]  # type: ignore[attr-defined]
    for update in updates:
        parts = update["domains"]
        assert all(part["groups"] == part["quota"] for part in parts.values())
        assert sum(part["groups"] for part in parts.values()) == 7
    assert all(worker.updates == list(range(1, 13)) for worker in setup.workers)


async def test_generation_goes_on_while_the_trainer_steps() -> None:
    """With staleness 1 a batch is generated during the step before it: the trainer never waits for a whole batch."""
    setup = Setup(lambda r, i: Play(float(i % 2), seconds=0.03))
    setup.learner.seconds = 0.06
    await setup.run(6)
    waits = [data["waited_s"] for kind, data in setup.telemetry._sink.records if kind == "update"]  # type: ignore[attr-defined]
    synchronous = Setup(lambda r, i: Play(float(i % 2), seconds=0.03), max_staleness=0)
    synchronous.learner.seconds = 0.06
    await synchronous.run(6)
    waits_0 = [d["waited_s"] for kind, d in synchronous.telemetry._sink.records if kind == "update"]  # type: ignore[attr-defined]
    assert sorted(waits)[3] < sorted(waits_0)[3]


async def test_an_infrastructure_error_never_reaches_the_trainer() -> None:
    def script(request: GroupRequest, index: int) -> Play:
        if request.task.domain == "b" and index == 0:
            return Play(error="the sandbox died")
        return Play(float(index % 2))

    setup = Setup(script)
    await setup.run(3)
    trained = [sample for batch in setup.learner.batches for sample in batch if sample.tag == "b"]
    groups = sum(1 for request in setup.workers[0].requests if request.task.domain == "b")
    assert len(trained) <= groups * 3  # three of four episodes are left
    assert setup.telemetry.domains["b"].statuses["infra_error"] == groups
    assert setup.telemetry.domains["b"].first_error == "the sandbox died"


async def test_a_task_that_cannot_be_played_gives_its_place_to_another() -> None:
    def script(request: GroupRequest, index: int) -> Play:
        return Play(error="broken task") if request.task.id == "a3" else Play(float(index % 2))

    setup = Setup(script)
    setup.loop._guard._threshold = 1000
    await setup.run(10)
    played = {request.task.id for request in setup.workers[0].requests if request.task.domain == "a"}
    assert "a3" in played
    assert setup.versions[-1] == 10


async def test_a_domain_of_nothing_but_errors_stops_the_run_with_its_name_and_the_first_error() -> None:
    def script(request: GroupRequest, index: int) -> Play:
        return Play(error="verifier: division by zero") if request.task.domain == "c" else Play(float(index % 2))

    with pytest.raises(DomainFailing, match=r"'c'.*division by zero"):
        await Setup(script).run(3)


async def test_a_failed_probe_reloads_once_and_replays_what_was_generated_meanwhile() -> None:
    failed: list[int] = []

    def gap(version: int) -> float:
        if version == 2 and not failed:
            failed.append(version)
            return 0.3
        return 0.0

    setup = Setup(lambda r, i: Play(float(i % 2), seconds=0.002), gap=gap)
    await setup.run(5)
    assert failed == [2]
    assert setup.workers[0].updates == [1, 2, 2, 3, 4, 5]
    names = [request.id.rpartition(".")[0] for request in setup.workers[0].requests]
    replayed = [name for name in names if names.count(name) > 1]
    assert replayed, "groups in flight during the failed proof are played again"


async def test_an_engine_that_fails_the_probe_twice_ends_the_run() -> None:
    with pytest.raises(ParityBroken, match=r"0\.3 nats at version 1"):
        await Setup(gap=lambda version: 0.3 if version else 0.0).run(3)


async def test_a_worker_that_never_answers_ends_the_run_with_the_name_of_what_was_waited_for() -> None:
    def script(request: GroupRequest, index: int) -> Play:
        return Play(0.0, seconds=3600 if request.task.domain == "b" else 0.0)

    with pytest.raises(RunStalled, match=r"0\.2 s \(rl\.stall_timeout_s\) for"):
        await Setup(script, stall_timeout_s=0.2).run(2)


async def test_a_checkpoint_holds_the_state_from_which_the_next_batch_is_planned_again() -> None:
    setup = Setup()
    await setup.run(4)
    again = Setup()
    again.sampler.load_state_dict(setup.states[1])  # after update 2
    again.learner.current = again.workers[0].version = 2
    await again.run(4, first=2)

    def tasks_of(worker: FakeWorker, batch: int) -> list[str]:
        return sorted(r.task.id for r in worker.requests if f"@{batch}." in r.id)

    assert tasks_of(again.workers[0], 2) == tasks_of(setup.workers[0], 2)


async def test_the_update_that_an_interruption_meets_is_recorded() -> None:
    setup = Setup()
    setup.learner.seconds = 0.05
    running = asyncio.create_task(setup.run(50))
    while setup.learner.started < 2:  # noqa: ASYNC110 - the fake has no event
        await asyncio.sleep(0)
    assert setup.learner.current == 1, "the second update has begun and not ended"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await setup.loop.settle()
    assert setup.telemetry.update == setup.learner.current == len(setup.telemetry.domains["a"].pass_rate) == 2
    assert setup.loop.sampler_state(setup.learner.current)["next_batch"] == setup.learner.current
