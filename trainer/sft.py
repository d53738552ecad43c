"""The supervised warm start: next-token loss on demonstrations, each tag with the share that its weight asks for.

A demonstration becomes a Sample whose weights carry the averaging, so batching and padding are the trainer's own. The
stage ends with a saved policy; reinforcement learning then starts a fresh optimiser from it.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer import losses
from trainer.batching import check_samples, micro_batches
from trainer.config import SftConfig, TrainerConfig
from trainer.model import PolicyModel
from trainer.optimizer import Optimizer, warmup_then_cosine
from trainer.policy import load_policy, save_policy
from trainer.sample import Sample


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One sequence to imitate. Example: `Demonstration((5, 6, 7, 2), (0, 0, 1, 1), "math")`."""

    token_ids: tuple[int, ...]
    """Ids of the whole conversation."""
    loss_mask: tuple[int, ...]
    """1 for tokens to imitate; same length."""
    tag: str = ""
    """The domain's name."""
    weight: float = 1.0
    """The tag's share of the loss relative to other tags; the same for all of its demonstrations."""


@dataclass(frozen=True, slots=True)
class SftMetrics:
    """One supervised step."""

    loss: float
    """Weighted mean over tags of the mean loss of their tokens, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    """Of this step."""
    tokens: int
    """Tokens imitated."""
    seconds: float
    """Wall time."""


class SftStage:
    """A policy under supervised training."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        config: SftConfig,
        trainer: TrainerConfig | None = None,
        device: str = "cpu",
    ) -> None:
        """Load the policy; `trainer` gives arithmetic, memory and optimiser settings. Raises PolicyError."""
        trainer = trainer or TrainerConfig()
        if device == "cpu":
            torch.set_num_threads(config.threads)
        model, self.tokenizer = load_policy(model_path)
        self._policy = PolicyModel(model, torch.device(device), trainer.dtype)
        self._optimizer = Optimizer(
            self._policy.hf,
            warmup_then_cosine(config.learning_rate, max(config.steps // 10, 1), config.steps, config.final_rate),
            trainer.betas,
            trainer.weight_decay,
            trainer.max_grad_norm,
        )
        self._smoothing = config.label_smoothing
        self._config = trainer

    def sft_step(self, demonstrations: Sequence[Demonstration]) -> SftMetrics:
        """One optimiser step. Raises ValueError and TrainingDiverged as `Trainer.train_step` does."""
        started = time.perf_counter()
        samples = _weighted(demonstrations)
        check_samples(samples, self._policy.vocabulary, self._policy.longest)
        batches = [batch.to(self._policy.device) for batch in micro_batches(samples, self._config.micro_tokens)]
        valid = sum(int(batch.valid_BT.sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits_NV, routing = self._policy.forward(batch)
            imitation_N = losses.imitation_loss(logits_NV, batch.targets_N, self._smoothing)
            loss = imitation = (batch.weights_N * imitation_N).sum()
            if routing and self._config.loss.router_aux:
                # Demonstrations are drawn alike, so a micro-batch's own loads stand for the batch's.
                load_LE = routing.counts_LE / routing.counts_LE.sum(-1, keepdim=True)
                balance = losses.load_balancing(routing.probability_sum_LE / valid, load_LE)
                loss = loss + self._config.loss.router_aux * balance
            loss.backward()
            total += float(imitation.detach())
        norm, rate = self._optimizer.step(total)
        tokens = sum(sum(demonstration.loss_mask) for demonstration in demonstrations)
        return SftMetrics(total, norm, rate, tokens, time.perf_counter() - started)

    def save_policy(self, path: str | os.PathLike[str]) -> None:
        """Write the current policy as a Hugging Face directory. Raises PolicyNotSaved."""
        save_policy(self._policy.hf, self.tokenizer, path)


def _weighted(demonstrations: Sequence[Demonstration]) -> list[Sample]:
    """Samples whose weights sum to 1, shared out by tag; one tag label, so that lengths alone cut batches."""
    tokens: Counter[str] = Counter()
    shares: dict[str, float] = {}
    for demonstration in demonstrations:
        count = sum(demonstration.loss_mask)
        tokens[demonstration.tag] += count
        if count:
            shares[demonstration.tag] = demonstration.weight
    whole = sum(shares.values())
    samples: list[Sample] = []
    for demonstration in demonstrations:
        length = len(demonstration.token_ids)
        tag = demonstration.tag
        weight = shares[tag] / (whole * tokens[tag]) if tokens[tag] and whole else 0.0
        nothing = (0.0,) * length
        samples.append(Sample(demonstration.token_ids, demonstration.loss_mask, nothing, nothing, (weight,) * length))
    return samples
