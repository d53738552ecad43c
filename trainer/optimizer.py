"""AdamW with a schedule, a clipped global gradient norm, and a refusal of numbers that are not finite."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import TrainingDiverged

Schedule = Callable[[int], float]
"""Steps taken so far to the learning rate of the next."""


def warmup_then_cosine(peak: float, warmup: int, steps: int = 0, final: float = 0.1) -> Schedule:
    """Linear from peak/warmup to `peak` over `warmup` steps, then a cosine down to `final`·peak at the last of `steps`.

    Stays there afterwards. `steps = 0` keeps the peak.
    """

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        if not steps:
            return peak
        progress = min(1.0, (step - warmup) / max(steps - 1 - warmup, 1))
        return peak * (final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))

    return rate


class Optimizer:
    """AdamW (arXiv 1711.05101). Matrices decay, vectors do not."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], betas=betas, fused=True)
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._banked: list[Tensor | None] = [None] * len(self._parameters)
        self.steps = 0
        """Steps taken."""

    def bank(self) -> float:
        """Set the accumulated gradients aside for the coming step, and return their norm: one tag's contribution."""
        norm = float(torch.nn.utils.get_total_norm(self._gradients()))
        self._bank()
        return norm

    def step(self, loss: float) -> tuple[float, float]:
        """Apply and drop all gradients, banked ones too; returns their norm before clipping and the learning rate.

        Raises TrainingDiverged, with nothing applied, when `loss` or the norm is not finite.
        """
        self._bank()
        for parameter, banked in zip(self._parameters, self._banked, strict=True):
            parameter.grad = banked
        norm = torch.nn.utils.get_total_norm(self._gradients())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._clear()
            raise TrainingDiverged(
                f"Optimiser step {self.steps} has loss {loss} and gradient norm {float(norm)}; nothing was applied. "
                "Resume from the last checkpoint with a lower learning rate."
            )
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        rate = self._schedule(self.steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._clear()
        self.steps += 1
        return float(norm), rate

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count."""
        return {"adamw": self._adamw.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._adamw.load_state_dict(dict(state["adamw"]))
        self.steps = int(state["steps"])

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _bank(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                banked = self._banked[index]
                self._banked[index] = parameter.grad if banked is None else banked.add_(parameter.grad)
                parameter.grad = None

    def _clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)
        self._banked = [None] * len(self._parameters)
