"""Python programs without the start of an interpreter: a fork of the agent that has become the sandbox user.

Starting `python3` takes several times longer than a small grader runs. The child keeps nothing of the agent's but its
loaded modules: neither a descriptor, nor a right, nor a handler of signals. Unlike `python3 -c` it ends without running
exit functions and without waiting for threads.
"""

import functools
import gc
import os
import signal
import sys
from collections.abc import Mapping
from types import CodeType

from .files import USER

NO_PROGRAM = (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError)
"""What `compile` raises for a source that is no program."""


@functools.lru_cache(maxsize=4)
def compiled(source: str) -> CodeType:
    """The program; the same few graders come again and again. Raises `ValueError` for a source that is none."""
    try:
        return compile(source, "<host>", "exec", dont_inherit=True)
    except NO_PROGRAM as error:
        raise ValueError(f"not a Python program: {error}") from None


def fork(program: CodeType, environment: Mapping[bytes, bytes], cwd: bytes, streams: tuple[int, int, int]) -> int:
    """Run a program in a child with the three standard streams; the child's process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        _become_user(environment, cwd, streams)
        status = _run(program)
    finally:
        os._exit(status)


def _become_user(environment: Mapping[bytes, bytes], cwd: bytes, streams: tuple[int, int, int]) -> None:
    signal.set_wakeup_fd(-1)  # it is the agent's
    for number in (signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    with open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(b"1000")
    os.setresuid(USER, USER, USER)  # from root: with it go the capabilities
    os.chdir(cwd)
    os.environb.clear()
    os.environb.update(environment)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    gc.enable()


def _run(program: CodeType) -> int:
    status = 0
    try:
        exec(program, {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102 - as `python3 -c` does
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its end
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status & 0xFF
