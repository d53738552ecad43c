"""The agent's loop: requests, leases and the processes it is the init of."""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from .command import CANNOT_RUN, CHUNK, Command
from .files import USER, WRITABLE, Refused, as_user, read_files, wipe, write_file
from .wire import receive, send

SOCKET = "/crosstrain/socket/agent.sock"
DRAIN_S = 0.02
"""How long output of background processes is awaited after the shell has ended."""
KILL_S = 5.0
"""How long killed processes may take to vanish before the sandbox counts as dirty."""
LONGEST_POLL_S = 60.0
"""A longer wait is made of several: `poll` takes no more milliseconds than fit an int."""
PEER_S = 30.0
"""How long the host may pause within a message."""

Answer = tuple[Any, ...]
"""Header and blobs of a message."""


class Agent:
    """Serves the socket until the lifetime ends."""

    def __init__(self) -> None:
        self.lease = ""
        self.executed = 0
        self.leftovers: set[int] = set()
        """Output pipes that background processes still hold: read and dropped, so that those neither block nor die."""
        self.poll = select.poll()
        self.woken, wake = os.pipe()
        os.set_blocking(self.woken, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Answer requests for ever, one at a time, on any number of connections."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(SOCKET)
        os.chmod(SOCKET, 0o666)  # noqa: S103 - the host's user need not be root; the directories around it are closed
        listener.listen(16)
        peers: dict[int, socket.socket] = {}
        self.poll.register(self.woken, select.POLLIN)
        self.poll.register(listener, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.woken:
                    self.reap()
                elif fd == listener.fileno():
                    peer, _ = listener.accept()
                    peer.settimeout(PEER_S)
                    peers[peer.fileno()] = peer
                    self.poll.register(peer, select.POLLIN)
                elif fd in self.leftovers:
                    self.forget_output(fd)
                elif fd in peers and not self.answer(peers[fd]):
                    self.poll.unregister(fd)
                    peers.pop(fd).close()

    def answer(self, peer: socket.socket) -> bool:
        """Carry out one request; whether the connection stays open."""
        try:
            header, blobs = receive(peer)
            of_host = header["op"] in ("bind", "reset")
            if not of_host and header["lease"] != self.lease:
                send(peer, {"error": "lease"})
                return True
            try:
                answer, *parts = getattr(self, f"on_{header['op']}")(header, blobs, peer)
            except Refused as refusal:
                answer, parts = {"error": "refused", "detail": str(refusal)}, []
            send(peer, answer, *parts)
        except (EOFError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return False
        return True

    def on_bind(self, header: dict[str, Any], *_: object) -> Answer:
        """Name the lease that requests must carry from now on. The host's proof of life before each lease."""
        self.lease = header["lease"]
        return ({"executed": self.executed},)

    def on_exec(self, header: dict[str, Any], blobs: list[bytearray], peer: socket.socket) -> Answer:
        """Run a command to its end or deadline. Raises `EOFError` when the host hangs up meanwhile."""
        self.executed += 1
        bound = header["output_bytes"]
        try:
            command = Command(header["command"], header["cwd"], header["env"], blobs[0], bound, python=header["python"])
        except (OSError, ValueError) as error:  # no process left to fork into, or text that no process can be given
            message = f"sandbox: cannot start: {error}\n".encode()
            answer = {"exit_code": CANNOT_RUN, "timed_out": False, "duration_s": 0.0, "lengths": [0, len(message)]}
            return answer, b"", b"", message, b""
        status = self.run(command, peer, command.began + header["timeout_s"])
        code = -signal.SIGKILL if status is None else status
        out, err = command.stdout, command.stderr
        answer = {
            "exit_code": code if code >= 0 else 128 - code,
            "timed_out": status is None,
            "duration_s": time.monotonic() - command.began,
            "lengths": [out.length, err.length],
        }
        return answer, out.head, out.tail, err.head, err.tail

    def run(self, command: Command, peer: socket.socket, deadline: float) -> int | None:
        """Exit status of the shell, negative for a signal; None when the deadline passed and everything was killed."""
        poll = select.poll()
        poll.register(self.woken, select.POLLIN)
        poll.register(peer, select.POLLRDHUP)
        command.register(poll)
        status: int | None = None
        try:
            while status is None and (remaining := deadline - time.monotonic()) > 0:
                for fd, event in poll.poll(min(remaining, LONGEST_POLL_S) * 1000 + 1):
                    if fd == self.woken:
                        status = self.reap(command.pid)
                    elif fd != peer.fileno():
                        command.serve(fd, poll)
                    elif event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
                        raise EOFError
        finally:
            if status is None:
                self.kill_all()
            self.drain(command, poll)
        return status

    def drain(self, command: Command, poll: "select.poll") -> None:
        """Read what the ended command has written. Pipes that its background processes hold stay open, unread by it."""
        until = time.monotonic() + DRAIN_S
        while command.outputs and (remaining := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(remaining * 1000):
                if fd == self.woken:
                    self.reap()
                elif fd in command.outputs:
                    command.serve(fd, poll)
        for fd in command.outputs:
            self.leftovers.add(fd)
            self.poll.register(fd, select.POLLIN)
        command.close_stdin()

    def forget_output(self, fd: int) -> None:
        """Read and drop what a background process wrote after its command had ended."""
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, CHUNK):
                self.close_leftover(fd)

    def close_leftover(self, fd: int) -> None:
        """Stop reading an output pipe."""
        self.poll.unregister(fd)
        self.leftovers.discard(fd)
        os.close(fd)

    def reap(self, wanted: int = 0) -> int | None:
        """Collect ended children; the exit status of `wanted` if it is among them."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, CHUNK)
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == wanted:
                    found = os.waitstatus_to_exitcode(ended[1])
        return found

    def kill_all(self) -> bool:
        """End every other process; whether none is left."""
        deadline = time.monotonic() + KILL_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return True
            time.sleep(0.0005)
        return False

    def on_write_files(self, header: dict[str, Any], blobs: list[bytearray], *_: object) -> Answer:
        """Create or replace files."""
        with as_user():
            for path, data in zip(header["paths"], blobs, strict=True):
                write_file(path, data)
        return ({},)

    def on_read_files(self, header: dict[str, Any], *_: object) -> Answer:
        """Send all regular files below a directory."""
        with as_user():
            files = read_files(header["root"], header["max_bytes"])
        return {"paths": list(files)}, *files.values()

    def on_reset(self, *_: object) -> Answer:
        """End the lease, all processes and all files, and report what is left, which must be nothing."""
        self.lease = ""
        left = [] if self.kill_all() else ["processes"]
        for fd in tuple(self.leftovers):
            self.close_leftover(fd)
        with as_user():
            for directory in WRITABLE:
                left += wipe(directory)
        for kind in ("shm", "sem", "msg"):
            with open(f"/proc/sysvipc/{kind}") as table:
                left += [f"System V {kind}"] * (len(table.readlines()) - 1)
        gc.collect()
        return ({"left": left[:20], "executed": self.executed},)


def main(lifetime_s: float) -> None:
    """Serve until `lifetime_s` has passed. Process 1 ignores every signal from inside that it has no handler for."""
    if os.getpid() != 1:
        raise SystemExit("the agent ends all processes it can see: it runs as process 1 of a sandbox only")
    end = time.monotonic() + lifetime_s

    def end_at_lifetime(*_: object) -> None:
        if time.monotonic() >= end:  # while a command is being started, the sandbox user may send signals
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, end_at_lifetime)
    signal.setitimer(signal.ITIMER_REAL, lifetime_s, 1.0)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.umask(0o022)
    gc.disable()  # what a request makes is freed by counting; `on_reset` collects the rest
    gc.freeze()
    Agent().serve()


if __name__ == "__main__":
    main(float(sys.argv[1]))
