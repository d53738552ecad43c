"""The process behind `pool.py`: reads requests, runs verifiers, writes replies. Started as `python -m
reward.verifiers.worker`.

Frames are a length of four bytes, big-endian, and as many bytes of JSON. Requests are `{"load": verifier}` and
`{"verifier", "task", "answer"}`, both with `timeout_s`; replies are `{}`, `{"components": {…}}`, `{"unparsable":
reason}` or `{"error": sentence}`. A verifier is the name of a built-in one or `/folder/FILE.py:FUNCTION`.

The process ends when its parent does: a thread sees the end of the input at once, and where a verifier holds the
interpreter's lock (a runaway regular expression) the kernel's timer ends the process soon after the deadline.
"""

import json
import os
import queue
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from reward.builtin import VERIFIERS
from reward.errors import UnparsableAnswer
from reward.user_code import load_reference

MEMORY_BYTES = 8 << 30
"""Bound on the address space: a number that a policy makes explode fails its own grading, not the machine."""
GRACE_S = 5.0
"""Seconds after a deadline at which the kernel ends a process whose parent did not."""

Verify = Callable[[dict[str, Any], str], Mapping[str, float]]


def main() -> None:
    """Serve until the input ends."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # started by hand: the end of the input must not end the caller's group
    # Verifiers get an empty input and an output that leads nowhere: what they print must not end up between frames.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(MEMORY_BYTES, soft) if soft > 0 else MEMORY_BYTES, hard))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, inbox), daemon=True).start()
    while True:
        request = json.loads(inbox.get())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + GRACE_S)
        reply = _serve(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(len(reply).to_bytes(4, "big") + reply)
        replies.flush()


def _read(requests: BinaryIO, inbox: "queue.SimpleQueue[bytes]") -> None:
    """Frames into the inbox. At the end of the input the whole process group ends, whatever a verifier is doing."""
    while header := requests.read(4):
        inbox.put(requests.read(int.from_bytes(header, "big")))
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _serve(request: dict[str, Any]) -> bytes:
    try:
        if "load" in request:
            _load(request["load"])
            reply: dict[str, Any] = {}
        else:
            components = _load(request["verifier"])(request["task"], request["answer"])
            reply = {"components": {str(name): float(value) for name, value in components.items()}}
    except UnparsableAnswer as error:
        reply = {"unparsable": str(error)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to foreign code: its errors become a reply
        reply = {"error": f"{type(error).__name__}: {error}"[:500]}
    return json.dumps(reply).encode()


def _load(verifier: str) -> Verify:
    if verifier in VERIFIERS:
        return import_module(f"reward.verifiers.{verifier}").verify
    path, _, name = verifier.rpartition(":")
    return load_reference(Path(path).parent, f"{Path(path).name}:{name}")


if __name__ == "__main__":
    sys.exit(main())
