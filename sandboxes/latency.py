"""Latencies in bounded memory, mergeable between processes."""

import math
from collections import Counter
from dataclasses import dataclass, field

GROWTH = 1.02
"""Ratio of the bounds of a bin: a quantile is off by 1 % at most."""


@dataclass
class Latencies:
    """A histogram with logarithmic bins. `Latencies` of several processes add up with `merge`."""

    bins: Counter[int] = field(default_factory=Counter)
    """Number of observations by bin; bin b spans GROWTH**b to GROWTH**(b+1) seconds."""

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.bins[math.floor(math.log(max(seconds, 1e-6), GROWTH))] += 1

    def merge(self, other: "Latencies") -> None:
        """Add the observations of another process."""
        self.bins.update(other.bins)

    @property
    def count(self) -> int:
        """Number of observations."""
        return self.bins.total()

    def quantile_ms(self, q: float) -> float:
        """The q-quantile in milliseconds; NaN when nothing was observed."""
        rank = max(1, math.ceil(q * self.count))
        for bin_, number in sorted(self.bins.items()):
            rank -= number
            if rank <= 0:
                return GROWTH ** (bin_ + 0.5) * 1000
        return math.nan
