"""The job specification: what a `job.toml` may say. Composes the settings of all packages; imports nothing heavy."""

import tomllib
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from orchestrator.config import DomainEntry, EvaluationConfig, MetricsConfig, PolicyConfig, RlConfig
from orchestrator.errors import SpecError
from reward.validation import explain
from rollout_workers.config import EngineConfig
from sandboxes.config import SandboxConfig
from trainer.config import SftConfig, TrainerConfig


class JobSpec(BaseModel):
    """A whole job. Relative paths are resolved against the folder of the job file by `load_spec`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,39}$")
    """Name of the job; run ids begin with it."""
    seed: int = Field(default=0, ge=0)
    """Seed of the policy's initialisation, task order and sampling."""
    policy: PolicyConfig
    """Which model."""
    domains: tuple[DomainEntry, ...] = Field(min_length=1)
    """What it is trained and evaluated on."""
    sft: SftConfig = SftConfig()
    """Supervised warm start."""
    rl: RlConfig = RlConfig()
    """Reinforcement learning."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimiser and loss."""
    engine: EngineConfig = EngineConfig()
    """Generation."""
    sandboxes: SandboxConfig = SandboxConfig()
    """Isolation."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out measurement."""
    metrics: MetricsConfig = MetricsConfig()
    """Prometheus endpoint."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        trained = [entry for entry in self.domains if entry.weight > 0]
        if not trained:
            raise ValueError("every domain has weight 0, so there is nothing to train on: give one a weight above 0")
        if self.rl.groups_per_batch < len(trained):
            raise ValueError(
                f"rl.groups_per_batch = {self.rl.groups_per_batch} is less than the {len(trained)} trained domains, "
                "each of which needs a group in every batch: raise it"
            )
        return self

    def domain_key(self, index: int) -> str:
        """How error messages name an entry of `domains`."""
        return f"domains[{index}].path"


def load_spec(path: Path) -> JobSpec:
    """Read a job file. Raises `SpecError` with one sentence that names file, key and remedy."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file; give the path of a job.toml") from None
    except IsADirectoryError:
        raise SpecError(f"{path}: is a directory; give the path of the job.toml in it") from None
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{path}: is not valid TOML: {error}") from None
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, path, JobSpec)) from None
    return _resolve(spec, path.resolve().parent, path)


def _resolve(spec: JobSpec, base: Path, source: Path) -> JobSpec:
    """Make paths absolute and see that what they name exists."""
    domains = []
    for index, entry in enumerate(spec.domains):
        folder = (base / entry.path).resolve()
        if not folder.is_dir():
            raise SpecError(f"{source}: {spec.domain_key(index)} = {str(entry.path)!r} is no folder; correct the path")
        domains.append(entry.model_copy(update={"path": folder}))
    policy = spec.policy
    if policy.path is not None:
        folder = (base / policy.path).resolve()
        if not (folder / "config.json").is_file():
            raise SpecError(
                f"{source}: policy.path = {str(policy.path)!r} is no Hugging Face model directory, having no "
                'config.json; correct the path, or use preset = "tiny-moe"'
            )
        policy = policy.model_copy(update={"path": folder})
    return spec.model_copy(update={"domains": tuple(domains), "policy": policy})
