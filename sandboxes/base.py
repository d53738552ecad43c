"""What a sandbox and a source of sandboxes are. Implementations: `docker.py` (real), `fake.py` (tests).

Paths are absolute inside the sandbox or relative to its working directory `/work`. All deadlines are in seconds. An
implementation raises `SandboxLost` when the machine below it fails; a command that fails or overruns its deadline is an
`ExecResult`, because that is the policy's doing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from sandboxes.latency import Latencies

WORKDIR = "/work"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did, for example `ExecResult(0, b"notes.txt\\n", b"", False, False, 0.002)`."""

    exit_code: int
    """Exit status; 128 + n for a command ended by signal n."""
    stdout: bytes
    """Standard output, cut to its head and tail when longer than the configured bound."""
    stderr: bytes
    """Standard error, bounded the same way."""
    truncated: bool
    """Whether either stream was cut."""
    timed_out: bool
    """Whether the deadline passed; the whole process tree has then been killed."""
    duration_s: float
    """Time from fork to the end of the command, measured inside the sandbox."""


class Sandbox(Protocol):
    """One leased machine, clean when leased."""

    @property
    def id(self) -> str: ...

    async def exec(
        self,
        command: str,
        *,
        stdin: bytes = b"",
        cwd: str = WORKDIR,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run `command` with `bash -c`. `timeout_s` defaults to the configured command deadline."""
        ...

    async def python(self, source: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> ExecResult:
        """Run a Python program of ours, a grader for example, on the standard library alone.

        As `python3 -I -S -c` in `/work`, but in a copy of an interpreter that runs already, which takes a few
        milliseconds. `source` may hold nothing that a policy wrote: that goes in through `stdin`.
        """
        ...

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Create or replace files, with their parent directories, owned by the sandbox user. One round trip.

        Raises `FilesRefused` when the disk is full or a path cannot be a file.
        """
        ...

    async def read_files(self, root: str = WORKDIR) -> dict[str, bytes]:
        """All regular files below `root`, by path relative to it, in one round trip; none when `root` does not exist.

        Symbolic links are not followed; what the sandbox user may not read is left out. Raises `FilesRefused` when the
        tree is larger than the sandbox's disk bound.
        """
        ...


class SandboxProvider(Protocol):
    """Leases sandboxes. Whoever acquires one releases it on every way out; it is then reset or replaced."""

    @property
    def latencies(self) -> Latencies:
        """Times of all `exec` calls, as their callers saw them."""
        ...

    async def acquire(self, *, timeout_s: float | None = None) -> Sandbox:
        """A clean sandbox. Raises `NoCapacity` when none is free in time: by default `sandboxes.acquire_timeout_s`."""
        ...

    async def release(self, sandbox: Sandbox) -> None:
        """Give a sandbox back. Never raises for a dead sandbox: the provider replaces it."""
        ...
