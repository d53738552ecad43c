"""One problem instance: frozen data, no behaviour."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class Task:
    """A task as a row of a domain's `train.jsonl` or `eval.jsonl` declares it.

    Example: `Task(id="add-3-5", domain="math", split="train", prompt="3+5=", data={"answer": "8"}, solution=("8",))`.
    """

    id: str
    """Unique within the domain over both splits."""
    domain: str
    """Name of the domain it belongs to."""
    split: Split
    """`train` tasks are trained on, `eval` tasks are only ever measured."""
    prompt: str
    """First user message."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What environment and verifier need: files, tests, the expected answer. Never shown to the policy."""
    solution: tuple[str, ...] = ()
    """Reference solution: the policy's message of each turn. Scores full marks; also the demonstration for warm
    starts."""
