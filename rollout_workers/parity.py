"""The parity probe: do engine and trainer compute the same log-probabilities on the same tokens?

A checksum proves that bytes arrived; only this proves that the engine's kernels use them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParityResult:
    """Differences |log π_engine − log π_trainer| over all probe tokens, for example `ParityResult(1.2e-5, 3e-7,
    320)`.
    """

    max_gap: float
    """Largest, in nats; infinite when a value is not finite."""
    mean_gap: float
    """Mean, in nats."""
    tokens: int
    """Tokens compared."""


def compare(engine: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]) -> ParityResult:
    """Compare the answers to the same sequences. Raises ValueError when their lengths differ."""
    gaps = [
        abs(ours - theirs)
        for one, other in zip(engine, trainer, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    ]
    if not gaps:
        raise ValueError("the parity probe has no tokens; give it sequences of at least two")
    if not all(map(math.isfinite, gaps)):
        return ParityResult(math.inf, math.inf, len(gaps))
    return ParityResult(max(gaps), math.fsum(gaps) / len(gaps), len(gaps))
