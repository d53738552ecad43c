"""The scripted engine: plays actions that a test wrote, without a model.

It keeps the promises of `Engine` that callers build on: versions per token, updates in the middle of requests,
manifests that are refused, cancellation, death. Log-probabilities are a fixed function of token and version, so that
two engines agree and a changed version shows.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from rollout_workers.engines.base import EngineStats, Generation, WeightUpdate
from rollout_workers.errors import EngineFailed, WeightSyncRejected
from rollout_workers.weight_manifest import WeightManifest, boot_id, choose_way, map_segment

Script = Callable[[tuple[int, ...]], Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]]
"""From the ids of a prompt to the ids of the action that follows it, with or without the end-of-turn token."""


class FakeEngine:
    """An engine that says what its script says."""

    def __init__(
        self,
        script: Script,
        *,
        eos_id: int,
        token_s: float = 0.0,
        refuse: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        """`token_s`: seconds a token takes. `refuse`: whether the request of this id fails."""
        self._script = script
        self._eos_id = eos_id
        self._token_s = token_s
        self._refuse = refuse
        self._version = 0
        self._failure: str | None = "the engine is not started"
        self._ended = asyncio.Event()
        self._running = 0
        self._generated_tokens = self._prompt_tokens = 0

    @property
    def version(self) -> int:
        """See `Engine.version`."""
        return self._version

    async def start(self) -> None:
        """See `Engine.start`."""
        self._failure = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Generation:
        """See `Engine.generate`. Raises `EngineFailed` when the script has nothing for the prompt."""
        self._check()
        if self._refuse(request_id):
            raise EngineFailed(f"request {request_id} is refused, as asked for")
        action = self._action(tuple(prompt_ids))
        finish_reason: Literal["stop", "length"] = "stop" if len(action) <= max_tokens else "length"
        logprobs: list[float] = []
        versions: list[int] = []
        self._running += 1
        try:
            for token in action[:max_tokens]:
                await self._take_time()
                logprobs.append(self._logprob(token))
                versions.append(self._version)
        finally:
            self._running -= 1
        self._prompt_tokens += len(prompt_ids)
        self._generated_tokens += len(versions)
        return Generation(action[:max_tokens], tuple(logprobs), tuple(versions), finish_reason)

    async def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """See `Engine.token_logprobs`."""
        self._check()
        self._prompt_tokens += len(token_ids)
        return tuple(self._logprob(token) for token in token_ids[1:])

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """See `Engine.update_weights`. Checks the manifest and its segment, the one way it knows; loads nothing."""
        self._check()
        began = time.perf_counter()
        offered = WeightManifest.parse(manifest)
        if offered.version < self._version:
            raise WeightSyncRejected(f"weights of version {offered.version} are older than those of {self._version}")
        if (way := choose_way(offered, boot_id(), gpu="")) != "segment":
            raise WeightSyncRejected(f"weights of version {offered.version}: the scripted engine has no {way}")
        map_segment(offered).close()
        self._version = offered.version
        return WeightUpdate(offered.version, offered.checksum, time.perf_counter() - began)

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return EngineStats(self._generated_tokens, self._prompt_tokens, 0, self._running, 0)

    async def close(self) -> None:
        """See `Engine.close`."""
        self.die("the engine is closed")

    def die(self, reason: str = "the engine's process ended") -> None:
        """Fail what is in flight and all that comes later, as a crash does."""
        self._failure = self._failure or reason
        self._ended.set()

    def _action(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        action = self._script.get(prompt) if isinstance(self._script, Mapping) else self._script(prompt)
        if action is None:
            raise EngineFailed(f"the script has no action for the prompt {prompt}")
        spoken = tuple(action)
        return spoken if spoken[-1:] == (self._eos_id,) else (*spoken, self._eos_id)

    def _logprob(self, token: int) -> float:
        return -(1 + (31 * token + 17 * self._version) % 97) / 97

    async def _take_time(self) -> None:
        if self._token_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), self._token_s)
        else:
            await asyncio.sleep(0)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(self._failure)
