"""Settings that belong to the loop itself. The other packages' settings are composed with them in `spec.py`."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class PolicyConfig(BaseModel):
    """The `[policy]` table: either a preset that is made for the run, or a directory."""

    model_config = _FROZEN

    preset: str = ""
    """Name of a preset that `crosstrain models init` knows, for example `tiny-moe`."""
    path: Path | None = None
    """Hugging Face causal-LM directory, relative to the job file."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.preset) == (self.path is not None):
            raise ValueError("give either `preset` or `path`")
        return self


class DomainEntry(BaseModel):
    """One `[[domains]]` table."""

    model_config = _FROZEN

    path: Path
    """Folder with a `domain.toml`, relative to the job file."""
    weight: float = Field(default=1.0, ge=0)
    """Share in the loss, of warm start and reinforcement learning, relative to other domains; 0 only evaluates it."""


class RlConfig(BaseModel):
    """The `[rl]` table: batches and the bound between generation and training."""

    model_config = _FROZEN

    updates: int = Field(default=100, ge=0)
    """Optimiser batches; 0 stops after the warm start and its evaluation."""
    groups_per_batch: int = Field(default=16, ge=1)
    """Groups in a batch over all domains; the quotas share them out by token budget."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of one task in a group; its mean is the baseline of each."""
    max_staleness: int = Field(default=1, ge=0)
    """No trained token is older than this many policy versions. 0 generates and trains in turn."""
    even_share: float = Field(default=0.5, ge=0, le=1)
    """Part of a batch's groups that is dealt out equally between domains; the rest follows equal token budgets."""
    length_memory: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running mean of episode lengths that token budgets are shared by."""
    deviation_memory: int = Field(default=64, ge=1)
    """Groups with signal whose deviation normalises a domain's advantages. Short enough to forget an old scale."""
    episode_retries: int = Field(default=1, ge=0)
    """Times an episode is tried again after an infrastructure error before it is dropped."""
    stall_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait in seconds for any part of the loop; then the run fails and names the part."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Updates between checkpoints. One is always written at the end and on Ctrl+C."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class EvaluationConfig(BaseModel):
    """The `[evaluation]` table."""

    model_config = _FROZEN

    max_tasks: int = Field(default=100, ge=2)
    """Held-out tasks of each domain that are measured, the first ones of its file."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each task; more than one is of use above temperature 0."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """Level of the intervals in the report."""


class MetricsConfig(BaseModel):
    """The `[metrics]` table: the Prometheus endpoint of the run."""

    model_config = _FROZEN

    host: str = "127.0.0.1"
    """Address that `/metrics` listens on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of `/metrics`; 0 takes a free one and prints it."""
