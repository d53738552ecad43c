"""The schema of a `domain.toml`. `domain.py` loads it together with its tasks."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ComponentConfig(BaseModel):
    """One `[components.NAME]` table: how a raw reward number becomes comparable."""

    model_config = _FROZEN

    range: tuple[float, float | str]
    """Lowest and highest raw value. The highest may name a key of the task's data that holds it (`[0, "tests"]`: its
    number, or its length when it is a list), where it differs between tasks."""
    weight: float = Field(default=1.0, ge=0)
    """Share in the total, relative to the other components."""
    kind: Literal["outcome", "progress", "cost"] = "outcome"
    """`outcome`: decides pass or fail. `progress`: counts, decides nothing. `cost`: less is better, so it is
    inverted."""
    when: str = ""
    """Name of an outcome component that must be full for this one to count (a step cost on success only)."""


class DomainConfig(BaseModel):
    """The keys of a `domain.toml`."""

    model_config = _FROZEN

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """Name in reports, metrics and job files."""
    description: str = ""
    """One sentence for people."""
    environment: str
    """`single_turn`, `terminal`, `code`, or `FILE.py:CLASS` in the domain's folder."""
    verifier: str = ""
    """For `single_turn`: `math`, `tool_call`, or `FILE.py:FUNCTION` in the domain's folder, run in a process of its
    own."""
    system_prompt: str = ""
    """System message before every task's prompt; empty for none."""
    train: str = "train.jsonl"
    """Task file for training, relative to the folder."""
    eval: str = "eval.jsonl"
    """Task file for evaluation, disjoint from `train`, relative to the folder."""
    max_turns: int = Field(default=1, ge=1)
    """Largest number of policy messages in an episode."""
    max_tokens: int = Field(default=64, ge=1)
    """Largest number of tokens of one policy message."""
    verifier_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline of one grading in seconds; passing it makes the episode an `infra_error`."""
    episode_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of a whole episode in seconds; passing it makes the episode an `infra_error`."""
    components: dict[str, ComponentConfig] = Field(min_length=1)
    """Reward components that the environment or verifier returns, by name."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        outcomes = {name for name, c in self.components.items() if c.kind == "outcome"}
        if not outcomes:
            raise ValueError('no component has kind = "outcome", so nothing decides pass or fail: mark at least one')
        if not any(c.weight > 0 for c in self.components.values()):
            raise ValueError("all component weights are 0, which would zero every advantage: give one a weight above 0")
        for name, component in self.components.items():
            low, high = component.range
            if isinstance(high, float) and not low < high:
                raise ValueError(
                    f"components.{name}.range = [{low}, {high}] is empty: the first must be below the second"
                )
            if component.when and component.when not in outcomes:
                raise ValueError(
                    f"components.{name}.when = {component.when!r} names no outcome component ({sorted(outcomes)})"
                )
        if (self.environment == "single_turn") != bool(self.verifier):
            raise ValueError('`verifier` belongs to environment = "single_turn", and is required there')
        return self
