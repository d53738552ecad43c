"""From the raw reward components of one episode to one `Score`, by the ranges that its domain declares.

Each component is scaled to [0, 1] by (r − lo) / (hi − lo), a cost is inverted, and the total is their weighted mean. A
component whose gate (`when`) is not full counts 0 and keeps its weight, so that failing never beats passing
expensively.
"""

import math
from collections.abc import Mapping
from numbers import Real

from reward.config import ComponentConfig, DomainConfig
from reward.errors import DomainError, RewardOutOfRange, VerifierFailed
from reward.score import Score, Status
from reward.task import Task

TOLERANCE = 1e-9
"""Rounding allowed at either end of a range, relative to its width."""


def score(
    domain: DomainConfig,
    task: Task,
    raw: Mapping[str, object],
    status: Status,
    detail: str = "",
    labels: Mapping[str, str] | None = None,
) -> Score:
    """The score of a graded episode.

    Raises `VerifierFailed` when `raw` is not a finite number for exactly the declared components, and
    `RewardOutOfRange` when one leaves its range.
    """
    assert status is not Status.INFRA_ERROR, "an infrastructure error has no components: use Score.infra_error"
    values = _check_values(domain, raw)
    scaled = {name: _scale(domain, name, task, value) for name, value in values.items()}
    components = domain.components
    weighted = [
        component.weight * scaled[name] if not component.when or scaled[component.when] == 1.0 else 0.0
        for name, component in components.items()
    ]
    total = math.fsum(weighted) / math.fsum(component.weight for component in components.values())
    passed = all(scaled[name] == 1.0 for name, component in components.items() if component.kind == "outcome")
    return Score(values, total, passed, status, detail, dict(labels or {}))


def lowest(domain: DomainConfig, task: Task) -> dict[str, float]:
    """The worst raw value of each component: what an episode gets that left nothing to grade."""
    worst = {}
    for name, component in domain.components.items():
        low, high = bounds(name, component, task)
        worst[name] = high if component.kind == "cost" else low
    return worst


def bounds(name: str, component: ComponentConfig, task: Task) -> tuple[float, float]:
    """Lowest and highest raw value of a component on this task. Raises `DomainError` when its data gives none."""
    low, high = component.range
    if not isinstance(high, str):
        return low, high
    key = f"components.{name}.range"
    value = task.data.get(high)
    if isinstance(value, list):
        value = len(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DomainError(
            f"`{key}` takes its upper end from `data.{high}`, which task {task.id!r} lacks as a number or list; add it"
        )
    if not low < value:
        raise DomainError(
            f"`{key}` is empty for task {task.id!r}: `data.{high}` gives {value:g}, which must be above {low:g}"
        )
    return low, float(value)


def _check_values(domain: DomainConfig, raw: Mapping[str, object]) -> dict[str, float]:
    """Every declared component as a finite float, in the declared order."""
    values = {}
    for name in domain.components:
        value = raw.get(name)
        if not isinstance(value, Real) or not math.isfinite(value):
            raise VerifierFailed(f"domain {domain.name!r}: component {name!r} is {value!r}, not a finite number")
        values[name] = float(value)
    undeclared = sorted(set(raw) - set(values))
    if undeclared:
        raise VerifierFailed(f"domain {domain.name!r}: component {undeclared[0]!r} was returned but is not declared")
    return values


def _scale(domain: DomainConfig, name: str, task: Task, value: float) -> float:
    component = domain.components[name]
    low, high = bounds(name, component, task)
    slack = TOLERANCE * (high - low)
    if not low - slack <= value <= high + slack:
        raise RewardOutOfRange(
            f"domain {domain.name!r}: component {name!r} = {value:g} on task {task.id!r} is outside its declared range "
            f"[{low:g}, {high:g}]; correct `components.{name}.range` in its domain.toml, or what returns the value"
        )
    # Snapped to the top, because passing asks for exactly that.
    share = 1.0 if value >= high - slack else max(0.0, (value - low) / (high - low))
    return 1.0 - share if component.kind == "cost" else share
