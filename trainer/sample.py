"""What the trainer eats. Credit and weights are decided before it gets here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence with everything the loss needs, per token. All tuples have the same length T.

    Example: `Sample((5, 6, 7, 2), (0, 0, 1, 1), (0.0, 0.0, -0.2, -0.1), (0.0, 0.0, 1.3, 1.3), (0.0, 0.0, 0.01, 0.01),
    "math")`.
    """

    token_ids: tuple[int, ...]
    """Ids as the engine read and wrote them."""
    loss_mask: tuple[int, ...]
    """1 for tokens that are trained on."""
    logprobs: tuple[float, ...]
    """Log-probabilities in nats under the behaviour policy μ (the engine); read where the mask is 1."""
    advantages: tuple[float, ...]
    """Advantage of each token; read where the mask is 1."""
    weights: tuple[float, ...]
    """Weight of each token's loss.

    The batch's loss is the plain sum Σ weight·loss, so all averaging is done in here.
    """
    tag: str = ""
    """A label that metrics are grouped by (the domain's name). The loss never reads it."""
