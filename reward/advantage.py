"""From the scores of groups to advantages and loss weights that are comparable between domains.

Advantage of episode i of group g of domain d: A = (r_i − μ_g) / σ_d, with μ_g the mean of the group's graded episodes
and σ_d² the mean of the unbiased within-group variances of the domain's latest groups that carry signal. That is GRPO's
group baseline (arXiv 2402.03300) with the deviation of a domain instead of a group, in the spirit of AgentRL's task
normalisation (arXiv 2510.04206). Dividing by each group's own σ was left out, because it blows up groups whose episodes
hardly differ; dividing by the batch's was left out, because the domain with the largest rewards then rules the
gradient.

The loss is L = Σ_d w_d · (Σ_tokens l / N_d), N_d the domain's trained tokens in the batch that carry signal, so that
long episodes of one domain do not drown the short ones of another.

No absolute epsilon appears: it would break the invariance to a reward's scale from below. What stands for it is
relative.
"""

import math
from collections.abc import Mapping, Sequence

from reward.score import Score, Status

RELATIVE_SPREAD = 1e-9
"""A group whose totals differ by less than this, relative to the largest, differs by rounding only: no signal."""

Advantages = dict[str, list[list[float | None]]]
"""By domain, group and episode. None: the episode carries no signal and leaves loss and denominators."""


class Normalizer:
    """Keeps the deviation of each domain over its last `window` groups with signal.

    A batch's groups enter the statistics before they are used (so the first batch has some, and a jump of the rewards
    by any factor overshoots by √(window / groups in the batch) at most), and are forgotten after `window` further
    groups. A batch with more groups of a domain than `window` is normalised by all of its own.
    """

    def __init__(self, window: int = 64) -> None:
        """`window`: groups with signal to remember for each domain."""
        if window < 1:
            raise ValueError(f"window = {window} must be at least 1")
        self._window = window
        self._variances: dict[str, list[float]] = {}

    def advantages(self, groups: Mapping[str, Sequence[Sequence[Score]]]) -> Advantages:
        """Advantages of a batch: for each domain its groups, for each group the scores of its episodes.

        An episode gets None when it is an `infra_error`, alone in its group after those are left out, or when all of
        its group score alike.
        """
        return {domain: self._domain(domain, list(members)) for domain, members in groups.items()}

    def deviation(self, domain: str) -> float | None:
        """σ of the remembered groups, in units of the total; None before the first group with signal."""
        known = self._variances.get(domain)
        return math.sqrt(math.fsum(known) / len(known)) if known else None

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """All statistics as plain JSON data; floats survive JSON bit for bit."""
        return {"variances": {domain: list(known) for domain, known in self._variances.items()}}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Go on from `state_dict()`. A smaller window than the one saved with keeps the latest groups."""
        self._variances = {domain: list(known)[-self._window :] for domain, known in state["variances"].items()}

    def _domain(self, domain: str, groups: list[Sequence[Score]]) -> list[list[float | None]]:
        centred = [_centre(group) for group in groups]
        fresh = [variance for _, variance in centred if variance is not None]
        if not fresh:
            return [[None] * len(group) for group in groups]
        known = (self._variances.get(domain, []) + fresh)[-max(self._window, len(fresh)) :]
        # fsum is exact, hence independent of the order of groups.
        deviation = math.sqrt(math.fsum(known) / len(known))
        self._variances[domain] = known[-self._window :]
        return [[None if offset is None else offset / deviation for offset in offsets] for offsets, _ in centred]


def token_weights(
    advantages: Mapping[str, Sequence[Sequence[float | None]]],
    tokens: Mapping[str, Sequence[Sequence[int]]],
    shares: Mapping[str, float],
) -> dict[str, float]:
    """Loss weight of each trained token by domain: w_d / N_d.

    `tokens` holds the trained tokens of each episode, nested like `advantages`; N_d counts the episodes whose advantage
    is not None. `shares` are the configured weights; they are normalised to sum 1 over the domains of the batch, which
    are the keys of `advantages`. A domain without signal gets 0 and its share is left unused: handed to the others it
    would make a domain's step depend on the luck of the rest, and the domains that always carry signal would rule.
    """
    total = math.fsum(shares[domain] for domain in advantages)
    weights = {}
    for domain, groups in advantages.items():
        trained = sum(
            count
            for group, counts in zip(groups, tokens[domain], strict=True)
            for advantage, count in zip(group, counts, strict=True)
            if advantage is not None
        )
        weights[domain] = shares[domain] / total / trained if trained else 0.0
    return weights


def _centre(group: Sequence[Score]) -> tuple[list[float | None], float | None]:
    """Offsets from the mean of the graded episodes, and their unbiased variance; Nones when there is no signal."""
    totals = [score.total for score in group if score.status is not Status.INFRA_ERROR]
    nothing: list[float | None] = [None] * len(group)
    if len(totals) < 2:
        return nothing, None
    if max(totals) - min(totals) <= RELATIVE_SPREAD * max(abs(total) for total in totals):
        return nothing, None
    mean = math.fsum(totals) / len(totals)
    variance = math.fsum((total - mean) ** 2 for total in totals) / (len(totals) - 1)
    return [None if s.status is Status.INFRA_ERROR else s.total - mean for s in group], variance
