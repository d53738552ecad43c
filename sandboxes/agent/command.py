"""One command: from fork to exit status, its streams bounded while they are read."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping

from .files import USER, WORKDIR, as_user
from .interpreter import compiled, fork

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKDIR,
    "USER": "sandbox",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
CHUNK = 1 << 16
CANNOT_RUN = 126
"""Exit status of a command that could not be started, as bash has it."""


class Bounded:
    """Keeps the first and the last `bound // 2` bytes of a stream, and its whole length."""

    def __init__(self, bound: int) -> None:
        self.half = bound // 2
        self.head = b""
        self.tail = b""
        self.length = 0

    def add(self, data: bytes) -> None:
        """Append to the stream."""
        self.length += len(data)
        room = self.half - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail = (self.tail + data)[-self.half :]


class Command:
    """A running bash or Python program and our ends of its pipes. Raises `OSError` or `ValueError` if it cannot start.

    Bash starts by `posix_spawn`, which copies no page tables and so takes a third of the time of a fork. What a spawned
    child cannot do for itself, the agent is for that moment: in the command's directory, first in line for the
    out-of-memory killer, and with the sandbox user's real id, which the child makes its effective one.
    """

    def __init__(
        self, text: str, cwd: str, env: Mapping[str, str], stdin: bytes | bytearray, bound: int, *, python: bool
    ) -> None:
        self.began = time.monotonic()
        environment = {os.fsencode(k): os.fsencode(v) for k, v in {**ENVIRONMENT, **env}.items()}
        argv = [b"bash", b"-c", os.fsencode(text)]
        directory = os.fsencode(os.path.join(WORKDIR, cwd))
        if any(b"\0" in part for part in (argv[2], directory, *environment, *environment.values())):
            raise ValueError("a command, directory or environment cannot hold a NUL character")
        with contextlib.ExitStack() as theirs:
            self.to_stdin = -1
            if stdin:
                reader, self.to_stdin = os.pipe()
            else:
                reader = os.open(os.devnull, os.O_RDONLY)
            theirs.callback(os.close, reader)
            from_stdout, stdout = os.pipe()
            theirs.callback(os.close, stdout)
            from_stderr, stderr = os.pipe()
            theirs.callback(os.close, stderr)
            self.stdout, self.stderr = Bounded(bound), Bounded(bound)
            self.outputs = {from_stdout: self.stdout, from_stderr: self.stderr}
            """Read ends of the streams that have not ended."""
            try:
                streams = (reader, stdout, stderr)
                if python:
                    self.pid = fork(compiled(text), environment, directory, streams)
                else:
                    self.pid = _spawn(argv, environment, directory, streams)
            except (OSError, ValueError):
                for fd in self.fds():
                    os.close(fd)
                raise
        self.stdin = memoryview(stdin)
        for fd in self.fds():
            os.set_blocking(fd, False)

    def fds(self) -> list[int]:
        """Our ends of the pipes that are still open."""
        return [*self.outputs, *([self.to_stdin] if self.to_stdin >= 0 else [])]

    def register(self, poll: "select.poll") -> None:
        """Have `poll` report what `serve` can act on."""
        for fd in self.outputs:
            poll.register(fd, select.POLLIN)
        if self.to_stdin >= 0:
            poll.register(self.to_stdin, select.POLLOUT)

    def serve(self, fd: int, poll: "select.poll") -> None:
        """Move the data that `poll` reported on `fd`; unregister and close it when it has ended."""
        with contextlib.suppress(BlockingIOError):
            if fd == self.to_stdin:
                if self._write():
                    return
                self.to_stdin = -1
            elif data := os.read(fd, CHUNK):
                self.outputs[fd].add(data)
                return
            else:
                del self.outputs[fd]
            poll.unregister(fd)
            os.close(fd)

    def _write(self) -> bool:
        """Whether there is more to write and someone to read it."""
        try:
            self.stdin = self.stdin[os.write(self.to_stdin, self.stdin[:CHUNK]) :]
        except BrokenPipeError:
            return False
        return bool(self.stdin)

    def close_stdin(self) -> None:
        """Stop writing to the command."""
        if self.to_stdin >= 0:
            os.close(self.to_stdin)
            self.to_stdin = -1


def _spawn(argv: list[bytes], environment: dict[bytes, bytes], cwd: bytes, streams: tuple[int, int, int]) -> int:
    with as_user():
        os.chdir(cwd)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)]
    with open("/proc/self/oom_score_adj", "r+b", buffering=0) as score:
        usual = score.read()
        score.write(b"1000")
        os.setresuid(USER, 0, 0)
        try:
            return os.posix_spawn(
                "/bin/bash",
                argv,
                environment,
                file_actions=actions,
                resetids=True,
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        finally:
            os.setresuid(0, 0, 0)
            score.write(usual)
