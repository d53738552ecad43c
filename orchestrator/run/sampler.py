"""Which domain and task next: exact strata by token budget.

Every optimiser batch has `groups_per_batch` groups. A domain's share of them is inversely proportional to the tokens
that one of its episodes costs, so that each trained domain gets about the same number of trained tokens, except for a
part (`even_share`) that is dealt out equally, because a domain of long episodes still needs enough groups for some of
them to carry signal. The domain's *weight* acts in the loss (`reward/advantage.py`), not here, so a change of weight
never starves a domain of data. Shares become integers by the method of the largest remainder with at least one group a
domain, and the plan of a batch, once made, is met exactly: the loop trains batch k on the groups of plan k and on
nothing else.

Left out of the source (token-budget strata, `n_d ∝ B / EMA(len_d)`): the budget B is given in groups instead of tokens,
which keeps the batch's memory bounded whatever the lengths do.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward.task import Task


def largest_remainder(shares: Mapping[str, float], total: int) -> dict[str, int]:
    """Integers that sum to `total`, at least 1 each, closest to proportional to `shares` (Hamilton's method).

    Every domain first gets one; the rest follows the exact quotas' excess over one. Ties go to the earlier key, so that
    the result depends on nothing but the arguments. Needs `total >= len(shares)` and positive shares.
    """
    assert shares and total >= len(shares) and all(share > 0 for share in shares.values())
    scale = sum(shares.values())
    excess = {name: max(total * share / scale - 1.0, 0.0) for name, share in shares.items()}
    rest = total - len(shares)
    norm = sum(excess.values())
    exact = {name: rest * value / norm if norm > 0 else rest / len(shares) for name, value in excess.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: rest - sum(counts.values())]:
        counts[name] += 1
    return {name: count + 1 for name, count in counts.items()}


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The strata of one optimiser batch, for example `BatchPlan(7, {"math": (task, task), "code": (task,)}, {...})`."""

    index: int
    """Which optimiser batch: it is trained by the update from version `index` to `index + 1`."""
    tasks: Mapping[str, tuple[Task, ...]]
    """One task a group, by domain."""
    state_before: Mapping[str, Any]
    """The sampler's state before this plan was made: what a checkpoint before this batch holds."""

    @property
    def quota(self) -> dict[str, int]:
        """Groups by domain."""
        return {name: len(tasks) for name, tasks in self.tasks.items()}


class Sampler:
    """Plans batches. Tasks of a domain come in a new random order each pass; no task repeats within a pass."""

    def __init__(
        self,
        tasks: Mapping[str, Sequence[Task]],
        *,
        groups_per_batch: int,
        memory: float,
        seed: int,
        even_share: float = 0.0,
    ) -> None:
        """`tasks`: training tasks of each trained domain. `memory`: decay of the mean episode length.

        `even_share`: part of the groups that is dealt out equally; 0 shares all by token budgets.
        """
        self._tasks = {name: {task.id: task for task in rows} for name, rows in tasks.items()}
        self._groups = groups_per_batch
        self._memory = memory
        self._seed = seed
        self._even_share = even_share
        self._next_batch = 0
        self._lengths: dict[str, float] = {}
        self._passes = dict.fromkeys(tasks, 0)
        self._queues: dict[str, list[str]] = {name: [] for name in tasks}

    def plan(self) -> BatchPlan:
        """The plan of the next batch."""
        before = self.state_dict()
        quota = largest_remainder(self._shares(), self._groups)
        tasks = {name: tuple(self._draw(name) for _ in range(count)) for name, count in quota.items()}
        plan = BatchPlan(self._next_batch, tasks, before)
        self._next_batch += 1
        return plan

    def observe(self, domain: str, policy_tokens: float) -> None:
        """Tell how many tokens the policy wrote, on average, in the episodes of a finished group."""
        old = self._lengths.get(domain)
        new = max(policy_tokens, 1.0)
        self._lengths[domain] = new if old is None else self._memory * old + (1 - self._memory) * new

    def replace(self, task: Task) -> Task:
        """The next task of the same domain, for one that cannot be played."""
        return self._draw(task.domain)

    def _shares(self) -> dict[str, float]:
        """Each domain's share of the groups: an equal part of `even_share`, and the rest by equal token budgets."""
        costs = {name: 1.0 / self._length(name) for name in self._tasks}
        total = sum(costs.values())
        even = self._even_share / len(costs)
        return {name: even + (1 - self._even_share) * cost / total for name, cost in costs.items()}

    def _length(self, domain: str) -> float:
        """Mean tokens of an episode. A domain never seen counts as the mean of those seen, so that it starts at par."""
        known = self._lengths.get(domain)
        if known is not None:
            return known
        return sum(self._lengths.values()) / len(self._lengths) if self._lengths else 1.0

    def _draw(self, domain: str) -> Task:
        queue = self._queues[domain]
        if not queue:
            queue.extend(self._tasks[domain])
            # One generator a pass: the order is a function of seed, domain and pass, so a restored state needs no RNG
            # state.
            random.Random(f"{self._seed}/{domain}/{self._passes[domain]}").shuffle(queue)  # noqa: S311 (no secret)
            self._passes[domain] += 1
        return self._tasks[domain][queue.pop()]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "next_batch": self._next_batch,
            "lengths": dict(self._lengths),
            "passes": dict(self._passes),
            "queues": {name: list(queue) for name, queue in self._queues.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore.

        Tasks that left the domain since are dropped from the running pass; new ones come with the next pass.
        """
        self._next_batch = state["next_batch"]
        self._lengths = {name: value for name, value in state["lengths"].items() if name in self._tasks}
        for name, tasks in self._tasks.items():
            self._passes[name] = state["passes"].get(name, 0)
            self._queues[name] = [task for task in state["queues"].get(name, []) if task in tasks]
