"""Samples to padded micro-batches and optimiser minibatches.

How samples are cut changes no result: every token carries its weight, and losses are sums. Order does not either:
samples are put in a canonical order first.

Shape suffixes: B sequences, T padded tokens, N trained tokens of the micro-batch.
"""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trainer.sample import Sample

_EFFICIENT_TOKENS = 1024
"""On two cores a pass over this many tokens costs no more per token than one over eight times as many."""
_PADDING = 1.1
"""Padded over real tokens that a part of that size may reach."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences of one tag, padded at the right. The causal mask keeps padding out of every real token's sight."""

    tag: str
    """The samples' tag."""
    token_ids_BT: Tensor
    """Ids, 0 where padded."""
    valid_BT: Tensor
    """False where padded."""
    predictors_N: Tensor
    """For each trained token the flat index into B·T of the position that predicts it, the one before."""
    targets_N: Tensor
    """Ids of the trained tokens."""
    behaviour_logprobs_N: Tensor
    """log μ, in nats."""
    advantages_N: Tensor
    """Advantages."""
    weights_N: Tensor
    """Weights in the loss."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        moved = {f.name: getattr(self, f.name).to(device) for f in fields(self) if f.name != "tag"}
        return MicroBatch(tag=self.tag, **moved)


def check_samples(samples: Sequence[Sample], vocabulary: int, longest: int) -> None:
    """Raise ValueError, one sentence, for a sample that cannot be trained on as it is.

    `longest` is the model's number of positions.
    """
    for index, sample in enumerate(samples):
        if fault := _fault(sample, vocabulary, longest):
            raise ValueError(f"Sample {index} (tag {sample.tag!r}) {fault}; correct it where it is built.")


def micro_batches(samples: Sequence[Sample], micro_tokens: int) -> list[MicroBatch]:
    """Cut `samples` into micro-batches of one tag, neighbours in length, at most `micro_tokens` padded tokens each.

    A sequence longer than that is a micro-batch of its own. Sequences without a trained token are left out.
    """
    ordered = sorted((sample for sample in samples if any(sample.loss_mask)), key=_canonical)
    return [
        _collate(tag, rows)
        for tag, group in itertools.groupby(ordered, key=lambda sample: sample.tag)
        for rows in _cut(list(group), micro_tokens)
    ]


def split_minibatches(samples: Sequence[Sample], count: int, seed: int) -> list[list[Sample]]:
    """Deal samples into at most `count` minibatches so that each holds an equal part of every tag, give or take one.

    A deterministic function of the set of samples and `seed`; minibatches that would be empty are left out.
    """
    ordered = sorted(samples, key=_canonical)
    if count == 1:
        return [ordered] if ordered else []
    shuffle = random.Random(seed)  # noqa: S311 - a reproducible shuffle, not a secret
    dealt: list[Sample] = []
    for _, group in itertools.groupby(ordered, key=lambda sample: sample.tag):
        rows = list(group)
        shuffle.shuffle(rows)
        dealt.extend(rows)
    return [part for start in range(count) if (part := dealt[start::count])]


def _fault(sample: Sample, vocabulary: int, longest: int) -> str | None:
    length = len(sample.token_ids)
    columns = (sample.loss_mask, sample.logprobs, sample.advantages, sample.weights)
    if any(len(column) != length for column in columns):
        return f"has columns of different lengths {[length, *map(len, columns)]}"
    if not 0 < length <= longest:
        return f"has {length} tokens but the policy takes 1 to {longest}"
    if min(sample.token_ids) < 0 or max(sample.token_ids) >= vocabulary:
        return f"has a token id outside 0 to {vocabulary - 1}"
    if sample.loss_mask[0]:
        return "trains on its first token, which nothing predicts"
    for name, column in (("logprobs", sample.logprobs), ("advantages", sample.advantages), ("weights", sample.weights)):
        for place, (trained, value) in enumerate(zip(sample.loss_mask, column, strict=True)):
            if trained and not math.isfinite(value):
                return f"has {name}[{place}] = {value}, which is not finite"
    return None


def _canonical(sample: Sample) -> tuple[object, ...]:
    return (
        sample.tag,
        len(sample.token_ids),
        sample.token_ids,
        sample.loss_mask,
        sample.advantages,
        sample.weights,
        sample.logprobs,
    )


def _cut(rows: list[Sample], micro_tokens: int) -> Iterator[list[Sample]]:
    """Greedy cut of rows sorted by length: the last of a part is its longest.

    A part ends early, once it is large enough to be efficient, if the next row would make its padding dear.
    """
    start = real = 0
    for end, row in enumerate(rows):
        length = len(row.token_ids)
        padded = (end - start + 1) * length
        dear = real >= _EFFICIENT_TOKENS and padded > _PADDING * (real + length)
        if end > start and (padded > micro_tokens or dear):
            yield rows[start:end]
            start, real = end, 0
        real += length
    if rows:
        yield rows[start:]


def _collate(tag: str, rows: Sequence[Sample]) -> MicroBatch:
    width = len(rows[-1].token_ids)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    predictors: list[int] = []
    columns: list[tuple[int, float, float, float]] = []
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[index, :length] = torch.tensor(row.token_ids)
        valid[index, :length] = True
        trained = [place for place, flag in enumerate(row.loss_mask) if flag]
        predictors.extend(index * width + place - 1 for place in trained)
        columns.extend((row.token_ids[p], row.logprobs[p], row.advantages[p], row.weights[p]) for p in trained)
    targets, logprobs, advantages, weights = zip(*columns, strict=True)
    return MicroBatch(
        tag=tag,
        token_ids_BT=token_ids,
        valid_BT=valid,
        predictors_N=torch.tensor(predictors),
        targets_N=torch.tensor(targets),
        behaviour_logprobs_N=torch.tensor(logprobs, dtype=torch.float32),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        weights_N=torch.tensor(weights, dtype=torch.float32),
    )
