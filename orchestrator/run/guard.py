"""Notices a domain that yields nothing but infrastructure errors."""

from collections.abc import Sequence

from orchestrator.errors import DomainFailing
from reward.score import Status
from rollout_workers.types import Episode


class FailureGuard:
    """Counts a domain's infrastructure errors since its last gradable episode."""

    def __init__(self, threshold: int) -> None:
        """`threshold`: errors in a row at which the run is stopped."""
        self._threshold = threshold
        self._row: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def observe(self, episodes: Sequence[Episode]) -> None:
        """Take note of finished episodes.

        Raises `DomainFailing` with the domain's name and the first error of the row.
        """
        for episode in episodes:
            if episode.score.status is not Status.INFRA_ERROR:
                self._row.pop(episode.domain, None)
                self._first.pop(episode.domain, None)
                continue
            self._row[episode.domain] = self._row.get(episode.domain, 0) + 1
            self._first.setdefault(episode.domain, episode.score.detail)
            if self._row[episode.domain] >= self._threshold:
                raise DomainFailing(
                    f"domain {episode.domain!r}: the last {self._threshold} episodes were infrastructure errors; "
                    f"the first was: {self._first[episode.domain]}"
                )
