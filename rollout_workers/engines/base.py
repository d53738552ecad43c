"""What an engine is: token ids in, token ids with log-probabilities and policy versions out.

Implementations: `vllm.py` (real), `fake.py` (scripted, for tests). One contract suite runs against both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Generation:
    """One completed request. The three tuples have the same length, for example
    `Generation((72, 105, 2), (-0.1, -0.4, -0.01), (3, 3, 3), "stop")`.
    """

    token_ids: tuple[int, ...]
    """Generated ids, the end-of-turn token included when the policy wrote it."""
    logprobs: tuple[float, ...]
    """Log-probability of each id in nats under the distribution it was drawn from."""
    versions: tuple[int, ...]
    """Policy version whose weights produced each id."""
    finish_reason: Literal["stop", "length"]
    """`stop`: the policy ended its turn. `length`: the token budget did."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Receipt of an applied set of weights."""

    version: int
    """Policy version now served."""
    checksum: str
    """SHA-256 of the bytes that were loaded, computed by the engine's process."""
    seconds: float
    """Time from pause to resume: how long generation stood still."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start; the caller takes differences."""

    generated_tokens: int
    """Tokens written."""
    prompt_tokens: int
    """Tokens read."""
    cached_prompt_tokens: int
    """Of the read ones, those found in the prefix cache."""
    running: int
    """Requests being advanced now."""
    waiting: int
    """Requests queued inside the engine."""


class Engine(Protocol):
    """Methods raise `EngineFailed` when the engine is gone."""

    @property
    def version(self) -> int:
        """Policy version served to requests that start now."""
        ...

    async def start(self) -> None:
        """Load the model and warm up. Raises `EngineConfigError` for a model or setting that cannot be served."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Generation:
        """Continue `prompt_ids` until the end-of-turn token or `max_tokens`.

        Cancelling the coroutine aborts the request.
        """
        ...

    async def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each token after the first given those before it, temperature 1: `len(token_ids) - 1`
        values.

        Computed from the weights, never from cached prefixes: the parity probe rests on it.
        """
        ...

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """Load the set that a weight manifest describes (`docs/weight-sync.md`) without dropping requests in flight.

        Raises `WeightSyncRejected` when the set is incomplete, of wrong shape, not finite, or its checksum differs; the
        engine then serves what it served before.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End the engine and its processes. Idempotent."""
        ...
