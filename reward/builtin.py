"""What the built-in environments and verifiers read from `Task.data` and which reward components they return.

One place, so that `load_domain` can check a task file line by line and a reader finds each format. Unknown keys in a
task's data are allowed: importers keep the identifiers of their sources there.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class TaskData(BaseModel):
    """What every task's data may hold."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    labels: dict[str, str] = Field(default_factory=dict)
    """Free labels that travel to the score for reports, for example `{"kind": "look-first"}`."""


class MathData(TaskData):
    """Of `verifier = "math"`."""

    answer: str = Field(min_length=1)
    """Expected answer: a number, an expression or LaTeX."""


class ToolConfig(BaseModel):
    """A tool as the policy is told of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    name: str
    """Name in the call."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """JSON schema of the arguments object."""


class ToolCall(BaseModel):
    """An expected call."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name of the tool."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Expected arguments."""


class ToolCallData(TaskData):
    """Of `verifier = "tool_call"`."""

    tools: list[ToolConfig] = Field(min_length=1)
    """Tools that exist for this task."""
    call: ToolCall
    """The right call."""


def _inside(path: str) -> str:
    parts = PurePosixPath(path)
    if not path or parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{path!r} must be a relative path inside the sandbox's working directory")
    return path


InnerPath = Annotated[str, AfterValidator(_inside)]


class TerminalData(TaskData):
    """Of `environment = "terminal"`."""

    files: dict[InnerPath, str] = Field(default_factory=dict)
    """Text of each file below `/work` at the start."""
    expect: dict[InnerPath, str | None] = Field(min_length=1)
    """Text of each file that is looked at in the end, null for one that must be gone. Final newlines are not
    compared."""
    output_chars: int = Field(default=256, ge=16)
    """Longest output shown to the policy after a command, in characters: its head and its tail."""


class CodeData(TaskData):
    """Of `environment = "code"`."""

    entry_point: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Function that the tests call."""
    tests: list[tuple[list[Any], Any]] = Field(min_length=1, max_length=256)
    """Pairs of positional arguments and the value to be returned, all plain JSON. Tuples count as lists."""
    include_prompt: bool = False
    """Whether the policy continues the prompt, so that the program is the prompt followed by its message."""
    timeout_s: float = Field(default=0.5, gt=0, le=60)
    """CPU seconds of one test; all together may take four times as much."""


@dataclass(frozen=True, slots=True)
class Builtin:
    """One built-in environment or verifier, for example `Builtin(MathData, frozenset({"success"}))`."""

    data: type[TaskData]
    """Model of its tasks' data."""
    components: frozenset[str]
    """Reward components it can return; a domain declares those it wants."""


ENVIRONMENTS = {
    "terminal": Builtin(TerminalData, frozenset({"success", "steps"})),
    "code": Builtin(CodeData, frozenset({"tests_passed"})),
}
"""By `environment` of a `domain.toml`. `single_turn` is not here: its verifier decides."""

VERIFIERS = {
    "math": Builtin(MathData, frozenset({"success"})),
    "tool_call": Builtin(ToolCallData, frozenset({"points"})),
}
"""By `verifier` of a `domain.toml`."""
