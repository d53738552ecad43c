"""Runs a program's tests inside a sandbox. Sent there as source and run with `python3 -I -S -c`; imports only the
library.

Reads `{"program", "entry_point", "arguments": [[…], …], "timeout_s"}` from its input. Writes a line a test: a digest of
what the function returned, or `-` when it raised, hung or returned something that is not plain JSON. Expected values
never come here, so nothing that runs in the sandbox can print its way to a pass. First comes `ok`, or `syntax MESSAGE`.

Each test runs the program afresh in a process of its own, under a limit of CPU time, so that none voids the others.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import sys
import time
from types import CodeType
from typing import Any

DIGEST_CHARS = 32
WALL_FACTOR = 4.0
"""All tests together may take this many times the CPU seconds of one, and so may one test on the clock."""


def canonical(value: object) -> str:
    """Text that is equal for values that Python compares equal after a trip through JSON; floats to nine digits."""
    if value is None or isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (bool, int)):
        return str(int(value))
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else format(value, ".9g")
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, dict):
        items = sorted((str(key), canonical(inner)) for key, inner in value.items())
        return "{" + ",".join(json.dumps(key) + ":" + inner for key, inner in items) + "}"
    raise TypeError(type(value).__name__ + " is not plain JSON")


def digest(value: object) -> str:
    """What a test's line holds."""
    return hashlib.sha256(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_CHARS]


def run_test(code: CodeType, entry_point: str, arguments: list, out: int, cpu_s: float) -> None:
    """In the child: run the program, call the function, write the digest. Never returns."""
    os.setsid()
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    try:
        scope: dict[str, Any] = {"__name__": "candidate"}
        exec(code, scope)  # noqa: S102 - that is what a sandbox is for
        os.write(out, digest(scope[entry_point](*arguments)).encode())
    finally:
        os._exit(0)


def observe(code: CodeType, entry_point: str, arguments: list, cpu_s: float, wall_s: float) -> str:
    """Fork one test; returns its digest, or `-`."""
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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return line if len(line) == DIGEST_CHARS and line.isalnum() else "-"


def main() -> None:
    """Serve one request."""
    request = json.load(sys.stdin)
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
    cpu_s = request["timeout_s"]
    end = time.monotonic() + WALL_FACTOR * cpu_s
    for arguments in request["arguments"]:
        left = end - time.monotonic()
        line = observe(code, request["entry_point"], arguments, cpu_s, left) if left > 0 else "-"
        results.write(line + "\n")
        results.flush()


if __name__ == "__main__":
    main()
