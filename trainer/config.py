"""Settings of training. Cheap to import: no torch here."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LossConfig(BaseModel):
    """The `[trainer.loss]` table. Formulas and sources: `trainer/losses.py`."""

    model_config = _FROZEN

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip of the policy ratio π/π_old is 1 − this."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper clip is 1 + this; above `clip_low` it leaves room for unlikely tokens to grow (DAPO)."""
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncation C of the importance weight min(π_old/μ, C) between trainer and engine."""
    kl: float = Field(default=0.0, ge=0)
    """Coefficient of the k3 estimate of KL(π‖π_ref) to the policy before reinforcement learning; 0 keeps no
    reference.
    """
    router_aux: float = Field(default=1e-3, ge=0)
    """Coefficient of the MoE load-balancing loss."""


class TrainerConfig(BaseModel):
    """The `[trainer]` table of a job."""

    model_config = _FROZEN

    learning_rate: float = Field(default=5e-4, gt=0)
    """Peak learning rate of AdamW in reinforcement learning."""
    warmup_updates: int = Field(default=5, ge=0)
    """Updates of linear warm-up."""
    decay_updates: int = Field(default=0, ge=0)
    """Update at which the rate has fallen to a tenth of its peak along a cosine; 0 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decays."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay of matrices; vectors have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps a batch. Above 1 the policy ratio leaves 1 and the clip begins to act."""
    micro_tokens: int = Field(default=8192, ge=64)
    """Padded tokens of one forward and backward pass: bounds memory, changes no result."""
    gradient_shares: bool = True
    """Measure each tag's share of the gradient norm; costs one more copy of the gradients in memory."""
    threads: int = Field(default=1, ge=1)
    """Intra-op threads of the trainer on a CPU. One leaves the other core to the engine."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of the trainer; 0 trains on the CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of forward and backward passes; weights and optimiser stay in float32."""
    loss: LossConfig = LossConfig()
    """Which loss."""


class SftConfig(BaseModel):
    """The `[sft]` table: the supervised warm start on the domains' reference solutions."""

    model_config = _FROZEN

    steps: int = Field(default=0, ge=0)
    """Optimiser steps; 0 skips the stage."""
    batch_size: int = Field(default=64, ge=1)
    """Demonstrations a step, drawn with equal share per domain."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate, after a warm-up of a tenth of the steps."""
    final_rate: float = Field(default=0.1, ge=0, le=1)
    """Part of the peak that the rate has fallen to at the last step, along a cosine."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Part of each token's target that is spread over the whole vocabulary. It keeps the warm start from being sure of
    itself, so that reinforcement learning has something left to explore.
    """
    threads: int = Field(default=2, ge=1)
    """Intra-op threads on a CPU: no engine generates during this stage."""
