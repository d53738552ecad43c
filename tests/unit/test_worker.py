"""The rollout worker over a scripted engine: groups, retries, demonstrations, weights, and what it is not given."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from reward.domain import Domain, load_domain
from reward.score import Status
from rollout_workers.config import EngineConfig
from rollout_workers.engines.fake import FakeEngine
from rollout_workers.worker import GroupRequest, NoSandboxes, RolloutWorker
from sandboxes.errors import NoCapacity
from trainer.policy import byte_tokenizer, init_policy

VERIFIER = """
def grade(task, answer):
    if answer == "break":
        raise RuntimeError("the verifier broke")
    return {"same": float(answer == task["data"]["answer"])}
"""
CONFIG = """
name = "echo"
environment = "single_turn"
verifier = "grade.py:grade"
[components.same]
range = [0, 1]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("policy") / "tiny"
    init_policy("tiny-moe", path, 0)
    return str(path)


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    (tmp_path / "domain.toml").write_text(CONFIG)
    (tmp_path / "grade.py").write_text(VERIFIER)
    (tmp_path / "train.jsonl").write_text('{"id": "a", "prompt": "x", "data": {"answer": "x"}, "solution": ["x"]}\n')
    (tmp_path / "eval.jsonl").write_text('{"id": "b", "prompt": "y", "data": {"answer": "y"}, "solution": ["y"]}\n')
    return load_domain(tmp_path)


class Answers:
    """Says the given answers one after the other, the last one for ever."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked = 0

    def __call__(self, prompt: tuple[int, ...]) -> Sequence[int]:
        text = self.texts[min(self.asked, len(self.texts) - 1)]
        self.asked += 1
        return tuple(text.encode())


@pytest.fixture
async def answers() -> Answers:
    return Answers("x", "no")


@pytest.fixture
async def worker(model: str, domain: Domain, answers: Answers) -> AsyncIterator[RolloutWorker]:
    eos = byte_tokenizer().eos_token_id
    worker = RolloutWorker(model, EngineConfig(), [domain], lambda model, config: FakeEngine(answers, eos_id=eos))
    await worker.prepare()
    await worker.start_engine()
    yield worker
    await worker.close()


def request(domain: Domain, size: int = 4, retries: int = 0) -> GroupRequest:
    return GroupRequest("echo/a@0", domain.train[0], size, 1.0, retries, seed=5)


async def test_a_group_is_played_and_graded(worker: RolloutWorker, domain: Domain) -> None:
    episodes = await worker.run_group(request(domain))
    assert [episode.id for episode in episodes] == [f"echo/a@0.{index}" for index in range(4)]
    assert sorted(episode.score.passed for episode in episodes) == [False, False, False, True]
    assert all(set(e.versions) == {-1, 0} and e.policy_tokens >= 2 for e in episodes)


async def test_an_infrastructure_error_is_played_again_as_often_as_asked(
    worker: RolloutWorker, domain: Domain, answers: Answers
) -> None:
    answers.texts = ["break", "x"]
    (episode,) = await worker.run_group(request(domain, size=1, retries=1))
    assert episode.score.passed and answers.asked == 2
    answers.texts, answers.asked = ["break"], 0
    (episode,) = await worker.run_group(request(domain, size=1, retries=2))
    assert episode.score.status is Status.INFRA_ERROR and "broke" in episode.score.detail
    assert answers.asked == 3


async def test_demonstrations_are_played_without_the_engine(
    worker: RolloutWorker, domain: Domain, answers: Answers
) -> None:
    (episode,) = await worker.demonstrate("echo", domain.train)
    assert episode.score.passed and answers.asked == 0


async def test_the_probe_and_the_counters_are_the_engines(worker: RolloutWorker, domain: Domain) -> None:
    assert [len(row) for row in await worker.probe([(1, 2, 3), (4, 5)])] == [2, 1]
    await worker.run_group(request(domain))
    assert (await worker.stats()).generated_tokens > 0
    assert (await worker.exec_latencies()).count == 0


async def test_a_worker_without_sandboxes_says_so() -> None:
    with pytest.raises(NoCapacity, match="given no sandboxes"):
        await NoSandboxes().acquire()


async def test_at_most_the_configured_number_of_episodes_is_in_progress(model: str, domain: Domain) -> None:
    eos = byte_tokenizer().eos_token_id
    worker = RolloutWorker(
        model,
        EngineConfig(max_concurrent_episodes=2),
        [domain],
        lambda m, c: FakeEngine(lambda prompt: tuple(b"x"), eos_id=eos, token_s=0.01),
    )
    await worker.prepare()
    await worker.start_engine()
    try:
        group = asyncio.ensure_future(worker.run_group(request(domain, size=8)))
        peak = 0
        while not group.done():
            peak = max(peak, (await worker.stats()).running)
            await asyncio.sleep(0.002)
        assert len(await group) == 8
        assert 1 <= peak <= 2
    finally:
        await worker.close()
