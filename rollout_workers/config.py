"""Settings of engines and sampling. Cheap to import: no vLLM here."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SamplingConfig(BaseModel):
    """How tokens are drawn. Top-p and top-k stay off: they bias the policy ratio unless their masks are replayed."""

    model_config = _FROZEN

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of training episodes; log-probabilities are those of the distribution drawn from."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Temperature of evaluation episodes; 0 takes the likeliest token."""


class EngineConfig(BaseModel):
    """The `[engine]` table of a job."""

    model_config = _FROZEN

    workers: int = Field(default=1, ge=1)
    """Rollout workers, each with one engine. A second one adds little on two cores."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """GPUs of each worker; 0 runs on the CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Arithmetic of the engine. float32 keeps the parity gap to the trainer near 1e-6."""
    max_model_len: int = Field(default=512, ge=16)
    """Longest sequence in tokens, prompt and all turns together."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences that the engine advances at once. More make longer steps, and a weight update waits for one to end."""
    kv_cache_mb: int = Field(default=64, ge=1)
    """Key-value cache in MiB on the CPU. Without a bound vLLM asks for 92 % of the machine's memory."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Share of a GPU's memory that the engine takes (weights, activations and cache)."""
    max_concurrent_episodes: int = Field(default=256, ge=1)
    """Episodes in progress on one worker; waiting for a sandbox counts."""
    parity_tolerance: float = Field(default=1e-4, gt=0)
    """Largest allowed |log-probability of the engine − of the trainer| on the probe tokens after a publish, in nats."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
