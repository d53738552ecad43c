"""The host's side of the agent: `Lease` names a leased sandbox and can travel, `AgentSandbox` acts in it."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.agent.wire import encode
from sandboxes.base import WORKDIR, ExecResult
from sandboxes.errors import FilesRefused, SandboxLost
from sandboxes.latency import Latencies

ANSWER_GRACE_S = 15.0
"""How much longer than a command's deadline its agent may take to answer, on a machine that is short of processors."""
LARGEST_HEADER = 1 << 26


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one sandbox: plain data, so that it may travel to another process of the node.

    Example: `Lease("3f2a…", "crosstrain-quickstart-7c1d", "/tmp/ct/7c1d/agent.sock", 5.0, 16384, 33554432)`.
    """

    id: str
    """Unique name of the lease; the agent refuses requests under any other."""
    container: str
    """Name of the container, for messages to people."""
    socket_path: str
    """The agent's socket on the node that runs the container."""
    command_timeout_s: float
    """Deadline in seconds of commands that give none."""
    output_bytes: int
    """Longest output kept of each stream of a command."""
    disk_bytes: int
    """Largest tree that `read_files` returns."""


class AgentConnection:
    """Requests to one agent, one after the other. Any fault but a refusal raises `SandboxLost`.

    A request that is cancelled closes the connection, which tells the agent to kill what it runs.
    """

    def __init__(self, socket_path: str, container: str) -> None:
        self.socket_path = socket_path
        self._container = container
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self._ended = False

    async def open(self) -> None:
        """Connect. Raises `SandboxLost` when nothing listens, or after `end`."""
        if self._ended:
            raise self._lost("it was given back")
        try:
            self._streams = self._streams or await asyncio.open_unix_connection(self.socket_path)
        except OSError as error:
            raise self._lost(f"nothing listens on {self.socket_path}: {error.strerror}") from None

    async def request(
        self, header: dict[str, Any], *blobs: bytes, timeout_s: float
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send one message and await its answer for at most `timeout_s`. Raises `SandboxLost` or `FilesRefused`."""
        async with self._lock:
            answered = False
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._exchange(encode(header, *blobs))
                answered = True
            except TimeoutError:
                raise self._lost(f"its agent did not answer within {timeout_s:.0f} s") from None
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                raise self._lost(f"{type(error).__name__}: {error}") from error
            finally:
                if not answered:
                    self.close()
        match answer[0].get("error"):
            case None:
                return answer
            case "refused":
                raise FilesRefused(f"sandbox {self._container}: {answer[0].get('detail')}")
            case "lease":
                raise self._lost("this lease of it is over")
            case other:
                raise self._lost(f"its agent answered {other!r}")

    async def _exchange(self, message: bytes) -> tuple[dict[str, Any], list[bytes]]:
        if self._streams is None:
            await self.open()
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(message)
        await writer.drain()
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > LARGEST_HEADER:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(await reader.readexactly(size))
        return header, [await reader.readexactly(size) for size in header["sizes"]]

    def _lost(self, reason: str) -> SandboxLost:
        return SandboxLost(f"sandbox {self._container} is lost: {reason}")

    def end(self) -> None:
        """Close the connection for good."""
        self._ended = True
        self.close()

    def close(self) -> None:
        """Close the connection, which ends a command that is still running. The next request opens it again."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class AgentSandbox:
    """A leased sandbox, used through its agent. Implements `Sandbox`."""

    def __init__(self, lease: Lease, latencies: Latencies | None = None) -> None:
        """Use `connect`, which proves that the agent is there."""
        self.lease = lease
        self._latencies = latencies
        self._connection = AgentConnection(lease.socket_path, lease.container)

    @classmethod
    async def connect(cls, lease: Lease, latencies: Latencies | None = None) -> "AgentSandbox":
        """The sandbox of a lease, connected. Raises `SandboxLost`. `latencies` counts the time of each `exec`."""
        sandbox = cls(lease, latencies)
        await sandbox._connection.open()
        return sandbox

    @property
    def id(self) -> str:
        """The lease's id."""
        return self.lease.id

    async def exec(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        began = time.perf_counter()
        result = await self._execute(command, stdin, cwd, env or {}, timeout_s, python=False)
        if self._latencies is not None:
            self._latencies.observe(time.perf_counter() - began)
        return result

    async def python(self, source: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> ExecResult:
        """See `Sandbox.python`."""
        return await self._execute(source, stdin, WORKDIR, {}, timeout_s, python=True)

    async def _execute(
        self, text: str, stdin: bytes, cwd: str, env: Mapping[str, str], timeout_s: float | None, *, python: bool
    ) -> ExecResult:
        timeout_s = self.lease.command_timeout_s if timeout_s is None else timeout_s
        header = {
            "op": "exec",
            "lease": self.lease.id,
            "command": text,
            "python": python,
            "cwd": cwd,
            "env": dict(env),
            "timeout_s": timeout_s,
            "output_bytes": self.lease.output_bytes,
        }
        answer, blobs = await self._connection.request(header, stdin, timeout_s=timeout_s + ANSWER_GRACE_S)
        (stdout, cut), (stderr, cut_too) = (
            joined(blobs[i], blobs[i + 1], length) for i, length in zip((0, 2), answer["lengths"], strict=True)
        )
        return ExecResult(
            answer["exit_code"], stdout, stderr, cut or cut_too, answer["timed_out"], answer["duration_s"]
        )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.write_files`."""
        header = {"op": "write_files", "lease": self.lease.id, "paths": list(files)}
        await self._connection.request(header, *files.values(), timeout_s=ANSWER_GRACE_S)

    async def read_files(self, root: str = WORKDIR) -> dict[str, bytes]:
        """See `Sandbox.read_files`."""
        header = {"op": "read_files", "lease": self.lease.id, "root": root, "max_bytes": self.lease.disk_bytes}
        answer, blobs = await self._connection.request(header, timeout_s=ANSWER_GRACE_S)
        return dict(zip(answer["paths"], blobs, strict=True))

    async def close(self) -> None:
        """Close the connection for good; the lease goes on until its host ends it."""
        self._connection.end()


def joined(head: bytes, tail: bytes, length: int) -> tuple[bytes, bool]:
    """Head and tail of a stream of `length` bytes as one text, and whether something between them was left out."""
    left_out = length - len(head) - len(tail)
    if left_out <= 0:
        return head + tail, False
    return b"%b\n[... %d bytes left out ...]\n%b" % (head, left_out, tail), True
