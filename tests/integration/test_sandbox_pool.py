"""The pool of a host and the reaper, over a real Docker engine."""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.client import AgentSandbox
from sandboxes.config import SandboxConfig
from sandboxes.docker import DEADLINE_LABEL, RUN_LABEL, SOCKET_LABEL, DockerEngine
from sandboxes.errors import EngineUnavailable, NoCapacity, SandboxConfigError, SandboxLost
from sandboxes.pool import LocalProvider, PoolStats, SandboxHost
from sandboxes.reaper import containers, reap

pytestmark = pytest.mark.integration
RUN = f"pool-{os.getpid()}"


@asynccontextmanager
async def running(
    root: Path, *, run: str = RUN, pool_size: int = 1, lifetime_s: float = 600
) -> AsyncIterator[SandboxHost]:
    """A host that must leave neither containers nor sockets behind."""
    host = SandboxHost(SandboxConfig(pool_size=pool_size, lifetime_s=lifetime_s), run, root)
    await host.start()
    try:
        yield host
    finally:
        await host.close()
    assert await containers(run) == []
    assert not exists(root)


async def acquire(host: SandboxHost) -> AgentSandbox:
    sandbox = await LocalProvider(host).acquire(timeout_s=60)
    assert isinstance(sandbox, AgentSandbox)
    return sandbox


def exists(path: Path) -> bool:
    return path.exists()


async def until(host: SandboxHost, condition: Callable[[PoolStats], bool]) -> PoolStats:
    """Wait for counters to reach a state."""
    async with asyncio.timeout(60):
        while not condition(stats := await host.stats()):  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.02)
    return stats


async def kill(container: str) -> None:
    """SIGKILL a container from outside, as the machine's out-of-memory killer might."""
    (found,) = [c for c in await containers(RUN) if c.name == container]
    process = await asyncio.create_subprocess_exec("docker", "kill", found.id, stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0


async def test_pool_fills_leases_and_counts(tmp_path: Path) -> None:
    async with running(tmp_path / "s", pool_size=3) as host:
        stats = await until(host, lambda stats: stats.idle == 3)
        assert (stats.created, stats.starting, stats.leased, stats.waiting) == (3, 0, 0, 0)
        sandbox = await acquire(host)
        await sandbox.exec("true")
        assert (await host.stats()).leased == 1
        await sandbox.close()
        await host.release(sandbox.id)
        stats = await until(host, lambda stats: stats.idle == 3)
        assert (stats.created, stats.leased, stats.acquired, stats.executed, stats.lost) == (3, 0, 1, 1, 0)


async def test_no_sandbox_is_counted_twice_at_any_moment(tmp_path: Path) -> None:
    async with running(tmp_path / "s", pool_size=3) as host:
        seen = set[tuple[int, int, int]]()

        async def watch() -> None:
            """Look in every iteration of the event loop."""
            while True:
                stats = await host.stats()
                seen.add((stats.starting, stats.idle, stats.leased))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await until(host, lambda stats: stats.idle == 3)
        sandbox = await acquire(host)
        await sandbox.close()
        await host.release(sandbox.id)
        await until(host, lambda stats: stats.idle == 3)
        watching.cancel()
        assert {(0, 3, 0), (0, 2, 1), (1, 2, 0)} <= seen
        assert max(map(sum, seen)) == 3


async def test_containers_carry_labels_and_limits(tmp_path: Path) -> None:
    async with running(tmp_path / "s"):
        (container,) = await containers(RUN)
        assert (container.run, container.host, container.state) == (RUN, os.uname().nodename, "running")
        assert 0 < container.deadline - time.time() <= 600
        assert Path(container.socket_dir).parent == tmp_path / "s"
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700


async def test_killed_container_is_lost_and_replaced(tmp_path: Path) -> None:
    async with running(tmp_path / "s") as host:
        sandbox = await acquire(host)
        waiting = asyncio.ensure_future(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        await kill(sandbox.lease.container)
        with pytest.raises(SandboxLost, match=sandbox.lease.container):
            await waiting
        with pytest.raises(SandboxLost):
            await sandbox.read_files()
        await sandbox.close()
        await host.release(sandbox.id)
        other = await acquire(host)
        assert (await other.exec("echo new")).stdout == b"new\n"
        assert other.lease.container != sandbox.lease.container
        await other.close()
        stats = await host.stats()
        assert (stats.created, stats.lost) == (2, 1)


async def test_idle_container_that_died_is_never_leased(tmp_path: Path) -> None:
    async with running(tmp_path / "s") as host:
        (dead,) = await containers(RUN)
        await kill(dead.name)
        sandbox = await acquire(host)
        assert sandbox.lease.container != dead.name
        assert (await sandbox.exec("echo new")).stdout == b"new\n"
        await sandbox.close()


async def test_sandbox_that_cannot_be_cleaned_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path / "s") as host:
        sandbox = await acquire(host)
        segment = "import ctypes; assert ctypes.CDLL(None).shmget(7, 4096, 0o1666) >= 0"  # outlives every process
        assert (await sandbox.exec(f"python3 -c '{segment}'")).exit_code == 0
        await sandbox.close()
        await host.release(sandbox.id)
        stats = await until(host, lambda stats: stats.idle == 1)
        assert (stats.created, stats.lost) == (2, 1)


async def test_lease_released_during_a_command_comes_back_clean(tmp_path: Path) -> None:
    async with running(tmp_path / "s") as host:
        sandbox = await acquire(host)
        task = asyncio.ensure_future(sandbox.exec("sleep 60", timeout_s=60))
        await asyncio.sleep(0.2)
        await sandbox.close()
        with pytest.raises(SandboxLost):
            await task
        await host.release(sandbox.id)
        stats = await until(host, lambda stats: stats.idle == 1)
        assert (stats.created, stats.lost) == (1, 0)


async def test_impatient_callers_lose_no_sandbox(tmp_path: Path) -> None:
    async with running(tmp_path / "s", pool_size=2) as host:
        for _ in range(20):
            tasks = [asyncio.ensure_future(host.acquire(60)) for _ in range(4)]
            await asyncio.sleep(0.001)
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(outcome, BaseException):
                    await host.release(outcome.id)
        stats = await until(host, lambda stats: stats.idle == 2)
        assert (stats.created, stats.leased, stats.waiting) == (2, 0, 0)


async def test_closing_wakes_those_who_wait(tmp_path: Path) -> None:
    async with running(tmp_path / "s") as host:
        lease = await host.acquire(60)
        waiter = asyncio.ensure_future(host.acquire(60))
        await asyncio.sleep(0.05)
        await host.close()
        with pytest.raises(NoCapacity, match="closed"):
            await waiter
        with pytest.raises(NoCapacity, match="closed"):
            await host.acquire(60)
        await host.release(lease.id)
        await host.close()


async def test_closing_while_the_pool_fills_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "s", pool_size=8) as host:
        assert (await host.stats()).idle < 8


async def test_runs_do_not_disturb_each_other(tmp_path: Path) -> None:
    other = f"{RUN}-other"
    async with running(tmp_path / "a") as host, running(tmp_path / "b", run=other):
        sandbox = await acquire(host)
        (doomed,) = await containers(other)
        assert [container.name for container in await reap(other)] == [doomed.name]
        assert not exists(Path(doomed.socket_dir))
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
        assert len(await containers(RUN)) == 1
        await sandbox.close()


async def test_containers_end_by_themselves(tmp_path: Path) -> None:
    async with running(tmp_path / "s", lifetime_s=3):
        assert len(await containers(RUN)) == 1
        async with asyncio.timeout(30):
            while await containers(RUN):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.1)


async def test_reaper_without_a_run_takes_what_is_past_its_deadline(tmp_path: Path) -> None:
    engine = await DockerEngine.connect()
    try:
        for name, deadline in (("old", time.time() - 1), ("young", time.time() + 600)):
            (tmp_path / name).mkdir(mode=0o777)
            labels = {RUN_LABEL: RUN, DEADLINE_LABEL: str(deadline), SOCKET_LABEL: str(tmp_path / name)}
            await engine.create(SandboxConfig(), f"{RUN}-{name}", labels, tmp_path / name)
        assert f"{RUN}-old" in [container.name for container in await reap()]
        assert [container.name for container in await containers(RUN)] == [f"{RUN}-young"]
        assert not (tmp_path / "old").exists() and (tmp_path / "young").exists()
    finally:
        await reap(RUN)
        await engine.aclose()


async def test_dead_engine_is_said_to_be_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    host = SandboxHost(SandboxConfig(), RUN, tmp_path / "s")
    with pytest.raises(EngineUnavailable, match="systemctl start docker"):
        await host.start()
    with pytest.raises(EngineUnavailable):
        await reap(RUN)
    assert not (tmp_path / "s").exists()
    await host.close()


async def test_engine_that_hangs_up_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(hang_up, tmp_path / "d.sock"):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/d.sock")
        with pytest.raises(EngineUnavailable, match="scripts/setup"):
            await DockerEngine.connect()


async def test_unfit_settings_name_key_and_remedy(tmp_path: Path) -> None:
    async def failure(config: SandboxConfig, root: Path = tmp_path / "s") -> str:
        host = SandboxHost(config, RUN, root)
        with pytest.raises(SandboxConfigError) as caught:
            await host.start()
        assert not exists(root) and await containers(RUN) == []
        return str(caught.value)

    assert "sandboxes.memory_mb = 64" in await failure(SandboxConfig(memory_mb=64))
    assert "too long" in await failure(SandboxConfig(), tmp_path / ("x" * 100))
    assert "sandboxes.image = 'crosstrain/no-such:1'" in await failure(SandboxConfig(image="crosstrain/no-such:1"))
    engine = await DockerEngine.connect()
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    foreign = f"crosstrain/foreign:{RUN}"
    await engine.import_image([empty.getvalue()], foreign)
    try:
        assert "lacks this version's agent" in await failure(SandboxConfig(image=foreign))
    finally:
        await engine.remove_image(foreign)
        await engine.aclose()
