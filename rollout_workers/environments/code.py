"""Function completion, graded by unit tests that a sandbox runs. One exec an episode.

The sandbox gets the program and the tests' arguments and answers with digests of what came back; they are compared with
the expected values here (`code_harness.py` says how).
"""

import re
from collections.abc import Mapping
from pathlib import Path

from reward.builtin import CodeData
from reward.errors import VerifierFailed
from reward.task import Task
from rollout_workers.environment import EnvironmentContext, Observation
from rollout_workers.environments import code_harness
from rollout_workers.environments.code_harness import TOTAL_WALL, digest
from rollout_workers.errors import PolicyFailed

STARTUP_S = 5.0
"""Seconds for the harness to start on a busy machine, on top of the tests' own."""

_HARNESS = Path(code_harness.__file__).read_text(encoding="utf-8")
_FENCED = re.compile(r"```[a-zA-Z0-9]*\n(.*?)```", re.DOTALL)


class Code:
    """`environment = "code"`. Task data: `CodeData` in `reward/builtin.py`."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._context = context
        self._task: Task | None = None
        self._data: CodeData | None = None
        self._passed = 0

    async def reset(self, task: Task) -> Observation:
        """The task's prompt."""
        self._task, self._data = task, CodeData.model_validate(task.data)
        return Observation(task.prompt)

    async def step(self, action: str) -> Observation:
        """Run the tests. Raises `PolicyFailed` when the program does not compile."""
        assert self._data is not None and self._task is not None, "reset() comes first"
        fenced = _FENCED.search(action)
        program = fenced.group(1) if fenced else action
        if self._data.include_prompt:
            program = self._task.prompt + program
        verdict, *lines = await self._run(program, self._data)
        if verdict != "ok":
            raise PolicyFailed(f"the program does not compile: {verdict.removeprefix('syntax ')}")
        self._passed = sum(line == digest(value) for line, (_, value) in zip(lines, self._data.tests, strict=False))
        return Observation("", done=True)

    async def grade(self) -> Mapping[str, float]:
        """`tests_passed`: how many; 0 when no program was finished."""
        return {"tests_passed": float(self._passed)}

    async def close(self) -> None:
        """Nothing is held between calls."""

    async def _run(self, program: str, data: CodeData) -> list[str]:
        """Lines of the harness. Raises `VerifierFailed` when the first one, which is its own, is missing."""
        request = {
            "program": program,
            "entry_point": data.entry_point,
            "arguments": [arguments for arguments, _ in data.tests],
            "timeout_s": data.timeout_s,
        }
        sandboxes = self._context.sandboxes
        sandbox = await sandboxes.acquire()
        try:
            result = await sandbox.python(
                _HARNESS,
                stdin=ascii(request).encode(),
                timeout_s=TOTAL_WALL * data.timeout_s + STARTUP_S,
            )
        finally:
            await sandboxes.release(sandbox)
        lines = result.stdout.decode("utf-8", "replace").splitlines()
        if result.truncated:
            raise VerifierFailed("the tests' results were cut: raise sandboxes.output_bytes")
        if not lines:
            raise VerifierFailed(f"the tests did not start: {result.stderr.decode('utf-8', 'replace')[:200]}")
        return lines
