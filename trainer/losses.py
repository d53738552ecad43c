"""The formulas of the loss: pure functions of log-probabilities.

Shape suffixes: N trained tokens of a micro-batch, V vocabulary, L layers with experts, E experts. Policies: π the one
being trained, π_old the same before the batch's first optimiser step, μ the engine's, which drew the tokens, π_ref the
one before reinforcement learning. All log-probabilities are in nats. Nothing here averages: a Sample's weights do.
"""

import math

import torch
from torch import Tensor


def token_logprobs(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """log π(target | prefix), shape N, in float32 or wider."""
    return -torch.nn.functional.cross_entropy(_wide(logits_NV), targets_N, reduction="none")


def imitation_loss(logits_NV: Tensor, targets_N: Tensor, smoothing: float) -> Tensor:
    """(1 − s)·−log π(target) + s·mean_v −log π_v, shape N: label smoothing (arXiv 1512.00567, sec. 7)."""
    return torch.nn.functional.cross_entropy(_wide(logits_NV), targets_N, reduction="none", label_smoothing=smoothing)


def entropy(logits_NV: Tensor) -> Tensor:
    """Exact entropy of each token's distribution, −Σ_v π_v log π_v, shape N, in nats."""
    logprobs_NV = torch.log_softmax(_wide(logits_NV), dim=-1)
    return -(logprobs_NV.exp() * logprobs_NV).sum(-1)


def clipped_ratio_loss(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """−min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A) with ρ = π/π_old, shape N.

    PPO (Schulman et al., arXiv 1707.06347, eq. 7) with the two clips apart as in DAPO (arXiv 2503.14476, eq. 10), whose
    higher upper clip lets unlikely tokens grow. The dual clip for A < 0 is left out: the truncated importance weight
    and the bound on staleness already limit what one token can do.
    """
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)


def is_clipped(
    logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Where the clip holds, so that the token has no gradient; booleans of shape N."""
    ratio_N = (logprobs_N - old_logprobs_N).exp()
    too_high_N = (ratio_N > 1.0 + clip_high) & (advantages_N > 0)
    too_low_N = (ratio_N < 1.0 - clip_low) & (advantages_N < 0)
    return too_high_N | too_low_N


def importance_weights(old_logprobs_N: Tensor, behaviour_logprobs_N: Tensor, cap: float) -> Tensor:
    """min(π_old/μ, cap) without gradient, shape N.

    Truncated importance sampling (Ionides 2008); for engines that differ from the trainer: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy training".
    """
    log_ratio_N = (old_logprobs_N - behaviour_logprobs_N).detach()
    return log_ratio_N.clamp(max=math.log(cap)).exp()


def kl_k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Estimate of KL(p‖q) from tokens drawn from p: q/p − 1 − log(q/p), shape N, never negative.

    Schulman's k3 (joschu.net/blog/kl-approx.html), as in GRPO (arXiv 2402.03300, eq. 4). `logprobs_N` is log p. With
    p = μ and q = π_old it measures the mismatch of trainer and engine.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N


def load_balancing(probability_LE: Tensor, load_LE: Tensor) -> Tensor:
    """Mean over layers of E·Σ_e f_e·P_e: 1 when routing is even, E when one expert takes all; a scalar.

    Switch Transformer (arXiv 2101.03961, eq. 4), with f the load (fractions that sum to 1, no gradient) and P the mean
    router probability; L layers, E experts. Linear in P, so for a given f it may be summed over micro-batches.
    """
    layers, experts = probability_LE.shape
    return experts / layers * (probability_LE * load_LE.detach()).sum()


def load_violation(load_LE: Tensor) -> Tensor:
    """max_e f_e / mean_e f_e − 1 of each layer, shape L: 0 when routing is even (arXiv 2408.15664, eq. 4)."""
    return load_LE.amax(-1) / load_LE.mean(-1) - 1.0


def _wide(logits_NV: Tensor) -> Tensor:
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
