"""The loss formulas against closed forms in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from trainer import losses

LOGPROBS = st.lists(st.floats(-8, -0.01), min_size=1, max_size=6)


def double(*values: float) -> Tensor:
    return tensor(values, dtype=torch.float64)


@given(LOGPROBS)
def test_token_logprobs_are_the_log_softmax_of_the_target(logits: list[float]) -> None:
    row = double(*logits)
    for target, logit in enumerate(logits):
        expected = logit - math.log(sum(math.exp(other) for other in logits))
        assert losses.token_logprobs(row[None], tensor([target])).item() == pytest.approx(expected, abs=1e-12)


def test_token_logprobs_widen_half_precision() -> None:
    logits = torch.randn(3, 7, dtype=torch.bfloat16)
    found = losses.token_logprobs(logits, tensor([0, 3, 6]))
    assert found.dtype == torch.float32
    assert torch.equal(found, losses.token_logprobs(logits.float(), tensor([0, 3, 6])))


def test_entropy_of_uniform_and_of_certain() -> None:
    assert losses.entropy(double(2, 2, 2, 2)[None]).item() == pytest.approx(math.log(4))
    assert losses.entropy(double(0, 800)[None]).item() == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.25, 2.0, -2.5),  # inside the upper clip of 1.28
        (1.5, 2.0, -2.56),
        (0.5, 2.0, -1.0),  # the pessimistic minimum does not clip a ratio that makes the loss worse
        (0.5, -2.0, 1.6),
        (1.5, -2.0, 3.0),
    ],
)
def test_clipped_ratio_loss_closed_form(ratio: float, advantage: float, expected: float) -> None:
    found = losses.clipped_ratio_loss(double(math.log(ratio)), double(0), double(advantage), 0.2, 0.28)
    assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 2.0), (0.5, -2.0), (1.2, 2.0), (0.5, 2.0), (1.5, -2.0)])
def test_a_clipped_token_has_no_gradient_and_others_have(ratio: float, advantage: float) -> None:
    logprobs = double(math.log(ratio)).requires_grad_()
    arguments = (logprobs, double(0), double(advantage), 0.2, 0.28)
    losses.clipped_ratio_loss(*arguments).sum().backward()
    assert logprobs.grad is not None
    expected = 0.0 if losses.is_clipped(*arguments).item() else -ratio * advantage
    assert logprobs.grad.item() == pytest.approx(expected)
    assert losses.is_clipped(*arguments).item() == ((ratio, advantage) in {(1.5, 2.0), (0.5, -2.0)})


def test_gradient_of_the_whole_loss_against_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, dtype=torch.float64, generator=generator).requires_grad_()
    targets = tensor([0, 1, 2, 3, 0])
    old = losses.token_logprobs(logits.detach(), targets) + double(0.1, -0.1, 0.5, -0.5, 0.02)
    advantages = double(1, -1, 2, -0.5, 0.3)

    def loss(values: Tensor) -> Tensor:
        logprobs = losses.token_logprobs(values, targets)
        ratio_loss = losses.clipped_ratio_loss(logprobs, old, advantages, 0.2, 0.28)
        return (ratio_loss + 0.1 * losses.kl_k3(logprobs, old) - 0.01 * losses.entropy(values)).sum()

    assert torch.autograd.gradcheck(loss, (logits,))


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    logprobs = double(-1, -2).requires_grad_()
    losses.clipped_ratio_loss(logprobs, logprobs.detach(), double(3, -4), 0.2, 0.28).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-3.0, 4.0]


@given(st.floats(-30, 0), st.floats(-30, 0), st.floats(0.1, 10))
def test_importance_weight_is_the_capped_ratio(old: float, behaviour: float, cap: float) -> None:
    found = losses.importance_weights(double(old).requires_grad_(), double(behaviour), cap)
    assert found.item() == pytest.approx(min(math.exp(old - behaviour), cap), rel=1e-12)
    assert not found.requires_grad


def test_importance_weight_of_an_impossible_token_is_finite() -> None:
    assert losses.importance_weights(double(0), double(-1e9), 2.0).item() == pytest.approx(2.0)


@given(LOGPROBS, st.integers(0, 2**31))
def test_k3_is_never_negative_and_its_mean_is_the_divergence(logits: list[float], seed: int) -> None:
    p = double(*logits).log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(logits), dtype=torch.float64, generator=generator).log_softmax(-1)
    estimate = losses.kl_k3(p, q)
    assert (estimate >= 0).all()
    divergence = (p.exp() * (p - q)).sum().item()
    assert (p.exp() * estimate).sum().item() == pytest.approx(divergence, abs=1e-9)
    assert losses.kl_k3(p, p).abs().max().item() == 0.0


def test_load_balancing_at_its_two_ends() -> None:
    even, one_takes_all = torch.full((3, 4), 0.25), torch.eye(4)[:1].expand(3, 4)
    assert losses.load_balancing(even, even).item() == pytest.approx(1.0)
    assert losses.load_balancing(one_takes_all, one_takes_all).item() == pytest.approx(4.0)


def test_load_balancing_of_one_layer_is_transformers_own() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    probability = logits.softmax(-1)
    counts = torch.zeros(8).scatter_add_(0, probability.topk(2).indices.flatten(), torch.ones(100))
    ours = losses.load_balancing(probability.mean(0)[None], counts[None] / 100)
    theirs = load_balancing_loss_func((logits,), 8, 2)  # its f sums to top-k
    assert ours.item() == pytest.approx(float(theirs) / 2, rel=1e-6)


def test_load_violation() -> None:
    assert losses.load_violation(double(0.25, 0.25, 0.5, 0)[None]).tolist() == [1.0]
    assert losses.load_violation(torch.full((2, 8), 3.0)).tolist() == [0.0, 0.0]


def test_imitation_without_smoothing_is_the_likelihood_and_with_it_the_mean_over_the_vocabulary_too() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    targets = torch.tensor([0, 6, 3, 3, 1])
    plain = losses.imitation_loss(logits, targets, 0.0)
    assert torch.allclose(plain, -losses.token_logprobs(logits, targets))
    smooth = losses.imitation_loss(logits, targets, 0.25)
    assert torch.allclose(smooth, 0.75 * plain - 0.25 * torch.log_softmax(logits, -1).mean(-1))
