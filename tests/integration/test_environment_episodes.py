"""Whole episodes in Docker sandboxes, and what happens when one dies under an episode."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from reward.config import DomainConfig
from reward.domain import Domain, load_domain
from reward.score import Status
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.chat import ByteChat
from rollout_workers.demonstration import demonstrate
from rollout_workers.engines.base import Generation
from rollout_workers.environment import EnvironmentContext
from rollout_workers.episode import play
from rollout_workers.types import Episode
from sandboxes.client import AgentSandbox
from sandboxes.config import SandboxConfig
from sandboxes.docker import DockerEngine
from sandboxes.pool import LocalProvider, SandboxHost

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
DOMAINS = Path(__file__).parents[2] / "examples" / "quickstart" / "domains"
RUN = f"test-{secrets.token_hex(4)}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    root = tmp_path_factory.getbasetemp() / secrets.token_hex(2)
    host = SandboxHost(SandboxConfig(pool_size=2, command_timeout_s=1.0), RUN, root)
    await host.start()
    try:
        yield LocalProvider(host)
    finally:
        await host.close()


@pytest_asyncio.fixture(loop_scope="module")
async def verifiers() -> AsyncIterator[VerifierPool]:
    pool = VerifierPool(1)
    yield pool
    await pool.close()


class Scripted:
    """Speaks given messages, and does something before one of them."""

    def __init__(self, messages: Sequence[str], before_second=None) -> None:
        self._messages = messages
        self._before_second = before_second

    async def speak(self, prompt_ids: Sequence[int], *, turn: int, max_tokens: int) -> Generation:
        if turn == 1 and self._before_second is not None:
            await self._before_second()
        ids = ByteChat().message_ids(self._messages[turn])
        return Generation(ids, (-0.5,) * len(ids), (1,) * len(ids), "stop")


def shell(provider: LocalProvider, verifiers: VerifierPool, **keys) -> EnvironmentContext:
    config = DomainConfig.model_validate(
        {
            "name": "shell",
            "environment": "terminal",
            "max_turns": 4,
            "max_tokens": 64,
            "components": {"success": {"range": [0, 1]}},
            **keys,
        }
    )
    return EnvironmentContext(Domain(config, DOMAINS, "0", (), ()), provider, verifiers)


async def attempt(context: EnvironmentContext, speaker: Scripted, data: dict | None = None) -> Episode:
    task = Task("t", context.domain.name, "train", "make b", data or {"expect": {"b": "1"}})
    return await play(task, speaker, episode_id="e", context=context, chat=ByteChat(), max_model_len=4096)


async def kill_containers() -> None:
    engine = await DockerEngine.connect()
    try:
        for container in await engine.containers(RUN):
            await engine.remove(container.id)
    finally:
        await engine.aclose()


async def test_a_sandbox_that_dies_between_turns_makes_an_infrastructure_error(provider, verifiers) -> None:
    context = shell(provider, verifiers)
    lost = await attempt(context, Scripted(["echo 1 > b", "ls", "exit"], kill_containers))
    assert lost.score.status is Status.INFRA_ERROR
    assert lost.score.detail.startswith("SandboxLost: ")
    assert "\n" not in lost.score.detail
    assert [turn.action for turn in lost.turns] == ["echo 1 > b", "ls"]
    again = await attempt(context, Scripted(["echo 1 > b", "ls", "exit"]))
    assert (again.score.status, again.score.passed) == (Status.OK, True), "the pool has replaced its sandboxes"


async def test_a_sandbox_that_dies_before_grading_makes_an_infrastructure_error(provider, verifiers) -> None:
    episode = await attempt(shell(provider, verifiers), Scripted(["echo 1 > b", "exit"], kill_containers))
    assert episode.score.status is Status.INFRA_ERROR


async def test_no_free_sandbox_makes_an_infrastructure_error(provider, verifiers) -> None:
    held = [await provider.acquire(timeout_s=60) for _ in range(2)]
    try:
        episode = await attempt(shell(provider, verifiers, episode_timeout_s=0.3), Scripted(["ls", "exit"]))
    finally:
        for sandbox in held:
            await provider.release(sandbox)
    assert episode.score.status is Status.INFRA_ERROR


async def test_a_killed_policy_process_is_not_an_infrastructure_error(provider, verifiers) -> None:
    messages = ["kill -9 $$", "sleep 60", "cat /dev/zero > full", "exit"]
    episode = await attempt(shell(provider, verifiers), Scripted(messages))
    assert episode.score.status in (Status.OK, Status.POLICY_FAILURE)
    assert not episode.score.passed
    assert [turn.observation.split("\n")[-1] for turn in episode.turns][:2] == ["[exit 137]", "[timed out]"]


async def test_the_next_episode_finds_nothing_of_the_last(provider, verifiers) -> None:
    context = shell(provider, verifiers)
    for _ in range(4):
        episode = await attempt(context, Scripted(["ls -A /work /tmp; echo 1 > b; echo 1 > /tmp/b", "exit"]))
        assert episode.turns[0].observation == "/tmp:\n\n/work:\n"


async def test_background_processes_do_not_outlive_the_episode(provider, verifiers) -> None:
    context = shell(provider, verifiers)
    await attempt(context, Scripted(["setsid sleep 1000 > /dev/null 2>&1 < /dev/null & echo 1 > b", "exit"]))
    for _ in range(3):
        episode = await attempt(context, Scripted(["grep -l ^sleep /proc/[0-9]*/comm", "exit"]))
        assert episode.turns[0].observation == "[exit 1]"


@pytest.mark.parametrize("name", ["terminal", "code", "math", "tools"])
async def test_demonstrations_of_the_quickstart_pass(provider, verifiers, name) -> None:
    domain = load_domain(DOMAINS / name)
    context = EnvironmentContext(domain, provider, verifiers)
    tasks = domain.eval[:12]
    episodes = await asyncio.gather(*(demonstrate(task, context, ByteChat()) for task in tasks))
    assert [e.score.detail for e in episodes if not e.score.passed] == []
    assert all(isinstance(e.score.total, float) and 0 < e.score.total <= 1 for e in episodes)
    assert all(sum(e.loss_mask) > 0 for e in episodes)


async def test_a_lease_is_a_real_sandbox(provider) -> None:
    sandbox = await provider.acquire(timeout_s=60)
    try:
        assert isinstance(sandbox, AgentSandbox)
        assert (await sandbox.exec("id -u")).stdout == b"1000\n"
    finally:
        await provider.release(sandbox)
