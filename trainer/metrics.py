"""What an update did, in figures: per tag and per layer. Sums are kept while the batch runs and divided at its end."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.losses import load_violation
from trainer.model import Routing


@dataclass(frozen=True, slots=True)
class TagMetrics:
    """The samples of one tag. Means are over trained tokens and unweighted."""

    tokens: int
    """Trained tokens."""
    advantage: float
    """Mean advantage."""
    clip_fraction: float
    """Share of tokens without gradient because the ratio left the clip range."""
    importance_weight: float
    """Mean truncated importance weight."""
    capped_fraction: float
    """Share of tokens whose importance weight reached the cap."""
    mismatch_kl: float
    """k3 estimate of KL(μ‖π_old) between engine and trainer, in nats; staleness and arithmetic both raise it."""
    entropy: float
    """Mean entropy of the policy, in nats."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One batch."""

    loss: float
    """Σ weight·loss plus the router's term, before the first optimiser step; the mean over minibatches of their own."""
    grad_norm: float
    """Global gradient norm before clipping; the mean over minibatches."""
    learning_rate: float
    """Of the last optimiser step; 0 when there was none."""
    optimizer_steps: int
    """0 when the batch had nothing to learn from."""
    tags: Mapping[str, TagMetrics]
    """By tag."""
    gradient_share: Mapping[str, float]
    """Norm of each tag's own gradient over the sum of those norms; empty when not measured."""
    expert_load: Mapping[str, list[list[float]]]
    """By tag: for each layer the fraction of routes that go to each expert, padding left out; empty without experts."""
    load_violation: list[float]
    """For each layer max load / mean load − 1 over all tags."""
    seconds: float
    """Wall time."""


@dataclass(slots=True)
class TagTally:
    """Running sums of one tag. They stay on the device until the end: reading one waits for the device."""

    tokens: int = 0
    sums: Tensor | None = None
    counts_LE: Tensor | None = None
    gradient_norm: float = 0.0

    def add(self, columns: Mapping[str, Tensor], routing: Routing | None) -> None:
        """Add a micro-batch: the per-token columns that `TagMetrics` averages, in its order, and its routing."""
        stacked = torch.stack([column.detach().float().sum() for column in columns.values()])
        self.sums = stacked if self.sums is None else self.sums + stacked
        self.tokens += next(iter(columns.values())).numel()
        if routing is not None:
            self.counts_LE = routing.counts_LE if self.counts_LE is None else self.counts_LE + routing.counts_LE

    def metrics(self) -> TagMetrics:
        """Means over the tokens."""
        assert self.sums is not None
        return TagMetrics(self.tokens, *(self.sums / self.tokens).tolist())


@dataclass(slots=True)
class BatchTally:
    """Running sums of one batch."""

    tags: dict[str, TagTally] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0

    def tag(self, name: str) -> TagTally:
        """The tally of a tag, made at first use."""
        return self.tags.setdefault(name, TagTally())

    def counts(self) -> Tensor | None:
        """Routes per layer and expert over all tags, shape (L, E)."""
        counts = [tally.counts_LE for tally in self.tags.values() if tally.counts_LE is not None]
        return torch.stack(counts).sum(0) if counts else None

    def metrics(self, shares_measured: bool, seconds: float) -> StepMetrics:
        """The figures of the whole batch."""
        norms = sum(tally.gradient_norm for tally in self.tags.values())
        counts = self.counts()
        steps = len(self.losses)
        return StepMetrics(
            loss=sum(self.losses) / max(steps, 1),
            grad_norm=sum(self.norms) / max(steps, 1),
            learning_rate=self.learning_rate,
            optimizer_steps=steps,
            tags={name: tally.metrics() for name, tally in self.tags.items()},
            gradient_share={name: tally.gradient_norm / norms for name, tally in self.tags.items()}
            if shares_measured and norms > 0
            else {},
            expert_load={
                name: (tally.counts_LE / tally.counts_LE.sum(-1, keepdim=True)).tolist()
                for name, tally in self.tags.items()
                if tally.counts_LE is not None
            },
            load_violation=[] if counts is None else load_violation(counts).tolist(),
            seconds=seconds,
        )
