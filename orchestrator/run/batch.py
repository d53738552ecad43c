"""From the finished groups of a batch to the trainer's samples. Credit goes in here; the trainer stays blind to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reward.advantage import Normalizer, token_weights
from reward.score import Status
from rollout_workers.types import Episode
from trainer.sample import Sample

Groups = Mapping[str, Sequence[Sequence[Episode]]]
"""Episodes by domain and group."""


@dataclass(frozen=True, slots=True)
class DomainBatch:
    """One domain's part of a batch, over its graded episodes."""

    groups: int
    """Groups, which equals the planned quota."""
    groups_with_signal: int
    """Groups whose episodes did not all score alike."""
    episodes: int
    """Graded episodes."""
    pass_rate: float
    """Share of them that passed."""
    reward: float
    """Their mean total on [0, 1]."""
    deviation: float
    """What the domain's advantages were divided by; NaN before any signal."""
    trained_tokens: int
    """Policy tokens that carry signal."""
    mean_tokens: float
    """Policy tokens of an episode."""
    truncated: int
    """Episodes ended by a budget."""
    staleness: int
    """Largest age in versions of any policy token."""
    mean_staleness: float
    """Mean age of the policy tokens."""


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """A batch ready to train."""

    samples: tuple[Sample, ...]
    """Sequences that carry signal."""
    domains: Mapping[str, DomainBatch]
    """Figures by domain."""

    @property
    def staleness(self) -> int:
        """Largest age in versions of any policy token of the batch."""
        return max((part.staleness for part in self.domains.values()), default=0)


class BatchBuilder:
    """Owns the domains' running deviations."""

    def __init__(self, weights: Mapping[str, float], *, deviation_memory: int) -> None:
        """`weights`: each trained domain's share in the gradient, any scale."""
        self._weights = dict(weights)
        self.normalizer = Normalizer(deviation_memory)

    def build(self, version: int, groups: Groups) -> BuiltBatch:
        """Samples for the update that takes `version` to the next. Episodes without signal stay out."""
        scores = {name: [[e.score for e in group] for group in members] for name, members in groups.items()}
        tokens = {name: [[e.policy_tokens for e in group] for group in members] for name, members in groups.items()}
        advantages = self.normalizer.advantages(scores)
        weights = token_weights(advantages, tokens, self._weights)
        samples = [
            _sample(episode, advantage, weights[name])
            for name, members in groups.items()
            for group, row in zip(members, advantages[name], strict=True)
            for episode, advantage in zip(group, row, strict=True)
            if advantage is not None
        ]
        figures = {name: self._figures(name, members, advantages[name], version) for name, members in groups.items()}
        return BuiltBatch(tuple(samples), figures)

    def _figures(
        self,
        name: str,
        groups: Sequence[Sequence[Episode]],
        advantages: Sequence[Sequence[float | None]],
        version: int,
    ) -> DomainBatch:
        graded = [e for group in groups for e in group if e.score.status is not Status.INFRA_ERROR]
        ages = [age for group in groups for episode in group for age in _ages(episode, version)]
        deviation = self.normalizer.deviation(name)
        return DomainBatch(
            groups=len(groups),
            groups_with_signal=sum(any(a is not None for a in row) for row in advantages),
            episodes=len(graded),
            pass_rate=sum(e.score.passed for e in graded) / len(graded),
            reward=sum(e.score.total for e in graded) / len(graded),
            deviation=float("nan") if deviation is None else deviation,
            trained_tokens=sum(
                e.policy_tokens
                for group, row in zip(groups, advantages, strict=True)
                for e, advantage in zip(group, row, strict=True)
                if advantage is not None
            ),
            mean_tokens=sum(e.policy_tokens for e in graded) / len(graded),
            truncated=sum(e.score.status is Status.TRUNCATED for e in graded),
            staleness=max(ages, default=0),
            mean_staleness=sum(ages) / len(ages) if ages else 0.0,
        )


def _sample(episode: Episode, advantage: float, weight: float) -> Sample:
    """Every policy token of the episode gets its advantage and its domain's weight; the others get nothing."""
    return Sample(
        token_ids=episode.token_ids,
        loss_mask=episode.loss_mask,
        logprobs=episode.logprobs,
        advantages=tuple(advantage * bit for bit in episode.loss_mask),
        weights=tuple(weight * bit for bit in episode.loss_mask),
        tag=episode.domain,
    )


def _ages(episode: Episode, version: int) -> list[int]:
    """Versions between each policy token and the policy that is trained."""
    return [version - token for token, bit in zip(episode.versions, episode.loss_mask, strict=True) if bit]
