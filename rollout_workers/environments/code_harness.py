"""Runs a program's tests inside a sandbox. Sent there as source, run by `Sandbox.python`; imports only the
library, and of it only what loads at once: json, hashlib and typing would triple the time of a whole episode.

Reads `{"program", "entry_point", "arguments": [[…], …], "timeout_s"}` as a Python literal from its input. Writes a line
a test: a digest of what the function returned, or `-` when it raised, hung or returned something that is not plain
JSON. Expected values never come here, so nothing that runs in the sandbox can print its way to a pass. First comes
`ok`, or `syntax MESSAGE`.

Each test runs the program afresh in a process of its own, under a limit of CPU time, so that none voids the others.
"""

import os
import select
import signal
import sys
import time
from types import CodeType

try:
    from _sha256 import sha256  # type: ignore[import-not-found]  # CPython 3.11's own, without OpenSSL
except ImportError:
    from hashlib import sha256

DIGEST_CHARS = 32
TOTAL_CPU = 4.0
"""CPU seconds of all tests together, in those of one. The clock says little on a machine that is busy."""
TEST_WALL, TOTAL_WALL = 8.0, 16.0
"""Seconds on the clock of one test and of all, in CPU seconds of one: for programs that sleep."""


def canonical(value: object) -> str:
    """Text that is equal for values that Python compares equal after a trip through JSON; floats to nine digits."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "'" + value.encode("utf-8", "surrogatepass").hex()
    if isinstance(value, (bool, int)):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else format(value, ".9g")
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, dict):
        items = sorted((canonical(str(key)), canonical(inner)) for key, inner in value.items())
        return "{" + ",".join(key + ":" + inner for key, inner in items) + "}"
    raise TypeError(type(value).__name__ + " is not plain JSON")


def digest(value: object) -> str:
    """What a test's line holds."""
    return sha256(canonical(value).encode()).hexdigest()[:DIGEST_CHARS]


def run_test(code: CodeType, entry_point: str, arguments: list, out: int, cpu_s: float) -> None:
    """In the child: run the program, call the function, write the digest. Never returns."""
    os.setsid()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    try:
        scope: dict = {"__name__": "candidate"}
        exec(code, scope)  # noqa: S102 - that is what a sandbox is for
        os.write(out, digest(scope[entry_point](*arguments)).encode())
    finally:
        os._exit(0)


def observe(code: CodeType, entry_point: str, arguments: list, cpu_s: float, wall_s: float) -> tuple[str, float]:
    """Fork one test; returns its digest, or `-`, and the CPU seconds it took."""
    incoming, outgoing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(incoming)
        run_test(code, entry_point, arguments, outgoing, cpu_s)
    os.close(outgoing)
    ready, _, _ = select.select([incoming], [], [], wall_s)
    line = os.read(incoming, DIGEST_CHARS).decode("ascii", "replace") if ready else ""
    os.close(incoming)
    for kill in (os.killpg, os.kill):
        try:  # noqa: SIM105 - contextlib takes longer to import than a test to run
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    _, _, usage = os.wait4(child, 0)
    whole = len(line) == DIGEST_CHARS and line.isalnum()
    return line if whole else "-", usage.ru_utime + usage.ru_stime


def main() -> None:
    """Serve one request."""
    request = eval(sys.stdin.read(), {"nan": float("nan"), "inf": float("inf")})  # noqa: S307 - we wrote it
    results = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    try:
        code = compile(request["program"], "candidate.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        results.write("syntax " + " ".join(str(error).split())[:200] + "\n")
        results.flush()
        return
    results.write("ok\n")
    results.flush()  # before the first fork, or each child would hold it too
    timeout_s = request["timeout_s"]
    cpu_left, end = TOTAL_CPU * timeout_s, time.monotonic() + TOTAL_WALL * timeout_s
    for arguments in request["arguments"]:
        wall_left = end - time.monotonic()
        line = "-"
        if cpu_left > 0 and wall_left > 0:
            limits = min(timeout_s, cpu_left), min(TEST_WALL * timeout_s, wall_left)
            line, used = observe(code, request["entry_point"], arguments, *limits)
            cpu_left -= used
        results.write(line + "\n")
        results.flush()


if __name__ == "__main__":
    main()
