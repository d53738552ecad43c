"""Cleans up after a run whose driver is gone: a small process beside the driver, started before everything else.

    driver ──pipe──▶ guardian      first line: what to watch; "done": all is clean; end of the pipe without it: clean up
       └────pidfd────▶             the driver's death, also when a forked child still holds the pipe

It lives in a session of its own, so Ctrl+C does not reach it, and its environment lacks the variable that marks the
processes of a run. The driver runs the same clean-up on its normal way out, where it should find nothing. Only this
machine is looked after; containers on others end by themselves at their lifetime.

    with Guardian(run, paths=[scratch]) as guardian:
        ...
    guardian.leftovers
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

RUN_VARIABLE = "CROSSTRAIN_RUN"
"""Every process of a run carries its id under this name in the environment it was started with."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
QUIET_S = 0.5
"""After a pass that found something, how long until the next one looks for what was being made meanwhile."""
PASSES = 40
"""Largest number of passes."""
GRACE_S = 5.0
"""How long processes of a run that ended well may take to end by themselves: Ray's do not wait for each other."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BAD_RUN = "the run id {!r} may have letters, digits, dots, dashes and underscores only"


@dataclass(slots=True)
class Leftovers:
    """What a clean-up had to remove. False when that was nothing but the `paths` it was told of."""

    processes: list[str] = field(default_factory=list)
    """Process ids and command lines."""
    containers: list[str] = field(default_factory=list)
    """Names of containers."""
    shared_memory: list[str] = field(default_factory=list)
    """Names of shared-memory segments."""
    paths: list[str] = field(default_factory=list)
    """Temporary folders and files."""
    errors: list[str] = field(default_factory=list)
    """What could not be removed, and why."""

    def __bool__(self) -> bool:
        return bool(self.processes or self.containers or self.shared_memory or self.errors)

    def add(self, other: "Leftovers") -> None:
        """Take note of a further pass, whose errors replace the earlier ones."""
        self.processes += other.processes
        self.containers += other.containers
        self.shared_memory += other.shared_memory
        self.paths += other.paths
        self.errors = other.errors


def clean(
    run: str, paths: Sequence[Path] = (), *, passes: int = 1, grace_s: float = 0.0, since: float | None = None
) -> Leftovers:
    """Remove what belongs to a run on this machine: processes, containers, shared memory, then `paths`.

    `since`: when the run began, in seconds since the epoch. Semaphores of Python's multiprocessing carry no run's name;
    those made since then that no process maps any more go too.

    Processes have `grace_s` seconds to end by themselves. Repeats until a pass finds nothing, `passes` times at least:
    an engine call in flight may still make a container.
    """
    if not _RUN.fullmatch(run):
        raise ValueError(_BAD_RUN.format(run))
    total = Leftovers()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _marked(run):
        time.sleep(0.05)
    for number in range(1, PASSES + 1):
        found = Leftovers(processes=_kill_processes(run), shared_memory=_remove_shared_memory(run))
        for path in orphan_semaphores(since) if since is not None else ():
            path.unlink(missing_ok=True)
        _remove_containers(run, found)
        total.add(found)
        if not found and number >= passes:
            break
        time.sleep(QUIET_S)
    for path in paths:
        if path.exists():
            total.paths.append(str(path))
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return total


def _kill_processes(run: str) -> list[str]:
    killed = []
    for pid in _marked(run):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            os.kill(pid, signal.SIGKILL)
            killed.append(f"{pid} {command[:200]}")
    return killed


def _marked(run: str) -> list[int]:
    """Processes started with `RUN_VARIABLE=run`, except this one and its ancestors."""
    marked = set()
    wanted = f"{RUN_VARIABLE}={run}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else; zombies have no environment
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    marked.add(int(entry.name))
    return sorted(marked.difference(_ancestors()))


def _ancestors() -> Iterator[int]:
    pid = os.getpid()
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _remove_shared_memory(run: str) -> list[str]:
    removed = []
    for path in SHARED_MEMORY.glob(f"crosstrain-{run}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path.name)
    return removed


def orphan_semaphores(since: float) -> list[Path]:
    """Semaphores of Python's multiprocessing made after `since` (seconds since the epoch) that no process maps.

    Named ones stay when the process that made them is killed; a living one is mapped by its maker.
    """
    recent = [path for path in SHARED_MEMORY.glob("sem.mp-*") if _made_since(path, since)]
    mapped = set()  # by inode: the C library maps a semaphore under a temporary name before it gives it the final one
    for maps in Path("/proc").glob("[0-9]*/maps") if recent else ():
        with contextlib.suppress(OSError):
            mapped.update(int(line.split()[4]) for line in maps.read_text().splitlines() if f"{SHARED_MEMORY}/" in line)
    orphans = []
    for path in recent:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino not in mapped:
                orphans.append(path)
    return orphans


def _made_since(path: Path, since: float) -> bool:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_uid == os.getuid() and status.st_mtime >= since
    return False


def _remove_containers(run: str, found: Leftovers) -> None:
    from sandboxes.errors import EngineUnavailable, SandboxError  # late: Docker's SDK takes a while to import
    from sandboxes.reaper import reap

    try:
        # A thread of its own, because the caller's may have a running event loop.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            found.containers = [container.name for container in thread.submit(asyncio.run, reap(run)).result()]
    except EngineUnavailable:
        return  # without an engine there are no containers
    except SandboxError as error:
        found.errors.append(f"containers: {error}")


class Guardian:
    """The driver's side. Enter it first and leave it last."""

    def __init__(self, run: str, paths: Sequence[Path] = ()) -> None:
        """`paths`: temporary folders and files that nobody needs after the run."""
        self._run = run
        self._paths = [path.absolute() for path in paths]
        self._process: subprocess.Popen[bytes] | None = None
        self._since = 0.0
        self.leftovers = Leftovers()
        """After leaving: what the run itself had failed to remove. `paths` are no failure."""

    @property
    def pid(self) -> int:
        """The guardian's process id. Only while entered."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        if not _RUN.fullmatch(self._run):
            raise ValueError(_BAD_RUN.format(self._run))
        environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        # Popen keeps our end of the pipe from being inherited by whatever the driver starts.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.run.guardian"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self._since = time.time()
        watched = {
            "run": self._run,
            "driver": os.getpid(),
            "paths": [str(path) for path in self._paths],
            "since": self._since,
        }
        self._say(json.dumps(watched) + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None and self._process.stdin is not None
        self.leftovers = clean(self._run, self._paths, grace_s=GRACE_S, since=self._since)
        self._say("done\n")
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed it; the clean-up above does without
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def main() -> None:
    """Watch the driver whose first line comes on standard input, and clean up when it goes without a word."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe = sys.stdin.fileno()
    said = b""
    while b"\n" not in said:
        if not (piece := os.read(pipe, 65536)):
            return
        said += piece
    line, _, said = said.partition(b"\n")
    watched = json.loads(line)
    if not _ended_well(pipe, said, watched["driver"]):
        clean(watched["run"], [Path(path) for path in watched["paths"]], passes=4, since=watched["since"])


def _ended_well(pipe: int, said: bytes, driver: int) -> bool:
    """Wait until the driver says "done" or is gone; whether it said so."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        poll.register(os.pidfd_open(driver), select.POLLIN)
    while b"done\n" not in said:
        ready = {fd for fd, _ in poll.poll()}
        if pipe not in ready:
            return False  # the driver has died, and left the pipe to a child
        if not (piece := os.read(pipe, 65536)):
            return False
        said += piece
    return True


if __name__ == "__main__":
    main()
