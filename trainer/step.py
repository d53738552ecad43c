"""Samples to loss to gradient to optimiser step.

The loss of a batch is Σ weight·(w·ratio loss + kl·k3), a plain sum over its trained tokens, plus the router's
load-balancing term; the formulas are in `trainer/losses.py`. Averages, domains and credit were settled before: the
trainer sees only numbers per token. With one minibatch π_old is π itself: the ratio is 1 and costs no second pass.

Left out of the papers' versions: the router's loads f come from the step before instead of this batch, because only
then is the term a sum over tokens that micro-batches leave as it is, and loads move little in one step; the first step
has f even, that is no router gradient.

Shape suffixes: N trained tokens, L layers with experts, E experts.
"""

import copy
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer import checkpoint, losses
from trainer.batching import MicroBatch, check_samples, micro_batches, split_minibatches
from trainer.config import TrainerConfig
from trainer.metrics import BatchTally, StepMetrics
from trainer.model import PolicyModel, Routing
from trainer.optimizer import Optimizer, warmup_then_cosine
from trainer.policy import load_policy, save_policy
from trainer.sample import Sample

__all__ = ["StepMetrics", "Trainer"]


class Trainer:
    """The policy under reinforcement learning, its optimiser, and the frozen reference when there is a KL term."""

    def __init__(
        self, model_path: str | os.PathLike[str], config: TrainerConfig, seed: int = 0, device: str = "cpu"
    ) -> None:
        """Load the policy that reinforcement learning starts from. Raises PolicyError."""
        if device == "cpu":
            torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        model, self.tokenizer = load_policy(model_path)
        reference = copy.deepcopy(model).requires_grad_(False) if config.loss.kl else None
        self._policy = PolicyModel(model, torch.device(device), config.dtype)
        self._reference = PolicyModel(reference, torch.device(device), config.dtype) if reference else None
        self.optimizer = Optimizer(
            self._policy.hf,
            warmup_then_cosine(config.learning_rate, config.warmup_updates, config.decay_updates),
            config.betas,
            config.weight_decay,
            config.max_grad_norm,
        )
        self._config = config
        self._seed = seed
        self._load_LE: Tensor | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """Batches trained on since reinforcement learning began: the number of the current weights."""
        return self._version

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model that is trained, in place."""
        return self._policy.hf

    def train_step(self, samples: Sequence[Sample]) -> StepMetrics:
        """Learn from one batch; `version` grows by one.

        A batch without signal (no trained token has weight and advantage, and there is no KL term) takes no optimiser
        step: AdamW would blow the router's term alone up to a step of full size. The version grows all the same.
        Each of several minibatches is scaled by their number, so that a step is as large as the whole batch's.

        Raises ValueError for a sample that cannot be trained on, and TrainingDiverged before a step with a loss or a
        gradient that is not finite is applied.
        """
        started = time.perf_counter()
        check_samples(samples, self._policy.vocabulary, self._policy.longest)
        tally = BatchTally()
        if self._has_signal(samples):
            parts = split_minibatches(samples, self._config.minibatches, self._seed + self._version)
            batches = [[b.to(self._policy.device) for b in micro_batches(p, self._config.micro_tokens)] for p in parts]
            batches = [part for part in batches if part]
            olds = [[self._policy.logprobs(b) if len(batches) > 1 else None for b in part] for part in batches]
            for part, old in zip(batches, olds, strict=True):
                self._optimizer_step(part, old, float(len(batches)), tally)
        self._version += 1
        return tally.metrics(self._config.gradient_shares, time.perf_counter() - started)

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """log π of each token after the first, at temperature 1 in float32: `len(token_ids) - 1` values, in nats."""
        return self._policy.sequence_logprobs(token_ids)

    def save_policy(self, path: str | os.PathLike[str]) -> None:
        """Write the current policy as a Hugging Face directory. Raises PolicyNotSaved."""
        save_policy(self._policy.hf, self.tokenizer, path)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write weights, optimiser, counters and RNG states to `path`, whole or not at all. Raises CheckpointError."""
        state = {
            "version": self._version,
            "optimizer": self.optimizer.state_dict(),
            "load": self._load_LE,
            "rng": checkpoint.rng_state(),
        }
        checkpoint.write(path, self._policy.hf, self.tokenizer, state)

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on exactly where `save_checkpoint` was called. Raises CheckpointError and leaves the trainer as it was.

        The reference policy stays the one of the model path that this trainer was made from.
        """
        state = checkpoint.read(path, self._policy.hf, self._policy.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_LE = state["load"]
        self._version = state["version"]
        checkpoint.restore_rng(state["rng"])

    def _has_signal(self, samples: Sequence[Sample]) -> bool:
        kl = self._config.loss.kl
        return any(
            flag and weight and (advantage or kl)
            for sample in samples
            for flag, weight, advantage in zip(sample.loss_mask, sample.weights, sample.advantages, strict=True)
        )

    def _optimizer_step(
        self, batches: Sequence[MicroBatch], olds: Sequence[Tensor | None], scale: float, tally: BatchTally
    ) -> None:
        """One minibatch: gradients summed over its micro-batches, which lie tag by tag, then one step."""
        tokens = sum(int(batch.valid_BT.sum()) for batch in batches)
        total = torch.zeros((), device=self._policy.device)
        counts: list[Tensor] = []
        for index, (batch, old) in enumerate(zip(batches, olds, strict=True)):
            loss, routing = self._loss(batch, old, scale, tokens, tally)
            loss.backward()
            total += loss.detach()
            counts += [routing.counts_LE] if routing else []
            last_of_tag = index + 1 == len(batches) or batches[index + 1].tag != batch.tag
            if self._config.gradient_shares and last_of_tag:
                tally.tag(batch.tag).gradient_norm += self.optimizer.bank()
        norm, tally.learning_rate = self.optimizer.step(float(total))
        tally.losses.append(float(total))
        tally.norms.append(norm)
        if counts:
            counts_LE = torch.stack(counts).sum(0)
            self._load_LE = counts_LE / counts_LE.sum(-1, keepdim=True)

    def _loss(
        self, batch: MicroBatch, old_N: Tensor | None, scale: float, tokens: int, tally: BatchTally
    ) -> tuple[Tensor, Routing | None]:
        """A micro-batch's part of the loss, a scalar, and its routing; the tally takes note."""
        config = self._config.loss
        logits_NV, routing = self._policy.forward(batch)
        logprobs_N = losses.token_logprobs(logits_NV, batch.targets_N)
        old_N = logprobs_N.detach() if old_N is None else old_N
        clip = (logprobs_N, old_N, batch.advantages_N, config.clip_low, config.clip_high)
        importance_N = losses.importance_weights(old_N, batch.behaviour_logprobs_N, config.importance_cap)
        loss_N = importance_N * losses.clipped_ratio_loss(*clip)
        if self._reference:
            loss_N = loss_N + config.kl * losses.kl_k3(logprobs_N, self._reference.logprobs(batch))
        loss = scale * (batch.weights_N * loss_N).sum()
        if routing and config.router_aux and self._load_LE is not None:
            mean_LE = routing.probability_sum_LE / tokens
            loss = loss + config.router_aux * losses.load_balancing(mean_LE, self._load_LE)
        with torch.no_grad():
            columns = {
                "advantage": batch.advantages_N,
                "clip_fraction": losses.is_clipped(*clip),
                "importance_weight": importance_N,
                "capped_fraction": importance_N >= config.importance_cap,
                "mismatch_kl": losses.kl_k3(batch.behaviour_logprobs_N, old_N),
                "entropy": losses.entropy(logits_NV),
            }
            tally.tag(batch.tag).add(columns, routing)
        return loss, routing
