"""The outcome of one episode as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Why an episode ended as it did. Only `INFRA_ERROR` says nothing about the policy."""

    OK = "ok"
    """The environment ended the episode and the verifier graded it."""
    POLICY_FAILURE = "policy_failure"
    """The policy's action could not be carried out at all (for example an answer that does not parse). Graded."""
    TRUNCATED = "truncated"
    """The token or turn budget ended the episode. Graded as it stands."""
    INFRA_ERROR = "infra_error"
    """A sandbox, engine or verifier failed. Not graded: it leaves statistics, loss and metrics, and is retried."""


@dataclass(frozen=True, slots=True)
class Score:
    """Example: `Score({"success": 1.0, "steps": 2.0}, total=0.97, passed=True, status=Status.OK)`."""

    components: Mapping[str, float]
    """Raw reward components, on the scales that the domain declares."""
    total: float
    """Weighted mean of the components after each is scaled to [0, 1] by its declared range; NaN for `INFRA_ERROR`."""
    passed: bool
    """Whether every outcome component reached the top of its range."""
    status: Status
    """What ended the episode."""
    detail: str = ""
    """One sentence for people: the error of an `INFRA_ERROR`, the reason of a `POLICY_FAILURE`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Free labels of the environment for reports (for example the kind of task)."""

    @classmethod
    def infra_error(cls, detail: str) -> "Score":
        """The score of an episode that could not be graded."""
        return cls({}, float("nan"), False, Status.INFRA_ERROR, detail)
