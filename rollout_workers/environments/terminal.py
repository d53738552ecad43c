"""A real shell in a sandbox, one command a message, graded by the files that are left.

The working directory is kept from one command to the next; everything else of the shell (variables, background jobs)
ends with the command. The message `exit`, or an empty one, ends the episode.
"""

import contextlib
import shlex
from collections.abc import Mapping

from reward.builtin import TerminalData
from reward.task import Task
from rollout_workers.environment import EnvironmentContext, Observation
from rollout_workers.errors import PolicyFailed
from sandboxes.base import WORKDIR, ExecResult, Sandbox
from sandboxes.errors import FilesRefused

END = ("exit", "")
"""Messages that end the episode."""

# Both streams become one, as on a screen. On its way out the shell appends a zero byte and where it is.
_WRAPPER = 'exec 2>&1; trap \'printf "\\0%s" "$PWD"\' EXIT\n'


class Terminal:
    """`environment = "terminal"`. Task data: `TerminalData` in `reward/builtin.py`."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._context = context
        self._data: TerminalData | None = None
        self._sandbox: Sandbox | None = None
        self._directory = WORKDIR
        self._turns = 0

    async def reset(self, task: Task) -> Observation:
        """The task's prompt. The sandbox comes with the first command: sandboxes are fewer than episodes."""
        self._data = TerminalData.model_validate(task.data)
        return Observation(task.prompt)

    async def step(self, action: str) -> Observation:
        """Run one command; its output is the observation."""
        assert self._data is not None, "reset() comes first"
        self._turns += 1
        command = action.strip()
        if command in END:
            return Observation("", done=True)
        if "\0" in command:
            raise PolicyFailed("a command cannot hold a zero byte")
        sandbox = await self._ready(self._data)
        # Changed in the shell, not by `exec`, so that a policy that removed its directory reads so and goes on.
        change = "" if self._directory == WORKDIR else f"cd {shlex.quote(self._directory)}\n"
        result = await sandbox.exec(_WRAPPER + change + command)
        output, found, directory = result.stdout.rpartition(b"\0")
        if not found:  # the shell was replaced or killed
            output = result.stdout
        else:
            with contextlib.suppress(UnicodeDecodeError):
                self._directory = directory.decode()
        return Observation(_shown(output + result.stderr, result, self._data.output_chars))

    async def grade(self) -> Mapping[str, float]:
        """`success`: 1 when every expected file is as expected. `steps`: messages used, at least 1."""
        assert self._data is not None, "reset() comes first"
        files = {path: text.encode() for path, text in self._data.files.items()}
        if self._sandbox is not None:
            try:
                files = await self._sandbox.read_files()
            except FilesRefused as error:
                raise PolicyFailed(f"the files cannot be read: {error}") from error
            await self.close()
        success = all(_matches(files.get(path), text) for path, text in self._data.expect.items())
        values = {"success": float(success), "steps": float(max(1, self._turns))}
        return {name: values[name] for name in self._context.domain.config.components}

    async def close(self) -> None:
        """Give the sandbox back."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._context.sandboxes.release(sandbox)

    async def _ready(self, data: TerminalData) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = await self._context.sandboxes.acquire()
            await self._sandbox.write_files({path: text.encode() for path, text in data.files.items()})
        return self._sandbox


def _matches(content: bytes | None, expected: str | None) -> bool:
    if content is None or expected is None:
        return content is None and expected is None
    return content.rstrip(b"\n") == expected.encode().rstrip(b"\n")


def _shown(output: bytes, result: ExecResult, limit: int) -> str:
    """What the policy reads: head and tail of the output, and how the command ended unless well."""
    text = output.decode("utf-8", "replace")
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n...\n{text[len(text) - half :]}"
    ending = "[timed out]" if result.timed_out else f"[exit {result.exit_code}]" if result.exit_code else ""
    if ending and text and not text.endswith("\n"):
        text += "\n"
    return text + ending
