"""The sandboxes of one machine: `SandboxHost` keeps them running and leases them, `LocalProvider` hands them out.

    created ──▶ idle ──acquire──▶ leased ──release──▶ reset ──clean──▶ idle
                  │ dead or old                         │ dirty, dead or old
                  └────────────────▶ replaced ◀─────────┘

Everything but `acquire` happens in background tasks that run to their end: closing waits for them and cancels none, so
that no container is made by an engine call whose caller has gone.
"""

import asyncio
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandboxes.base import Sandbox, SandboxProvider
from sandboxes.client import AgentConnection, AgentSandbox, Lease
from sandboxes.config import SandboxConfig
from sandboxes.docker import DEADLINE_LABEL, HOST_LABEL, RUN_LABEL, SHM_MB, SOCKET_LABEL, DockerEngine
from sandboxes.errors import NoCapacity, SandboxConfigError, SandboxError, SandboxLost
from sandboxes.image import require_image
from sandboxes.latency import Latencies

STARTING_AT_ONCE = 4
"""Containers made at the same time; the engine gets slower, not faster, with more."""
READY_TIMEOUT_S = 30.0
"""How long the agent of a new container may take to listen."""
BIND_TIMEOUT_S = 10.0
"""How long an idle agent may take to prove that it lives."""
RESET_TIMEOUT_S = 15.0
"""How long a reset may take before the container is replaced."""
SOCKET = "agent.sock"
LONGEST_SOCKET_PATH = 107
"""Linux' bound on the path of a Unix socket in bytes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of a host, for example `PoolStats(created=17, idle=10, leased=6, lost=1)`."""

    created: int = 0
    """Containers made since the start."""
    starting: int = 0
    """Containers being made, reset or replaced."""
    idle: int = 0
    """Sandboxes ready for a lease."""
    leased: int = 0
    """Sandboxes in use."""
    lost: int = 0
    """Sandboxes that died or could not be reset."""
    waiting: int = 0
    """Callers of `acquire` that wait."""
    acquired: int = 0
    """Leases given since the start."""
    acquire_wait_s: float = 0.0
    """Seconds that those leases were waited for, summed."""
    executed: int = 0
    """Commands run, counted when a sandbox is reset."""


@dataclass(slots=True)
class _Member:
    name: str
    connection: AgentConnection
    replace_after: float
    executed: int = 0


class SandboxHost:
    """Keeps `config.pool_size` sandboxes running on this machine for one run."""

    def __init__(self, config: SandboxConfig, run: str, root: Path) -> None:
        """`root`: folder for the agents' sockets, visible to the Docker engine under the same path; keep it short."""
        self._config = config
        self._run = run
        self._root = root.resolve()
        self._engine: DockerEngine | None = None
        self._idle: asyncio.Queue[_Member | None] = asyncio.Queue()
        self._leased: dict[str, _Member] = {}
        self._connections: dict[str, AgentConnection] = {}
        """By name of container: every one that may exist."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(STARTING_AT_ONCE)
        self._closing = asyncio.Event()
        self._first: asyncio.Future[None] | None = None
        self._fault: SandboxError | None = None
        self._created = self._lost = self._waiting = self._acquired = self._executed = 0
        self._acquire_wait_s = 0.0

    async def start(self) -> None:
        """Begin to fill the pool and wait for the first sandbox.

        Raises `EngineUnavailable`, `ImageBuildFailed` or `SandboxConfigError`; nothing is left then.
        """
        self._check()
        self._engine = await DockerEngine.connect()
        self._first = asyncio.get_running_loop().create_future()
        try:
            await require_image(self._engine, self._config.image)
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for _ in range(self._config.pool_size):
                self._spawn(self._fill())
            await self._first
        except BaseException:
            await self.close()
            raise

    def _check(self) -> None:
        config = self._config
        least = 3 * config.disk_mb + SHM_MB + 16
        if config.memory_mb < least:
            raise SandboxConfigError(
                f"sandboxes.memory_mb = {config.memory_mb} is too small for sandboxes.disk_mb = {config.disk_mb}: "
                f"files count as memory, so make it at least {least}"
            )
        path = str(self._root / secrets.token_hex(4) / SOCKET)
        if len(path.encode()) > LONGEST_SOCKET_PATH:
            raise SandboxConfigError(
                f"the path {path} is too long for a socket: use a shorter temporary folder (TMPDIR)"
            )

    async def acquire(self, timeout_s: float | None = None) -> Lease:
        """The right to use a clean sandbox. Raises `NoCapacity` when none is free within `timeout_s`."""
        began = time.monotonic()
        timeout_s = self._config.acquire_timeout_s if timeout_s is None else timeout_s
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                lease = await self._next_lease()
        except TimeoutError:
            reason = f" ({self._fault})" if self._fault else ""
            raise NoCapacity(
                f"no sandbox became free within {timeout_s:.0f} s: {len(self._leased)} of {self._config.pool_size} are "
                f"leased{reason}; raise sandboxes.pool_size or sandboxes.acquire_timeout_s"
            ) from None
        finally:
            self._waiting -= 1
        self._acquired += 1
        self._acquire_wait_s += time.monotonic() - began
        return lease

    async def _next_lease(self) -> Lease:
        while not self._closing.is_set() and (member := await self._idle.get()) is not None:
            lease = Lease(
                id=secrets.token_hex(8),
                container=member.name,
                socket_path=member.connection.socket_path,
                command_timeout_s=self._config.command_timeout_s,
                output_bytes=self._config.output_bytes,
                disk_bytes=self._config.disk_mb << 20,
            )
            bound = False
            try:
                if time.monotonic() < member.replace_after:
                    await member.connection.request({"op": "bind", "lease": lease.id}, timeout_s=BIND_TIMEOUT_S)
                    bound = True
            except SandboxLost as error:
                log.warning("%s", error)
            finally:
                if not bound:
                    self._spawn(self._recycle(member))
            if bound:
                self._leased[lease.id] = member
                return lease
        raise NoCapacity("the sandbox host is closed")

    async def release(self, lease_id: str) -> None:
        """End a lease; the sandbox is reset or replaced in the background. An ended lease is no error."""
        member = self._leased.pop(lease_id, None)
        if member is not None:
            self._spawn(self._recycle(member))

    async def stats(self) -> PoolStats:
        """Counters at this moment."""
        return PoolStats(
            created=self._created,
            starting=sum(not task.done() for task in self._tasks),  # a task leaves the set a moment after its end
            idle=self._idle.qsize(),
            leased=len(self._leased),
            lost=self._lost,
            waiting=self._waiting,
            acquired=self._acquired,
            acquire_wait_s=self._acquire_wait_s,
            executed=self._executed,
        )

    async def close(self) -> None:
        """Remove all containers and sockets. Idempotent; callers of `acquire` get `NoCapacity`."""
        if self._engine is None:
            return
        self._closing.set()
        await asyncio.gather(*self._tasks)
        if self._first is not None and self._first.done() and not self._first.cancelled():
            self._first.exception()  # seen by `start`, or of no interest any more
        self._leased.clear()
        while not self._idle.empty():
            self._idle.get_nowait()
        for _ in range(self._waiting):
            self._idle.put_nowait(None)
        await asyncio.gather(*map(self._discard, tuple(self._connections)))
        await self._engine.aclose()
        self._engine = None
        if self._root.is_dir() and not any(self._root.iterdir()):
            self._root.rmdir()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fill(self) -> None:
        """Add one sandbox to the pool, trying again with growing pauses while the engine is in trouble."""
        pause_s = 1.0
        while not self._closing.is_set():
            try:
                async with self._slots:
                    member = None if self._closing.is_set() else await self._create()
            except SandboxError as error:
                log.warning("cannot make a sandbox: %s", error)
                self._fault = error
                if self._first is not None and not self._first.done():
                    self._first.set_exception(error)
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, 30.0)
                continue
            if member is None:
                return
            self._fault = None
            self._idle.put_nowait(member)
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            return

    async def _sleep(self, seconds: float) -> None:
        """Pause, or return early when the host closes."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    async def _create(self) -> _Member:
        assert self._engine is not None
        token = secrets.token_hex(4)
        name = f"crosstrain-{self._run}-{token}"
        directory = self._root / token
        lifetime_s = self._config.lifetime_s
        labels = {
            RUN_LABEL: self._run,
            HOST_LABEL: socket.gethostname(),
            DEADLINE_LABEL: str(int(time.time() + lifetime_s)),
            SOCKET_LABEL: str(directory),
        }
        connection = self._connections[name] = AgentConnection(str(directory / SOCKET), name)
        self._created += 1
        try:
            directory.mkdir()
            directory.chmod(0o777)  # root inside may be nobody outside; the folder above is closed
            await self._engine.create(self._config, name, labels, directory)
            await self._await_agent(connection)
        except OSError as error:
            await self._discard(name)
            raise SandboxError(f"cannot make {directory}: {error.strerror}") from error
        except SandboxError:
            await self._discard(name)
            raise
        return _Member(name, connection, time.monotonic() + 0.9 * lifetime_s)

    async def _await_agent(self, connection: AgentConnection) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                await connection.request({"op": "bind", "lease": ""}, timeout_s=BIND_TIMEOUT_S)
            except SandboxLost as error:
                if time.monotonic() > deadline or self._closing.is_set():
                    raise SandboxError(
                        f"{error}; its agent did not start within {READY_TIMEOUT_S:.0f} s: is {self._root} visible to "
                        "the Docker engine?"
                    ) from error
                await asyncio.sleep(0.02)
            else:
                return

    async def _recycle(self, member: _Member) -> None:
        """Make a used sandbox clean and idle again, or replace it."""
        if self._closing.is_set():
            return
        if time.monotonic() < member.replace_after and await self._reset(member):
            self._idle.put_nowait(member)
            return
        await self._discard(member.name)
        await self._fill()

    async def _reset(self, member: _Member) -> bool:
        try:
            answer, _ = await member.connection.request({"op": "reset"}, timeout_s=RESET_TIMEOUT_S)
        except SandboxLost as error:
            log.warning("%s", error)
            self._lost += 1
            return False
        self._executed += answer["executed"] - member.executed
        member.executed = answer["executed"]
        if answer["left"]:
            log.warning("sandbox %s is replaced: a reset left %s", member.name, ", ".join(answer["left"]))
            self._lost += 1
            return False
        return True

    async def _discard(self, name: str) -> None:
        """Remove a container and its socket. When the engine is in trouble the container is left to the reaper."""
        assert self._engine is not None
        self._connections[name].end()
        try:
            await self._engine.remove(name)
        except SandboxError as error:
            log.warning("cannot remove sandbox %s: %s", name, error)
            return
        del self._connections[name]
        shutil.rmtree(self._root / name.rsplit("-", 1)[1], ignore_errors=True)


class LeaseSource(Protocol):
    """Who gives leases: a `SandboxHost`, or something that forwards to one in another process of the same node."""

    async def acquire(self, timeout_s: float | None = None) -> Lease: ...
    async def release(self, lease_id: str) -> None: ...


class LocalProvider(SandboxProvider):
    """Sandboxes from a source of leases on this node."""

    def __init__(self, source: LeaseSource) -> None:
        self._source = source
        self._latencies = Latencies()

    @property
    def latencies(self) -> Latencies:
        """See `SandboxProvider.latencies`."""
        return self._latencies

    async def acquire(self, *, timeout_s: float | None = None) -> Sandbox:
        """See `SandboxProvider.acquire`."""
        lease = await self._source.acquire(timeout_s)
        try:
            return await AgentSandbox.connect(lease, self._latencies)
        except BaseException:
            await self._source.release(lease.id)
            raise

    async def release(self, sandbox: Sandbox) -> None:
        """See `SandboxProvider.release`."""
        assert isinstance(sandbox, AgentSandbox)
        await sandbox.close()
        await self._source.release(sandbox.id)
