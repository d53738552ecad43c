"""Sandboxes without isolation, for tests: commands run as the caller, on this machine, in a temporary folder.

Only what the `Sandbox` protocol promises holds. The folder stands for `/work`: relative paths and paths below `/work`
given to the methods are found there, absolute paths inside commands are the machine's own. No limit but the deadline
and the output bound is enforced, and a process that leaves its session outlives its sandbox.
"""

import asyncio
import contextlib
import itertools
import os
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from sandboxes.base import WORKDIR, ExecResult, Sandbox, SandboxProvider
from sandboxes.client import joined
from sandboxes.config import SandboxConfig
from sandboxes.errors import FilesRefused, NoCapacity, SandboxLost
from sandboxes.latency import Latencies


class FakeSandbox:
    """A temporary folder and the processes started in it. Implements `Sandbox`."""

    def __init__(self, id: str, config: SandboxConfig, latencies: Latencies) -> None:
        self._id = id
        self._config = config
        self._latencies = latencies
        self._folder = Path(tempfile.mkdtemp(prefix="crosstrain-fake-"))
        self._groups: set[int] = set()
        self._lost = False

    @property
    def id(self) -> str:
        """Name within its provider."""
        return self._id

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
        result = await self._run(command, stdin, cwd, env or {}, timeout_s)
        self._latencies.observe(result.duration_s)
        return result

    async def python(self, source: str, *, stdin: bytes = b"", timeout_s: float | None = None) -> ExecResult:
        """See `Sandbox.python`."""
        return await self._run(f"exec python3 -I -S -c {shlex.quote(source)}", stdin, WORKDIR, {}, timeout_s)

    async def _run(
        self, command: str, stdin: bytes, cwd: str, env: Mapping[str, str], timeout_s: float | None
    ) -> ExecResult:
        self._check()
        timeout_s = self._config.command_timeout_s if timeout_s is None else timeout_s
        if "\0" in command:
            return ExecResult(126, b"", b"fake sandbox: a command cannot hold a NUL character\n", False, False, 0.0)
        directory = self._path(cwd)
        if not directory.is_dir():
            return ExecResult(126, b"", f"fake sandbox: no directory {cwd}\n".encode(), False, False, 0.0)
        began = time.perf_counter()
        # Files, not pipes: a background process that keeps a pipe open would keep its reader waiting.
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            source.write(stdin)
            source.seek(0)
            process = await asyncio.create_subprocess_exec(
                *("bash", "-c", command),
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=directory,
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder), "LANG": "C.UTF-8", **env},
                start_new_session=True,
            )
            self._groups.add(process.pid)
            timed_out = await self._finish(process, timeout_s)
            assert process.returncode is not None
            seconds = time.perf_counter() - began
            (stdout, cut), (stderr, cut_too) = (
                _bounded(file.fileno(), self._config.output_bytes) for file in (out, err)
            )
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return ExecResult(code, stdout, stderr, cut or cut_too, timed_out, seconds)

    async def _finish(self, process: asyncio.subprocess.Process, timeout_s: float) -> bool:
        """Wait for the shell, or kill everything when the deadline passes or the caller gives up; whether it passed."""
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
            return False
        except TimeoutError:
            return True
        finally:
            if process.returncode is None:
                self._kill()
                await process.wait()
            elif not _alive(process.pid):
                self._groups.discard(process.pid)

    def _kill(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self._groups.clear()

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.write_files`."""
        self._check()
        for name, data in files.items():
            path = self._path(name)
            try:
                os.makedirs(path.parent, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                path.write_bytes(data)
            except OSError as error:
                raise FilesRefused(f"cannot write {name}: {error.strerror}") from None

    async def read_files(self, root: str = WORKDIR) -> dict[str, bytes]:
        """See `Sandbox.read_files`."""
        self._check()
        folder = self._path(root)
        found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        if sum(path.stat().st_size for path in found) > self._config.disk_mb << 20:
            raise FilesRefused("the files are larger than the sandbox's disk")
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}

    def lose(self) -> None:
        """From now on every call raises `SandboxLost`, as when the machine below has failed."""
        self._lost = True

    def remove(self) -> None:
        """End the processes and remove the folder."""
        self._lost = True
        self._kill()
        shutil.rmtree(self._folder)

    def _check(self) -> None:
        if self._lost:
            raise SandboxLost(f"fake sandbox {self._id} is lost")

    def _path(self, path: str) -> Path:
        return self._folder / os.path.relpath(os.path.join(WORKDIR, path), WORKDIR)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _bounded(fd: int, bound: int) -> tuple[bytes, bool]:
    length, half = os.fstat(fd).st_size, bound // 2
    head = os.pread(fd, half, 0)
    return joined(head, os.pread(fd, half, max(len(head), length - half)), length)


class FakeProvider(SandboxProvider):
    """Hands out at most `config.pool_size` fake sandboxes, each new."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config or SandboxConfig()
        self._free = asyncio.Semaphore(self._config.pool_size)
        self._numbers = itertools.count()
        self._leased: dict[str, FakeSandbox] = {}
        self._latencies = Latencies()

    @property
    def latencies(self) -> Latencies:
        """See `SandboxProvider.latencies`."""
        return self._latencies

    async def acquire(self, *, timeout_s: float | None = None) -> FakeSandbox:
        """See `SandboxProvider.acquire`."""
        timeout_s = self._config.acquire_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise NoCapacity(f"no fake sandbox became free within {timeout_s} s") from None
        sandbox = FakeSandbox(f"fake-{next(self._numbers)}", self._config, self._latencies)
        self._leased[sandbox.id] = sandbox
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """See `SandboxProvider.release`."""
        leased = self._leased.pop(sandbox.id, None)
        if leased is not None:
            leased.remove()
            self._free.release()
