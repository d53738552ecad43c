"""Runs verifiers in processes of their own, each call under a deadline.

A verifier is foreign code fed with text that a policy wrote: it may crash, hang, or eat its memory. So it runs in a
worker (`python -m reward.verifiers.worker`), one call at a time, spoken to with JSON frames over pipes. A worker that
breaks is killed with its children and replaced, and only the call that broke it fails.
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import reward
from reward.domain import Domain
from reward.errors import UnparsableAnswer, VerifierFailed
from reward.task import Task
from reward.user_code import is_reference

LOAD_TIMEOUT_S = 60.0
"""Deadline for importing a verifier, which is not part of a grading's own deadline. Importing sympy alone takes a
second."""
FRAME_HEADER = 4
"""Bytes of a frame's length, big-endian, before its JSON."""
LARGEST_FRAME = 64 << 20
"""Bytes of the longest frame; a longer one is a broken worker."""


class VerifierPool:
    """At most `size` workers, started when first needed. All methods belong to one event loop."""

    def __init__(self, size: int) -> None:
        """`size`: verifications that run at once. Each worker keeps its own cache of parsed answers."""
        if size < 1:
            raise ValueError(f"size = {size} must be at least 1")
        self._slots = asyncio.Semaphore(size)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def grade(self, domain: Domain, task: Task, answer: str) -> dict[str, float]:
        """Raw components of an answer, as the domain's verifier gives them; `scoring.py` judges whether they are sound.

        Raises `UnparsableAnswer` when the verifier says so, and `VerifierFailed` when it raises, crashes, answers with
        anything but an object, or overruns the domain's `verifier_timeout_s`.
        """
        verifier = domain.config.verifier
        assert verifier, "only domains with a verifier are graded here"
        if is_reference(verifier):
            verifier = f"{domain.folder}/{verifier}"
        request = {"task": asdict(task), "answer": answer, "timeout_s": domain.config.verifier_timeout_s}
        async with self._slots:
            if self._closed:
                raise VerifierFailed("the verifier pool is closed")
            # The worker used last is the likeliest to have loaded the verifier.
            worker = self._idle.pop() if self._idle else await _Worker.start()
            self._busy.add(worker)
            whole = False
            try:
                await worker.load(verifier)
                reply = await worker.call({"verifier": verifier, **request}, domain.config.verifier_timeout_s)
                whole = True
            finally:
                self._busy.discard(worker)
                if whole and not self._closed:
                    self._idle.append(worker)
                else:  # broken, or interrupted in the middle of a frame
                    self._end(worker)
        return _components(verifier, reply)

    async def close(self) -> None:
        """End all workers; calls in progress fail. Idempotent."""
        self._closed = True
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        for worker in workers:
            worker.kill()
        await asyncio.gather(*(worker.wait() for worker in workers), *self._ending)

    def _end(self, worker: "_Worker") -> None:
        """Kill a worker, and reap it in the background so that no caller waits."""
        worker.kill()
        task = asyncio.create_task(worker.wait())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Worker:
    """One process and the frames to and from it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._loaded: set[str] = set()

    @classmethod
    async def start(cls) -> "_Worker":
        """A new process in a session of its own, so that Ctrl+C spares it and its children die with it."""
        root = str(Path(reward.__file__).parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "reward.verifiers.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        )

    async def load(self, verifier: str) -> None:
        """Import a verifier unless this worker has it. Raises `VerifierFailed`."""
        if verifier not in self._loaded:
            reply = await self.call({"load": verifier, "timeout_s": LOAD_TIMEOUT_S}, LOAD_TIMEOUT_S)
            if "error" in reply:
                raise VerifierFailed(f"verifier {_short(verifier)} cannot be loaded: {reply['error']}")
            self._loaded.add(verifier)

    async def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One frame out, one frame in. After any exception the worker is unusable."""
        name = _short(request.get("verifier") or request["load"])
        body = json.dumps(request).encode()
        assert self._process.stdin is not None and self._process.stdout is not None, "started with pipes"
        try:
            async with asyncio.timeout(timeout_s):
                self._process.stdin.write(len(body).to_bytes(FRAME_HEADER, "big") + body)
                await self._process.stdin.drain()
                length = int.from_bytes(await self._process.stdout.readexactly(FRAME_HEADER), "big")
                if length > LARGEST_FRAME:
                    raise VerifierFailed(f"verifier {name} broke its protocol with a frame of {length} bytes")
                reply = json.loads(await self._process.stdout.readexactly(length))
        except TimeoutError:
            raise VerifierFailed(f"verifier {name} did not answer within {timeout_s:g} s and was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise VerifierFailed(f"verifier {name} died ({await self._exit()})") from None
        except ValueError as error:
            raise VerifierFailed(f"verifier {name} answered with something that is no JSON ({error})") from None
        return reply

    def kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Until the process is gone and its pipes are closed."""
        await self._process.wait()

    async def _exit(self) -> str:
        self.kill()
        code = await self._process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _components(verifier: str, reply: dict[str, Any]) -> dict[str, float]:
    if "error" in reply:
        raise VerifierFailed(f"verifier {_short(verifier)} raised {reply['error']}")
    if "unparsable" in reply:
        raise UnparsableAnswer(reply["unparsable"])
    components = reply.get("components")
    if not isinstance(components, dict):
        raise VerifierFailed(f"verifier {_short(verifier)} returned {components!r}, not a dict of numbers")
    return components


def _short(verifier: str) -> str:
    return repr(verifier.rsplit("/", 1)[-1])
