"""The loss is a plain weighted sum: nothing but the samples' own numbers moves the weights."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_kit import make_batch, make_policy, make_sample
from transformers import AutoModelForCausalLM

from trainer.config import TrainerConfig
from trainer.errors import TrainingDiverged
from trainer.sample import Sample
from trainer.step import StepMetrics, Trainer

UNCLIPPED = 1e9
FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policies") / "small")


@pytest.fixture
def trainer(policy: Path) -> Callable[..., Trainer]:
    def make(loss: dict[str, Any] | None = None, **settings: Any) -> Trainer:
        config = TrainerConfig.model_validate({"max_grad_norm": UNCLIPPED, "loss": loss or {}, **settings})
        return Trainer(policy, config, seed=7)

    return make


def gradient(trainer: Trainer) -> Tensor:
    """The last step's gradient, recovered from AdamW's first moment after a first, unclipped step."""
    assert trainer.optimizer.steps == 1
    moments = trainer.optimizer.state_dict()["adamw"]["state"]
    return torch.cat([moments[index]["exp_avg"].flatten() for index in sorted(moments)]) / (1 - 0.9)


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def learn(trainer: Trainer, samples: list[Sample]) -> tuple[StepMetrics, Tensor]:
    metrics = trainer.train_step(samples)
    return metrics, gradient(trainer)


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) <= 1e-5 * max(float(a.norm()), float(b.norm()), 1e-12)


def test_loss_and_gradient_against_an_independent_computation(trainer: Callable[..., Trainer], policy: Path) -> None:
    samples = make_batch(0)
    metrics, found = learn(trainer(), samples)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    loss = torch.zeros(())
    for sample in samples:
        logprobs = model(input_ids=torch.tensor([sample.token_ids])).logits[0].log_softmax(-1)
        for place in (place for place, flag in enumerate(sample.loss_mask) if flag):
            logprob = logprobs[place - 1, sample.token_ids[place]]
            importance = min(float((logprob.detach() - sample.logprobs[place]).exp()), 2.0)
            ratio = (logprob - logprob.detach()).exp()
            loss = loss - sample.weights[place] * importance * ratio * sample.advantages[place]
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(
        float(torch.cat([g.flatten() for g in expected.values() if g is not None]).norm()), rel=1e-5
    )
    assert float(found.norm()) == pytest.approx(metrics.grad_norm, rel=1e-5)


@FEW
@given(st.integers(0, 100), st.sampled_from([64, 100, 333, 8192]))
def test_micro_batching_changes_nothing(trainer: Callable[..., Trainer], seed: int, micro_tokens: int) -> None:
    samples = make_batch(seed)
    one, one_gradient = learn(trainer(), samples)
    many, many_gradient = learn(trainer(micro_tokens=micro_tokens), samples)
    assert many.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-7)
    assert close(one_gradient, many_gradient)


def test_micro_batching_leaves_the_router_term_alone(trainer: Callable[..., Trainer]) -> None:
    runs = [trainer(loss={"router_aux": 1.0}, micro_tokens=size) for size in (64, 8192)]
    for seed in range(2):  # the term begins with the second step
        metrics = [run.train_step(make_batch(seed)) for run in runs]
    assert metrics[0].loss == pytest.approx(metrics[1].loss, rel=1e-4)
    assert metrics[0].grad_norm == pytest.approx(metrics[1].grad_norm, rel=1e-4)


def test_router_term_is_the_coefficient_times_the_balancing_loss(trainer: Callable[..., Trainer]) -> None:
    with_term, without = trainer(loss={"router_aux": 0.5}), trainer(loss={"router_aux": 0.0})
    same = make_batch(3)
    difference = [with_term.train_step(batch).loss - without.train_step(batch).loss for batch in (same, same)]
    assert difference[0] == 0.0
    assert 0.5 * 0.9 < difference[1] < 0.5 * 1.6  # 1 when even, 4 when one of four experts takes all


@FEW
@given(st.integers(0, 100), st.randoms(), st.integers(1, 3))
def test_order_of_samples_changes_no_bit(
    trainer: Callable[..., Trainer], seed: int, shuffle: random.Random, minibatches: int
) -> None:
    samples = make_batch(seed)
    runs = [trainer(minibatches=minibatches) for _ in range(2)]
    runs[0].train_step(samples)
    runs[1].train_step(shuffle.sample(samples, len(samples)))
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_tags_change_no_gradient(trainer: Callable[..., Trainer]) -> None:
    samples = make_batch(1)
    _, tagged = learn(trainer(), samples)
    _, untagged = learn(trainer(), [replace(sample, tag="") for sample in samples])
    _, unmeasured = learn(trainer(gradient_shares=False), samples)
    assert close(tagged, untagged)
    assert close(tagged, unmeasured)


@FEW
@given(st.integers(0, 100), st.floats(0.01, 100))
def test_weights_scale_loss_and_gradient(trainer: Callable[..., Trainer], seed: int, factor: float) -> None:
    samples = make_batch(seed)
    scaled = [replace(s, weights=tuple(factor * weight for weight in s.weights)) for s in samples]
    one, one_gradient = learn(trainer(), samples)
    other, other_gradient = learn(trainer(), scaled)
    assert other.loss == pytest.approx(factor * one.loss, rel=1e-4)
    assert close(factor * one_gradient, other_gradient)


def test_environment_tokens_have_exactly_no_part(trainer: Callable[..., Trainer]) -> None:
    samples = make_batch(2)

    def disturbed(sample: Sample) -> Sample:
        def noise(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(v if flag else 1e6 for v, flag in zip(values, sample.loss_mask, strict=True))

        return replace(
            sample,
            logprobs=noise(sample.logprobs),
            advantages=noise(sample.advantages),
            weights=noise(sample.weights),
        )

    runs = [trainer(), trainer()]
    runs[0].train_step(samples)
    runs[1].train_step([disturbed(sample) for sample in samples])
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_a_zero_advantage_tag_has_no_share(trainer: Callable[..., Trainer]) -> None:
    samples = [*make_batch(4, ("code", "math")), make_sample(9, "idle", advantage=0.0)]
    metrics = trainer().train_step(samples)
    assert metrics.gradient_share["idle"] == 0.0
    assert sum(metrics.gradient_share.values()) == pytest.approx(1.0)
    assert set(metrics.tags) == {"code", "math", "idle"}


def test_gradient_share_is_the_norm_of_the_tags_own_gradient(trainer: Callable[..., Trainer]) -> None:
    samples = make_batch(5, ("code", "math"))
    together = trainer().train_step(samples)
    alone = {tag: trainer().train_step([s for s in samples if s.tag == tag]).grad_norm for tag in ("code", "math")}
    assert together.gradient_share["code"] == pytest.approx(alone["code"] / sum(alone.values()), rel=1e-5)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [make_sample(1, advantage=0.0)],
        [replace(make_sample(1), weights=(0.0,) * len(make_sample(1).weights))],
        [replace(make_sample(1), loss_mask=(0,) * len(make_sample(1).loss_mask))],
    ],
    ids=["empty", "no advantage", "no weight", "nothing trained"],
)
def test_a_batch_without_signal_changes_no_weight(trainer: Callable[..., Trainer], samples: list[Sample]) -> None:
    run = trainer(loss={"router_aux": 1.0})
    run.train_step(make_batch(0))
    before = weights(run)
    metrics = run.train_step(samples)
    assert torch.equal(before, weights(run))
    assert (metrics.optimizer_steps, run.optimizer.steps, run.version) == (0, 1, 2)


def test_refused_numbers_change_nothing(trainer: Callable[..., Trainer]) -> None:
    run = trainer()
    before = weights(run)
    sample = make_sample(1)
    with pytest.raises(ValueError, match="not finite"):
        run.train_step([replace(sample, advantages=(float("nan"),) * len(sample.advantages))])
    with pytest.raises(TrainingDiverged, match="nothing was applied"):
        run.train_step(
            [replace(sample, advantages=(3e38,) * len(sample.advantages), weights=(3e38,) * len(sample.weights))]
        )
    assert torch.equal(before, weights(run))
    assert (run.version, run.optimizer.steps) == (0, 0)
    assert run.train_step([sample]).optimizer_steps == 1


def test_kl_to_the_reference_is_zero_at_first_and_pulls_back_later(trainer: Callable[..., Trainer]) -> None:
    samples = make_batch(6)
    still = [replace(sample, advantages=(0.0,) * len(sample.advantages)) for sample in samples]
    assert trainer(loss={"kl": 10.0}).train_step(still).loss == 0.0
    run = trainer(loss={"kl": 10.0, "router_aux": 0.0}, learning_rate=1e-3, warmup_updates=0)
    for _ in range(5):
        run.train_step(samples)
    apart = run.train_step(still).loss
    for _ in range(20):
        last = run.train_step(still).loss
    assert 0 < last < apart


def test_several_minibatches_step_several_times_and_clip(trainer: Callable[..., Trainer]) -> None:
    samples = [s for seed in range(3) for s in make_batch(seed)]
    run = trainer(minibatches=4, learning_rate=3e-2, warmup_updates=0)
    metrics = run.train_step(samples)
    assert (metrics.optimizer_steps, run.optimizer.steps, run.version) == (4, 4, 1)
    assert max(tag.clip_fraction for tag in metrics.tags.values()) > 0
    once = trainer(learning_rate=3e-2, warmup_updates=0).train_step(samples)
    assert all(tag.clip_fraction == 0 for tag in once.tags.values())
    assert {name: tag.tokens for name, tag in metrics.tags.items()} == {n: t.tokens for n, t in once.tags.items()}


def test_metrics_of_an_engine_that_agrees(trainer: Callable[..., Trainer]) -> None:
    run = trainer()
    samples = [replace(sample, logprobs=(0.0, *run.token_logprobs(sample.token_ids))) for sample in make_batch(7)]
    metrics = run.train_step(samples)
    for name, tag in metrics.tags.items():
        trained = [a for s in samples if s.tag == name for a, f in zip(s.advantages, s.loss_mask, strict=True) if f]
        assert tag.tokens == len(trained)
        assert tag.advantage == pytest.approx(sum(trained) / len(trained), abs=1e-5)
        assert tag.importance_weight == pytest.approx(1.0, abs=1e-4)
        assert tag.mismatch_kl == pytest.approx(0.0, abs=1e-6)
        assert tag.capped_fraction == 0.0
        assert 0 < tag.entropy < 5.57  # ln 262
        for layer in metrics.expert_load[name]:
            assert sum(layer) == pytest.approx(1.0, abs=1e-5)
    assert len(metrics.load_violation) == 2


def test_an_engine_that_disagrees_is_seen_and_capped(trainer: Callable[..., Trainer]) -> None:
    samples = [replace(sample, logprobs=(-12.0,) * len(sample.logprobs)) for sample in make_batch(8)]
    tags = trainer(loss={"importance_cap": 3.0}).train_step(samples).tags.values()
    assert all(tag.capped_fraction == 1.0 and tag.importance_weight == pytest.approx(3.0, rel=1e-6) for tag in tags)
    assert all(tag.mismatch_kl > 1 for tag in tags)


def test_padding_is_not_counted_as_expert_load(trainer: Callable[..., Trainer]) -> None:
    short, long = make_sample(1, "short", length=5), make_sample(2, "long", length=30)
    together = trainer().train_step([replace(short, tag="a"), replace(long, tag="a")]).expert_load["a"]
    apart = trainer().train_step([short, long]).expert_load
    mixed = (5 * torch.tensor(apart["short"]) + 30 * torch.tensor(apart["long"])) / 35
    assert torch.allclose(torch.tensor(together), mixed, atol=1e-6)


def test_learning_rate_warms_up(trainer: Callable[..., Trainer]) -> None:
    run = trainer(learning_rate=1.0e-3, warmup_updates=4)
    rates = [run.train_step(make_batch(seed)).learning_rate for seed in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_token_logprobs_are_the_models(trainer: Callable[..., Trainer], policy: Path) -> None:
    ids = make_sample(3, length=20).token_ids
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(logprobs[place - 1, ids[place]]) for place in range(1, len(ids))]
    assert trainer().token_logprobs(ids) == pytest.approx(expected, abs=1e-5)


def test_a_rewarded_sequence_becomes_likelier(trainer: Callable[..., Trainer]) -> None:
    run = trainer(learning_rate=3e-3)
    good, bad = make_sample(1, length=12, advantage=1.0), make_sample(2, length=12, advantage=-1.0)
    before = [sum(run.token_logprobs(s.token_ids)) for s in (good, bad)]
    for _ in range(10):
        run.train_step([good, bad])
    after = [sum(run.token_logprobs(s.token_ids)) for s in (good, bad)]
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_bfloat16_arithmetic_keeps_float32_weights(trainer: Callable[..., Trainer]) -> None:
    run = trainer(dtype="bfloat16")
    exact = trainer().train_step(make_batch(0))
    rounded = run.train_step(make_batch(0))
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert rounded.loss == pytest.approx(exact.loss, rel=0.2, abs=0.02)
