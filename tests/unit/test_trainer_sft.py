"""The supervised stage: shares, the schedule, and that it learns."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from trainer_kit import make_policy, make_sample
from transformers import AutoModelForCausalLM

from trainer.config import SftConfig, TrainerConfig
from trainer.optimizer import warmup_then_cosine
from trainer.policy import load_policy
from trainer.sft import Demonstration, SftStage

NO_ROUTER = TrainerConfig.model_validate({"loss": {"router_aux": 0.0}})


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policies") / "small")


def demonstration(seed: int, tag: str, length: int | None = None) -> Demonstration:
    sample = make_sample(seed, length=length)
    return Demonstration(sample.token_ids, sample.loss_mask, tag)


def stage(policy: Path, steps: int = 20, trainer: TrainerConfig = NO_ROUTER) -> SftStage:
    return SftStage(policy, SftConfig(steps=steps, learning_rate=5e-3, threads=1), trainer)


def test_loss_is_the_mean_over_tags_of_their_token_means(policy: Path) -> None:
    rows = [*(demonstration(seed, "long", 30) for seed in range(5)), demonstration(9, "short", 5)]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    means = []
    for tag in ("long", "short"):
        terms = []
        for row in (row for row in rows if row.tag == tag):
            logprobs = model(input_ids=torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            terms += [-logprobs[p - 1, row.token_ids[p]].item() for p, flag in enumerate(row.loss_mask) if flag]
        means.append(sum(terms) / len(terms))
    metrics = stage(policy).sft_step(rows)
    assert metrics.loss == pytest.approx(sum(means) / 2, rel=1e-5)
    assert metrics.tokens == sum(sum(row.loss_mask) for row in rows)


def test_a_tag_has_the_share_that_its_weight_asks_for(policy: Path) -> None:
    a, b = demonstration(1, "a", 9), demonstration(2, "b", 20)
    alone = [stage(policy).sft_step([row]).loss for row in (a, b)]
    both = stage(policy).sft_step([dataclasses.replace(a, weight=3.0), b]).loss
    assert both == pytest.approx((3 * alone[0] + alone[1]) / 4, rel=1e-5)


def test_padding_and_order_change_nothing(policy: Path) -> None:
    rows = [demonstration(seed, "ab"[seed % 2]) for seed in range(8)]
    small = NO_ROUTER.model_copy(update={"micro_tokens": 64})
    one, other = stage(policy).sft_step(rows), stage(policy, trainer=small).sft_step(rows[::-1])
    assert other.loss == pytest.approx(one.loss, rel=1e-5)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


def test_it_learns_the_demonstrations_by_heart_and_saves_them(policy: Path, tmp_path: Path) -> None:
    rows = [demonstration(seed, "ab"[seed % 2], 12) for seed in range(4)]
    run = stage(policy, steps=60, trainer=TrainerConfig())
    metrics = [run.sft_step(rows) for _ in range(60)]
    assert metrics[0].loss > 4
    assert metrics[-1].loss < 0.5
    run.save_policy(tmp_path / "warm")
    again = SftStage(tmp_path / "warm", SftConfig(steps=1, threads=1), NO_ROUTER).sft_step(rows)
    assert again.loss == pytest.approx(metrics[-1].loss, abs=0.1)
    assert load_policy(tmp_path / "warm")[1].chat_template


def test_a_demonstration_that_does_not_fit_is_named(policy: Path) -> None:
    with pytest.raises(ValueError, match=r"Sample 0 .*200 tokens"):
        stage(policy).sft_step([Demonstration((1,) * 200, (0,) + (1,) * 199, "x")])


def test_schedule_rises_for_a_tenth_and_falls_to_a_tenth() -> None:
    rates = [warmup_then_cosine(1.0, 10, 100)(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0.1)


def test_a_rate_without_decay_stays_at_its_peak_and_one_with_decay_stays_at_the_end() -> None:
    constant, falling = warmup_then_cosine(2.0, 4), warmup_then_cosine(2.0, 4, 20, 0.25)
    assert [constant(step) for step in (0, 3, 1000)] == [0.5, 2.0, 2.0]
    assert [falling(step) for step in (4, 19, 500)] == pytest.approx([2.0, 0.5, 0.5])
