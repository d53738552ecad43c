"""Plays one episode: environment and engine in turn until done, then the grade. Nothing else.

The transcript is only ever appended to: the ids that the engine wrote, then the ids of the observation. So the trained
tokens are the engine's, and each request extends the one before, which the engine's prefix cache needs.

A message that the token budget cut is not carried out: half a command or half a program is not what the policy meant.
The episode ends there as `truncated` and is graded on what was done before.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reward.config import DomainConfig
from reward.errors import RewardOutOfRange
from reward.score import Score, Status
from reward.scoring import lowest, score
from reward.task import Task
from rollout_workers.chat import Chat
from rollout_workers.engines.base import Engine, Generation
from rollout_workers.environment import Environment, EnvironmentContext, Observation
from rollout_workers.environments.registry import build_environment
from rollout_workers.errors import EngineConfigError, PolicyFailed
from rollout_workers.types import Episode, Turn

SEED_STRIDE = 1_000_003
"""Turn k of an episode samples with its seed + k times this, so that neighbouring seeds do not share turns."""
CLOSE_TIMEOUT_S = 30.0
"""Longest time an environment may take to give everything back."""


@dataclass(slots=True)
class Transcript:
    """An episode in the making. The four lists have the same length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def read(self, ids: Sequence[int]) -> None:
        """Append tokens of prompt or environment."""
        self._append(ids, [0] * len(ids), [0.0] * len(ids), [-1] * len(ids))

    def write(self, generation: Generation) -> None:
        """Append tokens of the policy."""
        ids = generation.token_ids
        self._append(ids, [1] * len(ids), generation.logprobs, generation.versions)

    def _append(
        self, ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        assert len(ids) == len(mask) == len(logprobs) == len(versions), "an engine's tuples have the same length"
        self.token_ids.extend(ids)
        self.loss_mask.extend(mask)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)


class Speaker(Protocol):
    """Whoever writes the policy's messages: an engine, or a reference solution (`demonstration.py`)."""

    async def speak(self, prompt_ids: Sequence[int], *, turn: int, max_tokens: int) -> Generation:
        """The message of a turn that follows `prompt_ids`."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSpeaker:
    """The policy itself."""

    engine: Engine
    episode_id: str
    temperature: float
    seed: int | None

    async def speak(self, prompt_ids: Sequence[int], *, turn: int, max_tokens: int) -> Generation:
        """Ask the engine for at most `max_tokens` tokens."""
        return await self.engine.generate(
            prompt_ids,
            request_id=f"{self.episode_id}/{turn}",
            max_tokens=max_tokens,
            temperature=self.temperature,
            seed=None if self.seed is None else self.seed + turn * SEED_STRIDE,
        )


async def run_episode(
    task: Task,
    *,
    episode_id: str,
    context: EnvironmentContext,
    engine: Engine,
    chat: Chat,
    max_model_len: int,
    temperature: float,
    seed: int | None,
) -> Episode:
    """Play `task` once with the policy that `engine` serves.

    `max_model_len` bounds the whole transcript in tokens. Whatever fails outside the policy makes the episode an
    `infra_error`; only `RewardOutOfRange` (a wrong declaration, which retrying cannot mend) and cancellation come out.
    """
    speaker = EngineSpeaker(engine, episode_id, temperature, seed)
    return await play(task, speaker, episode_id=episode_id, context=context, chat=chat, max_model_len=max_model_len)


async def play(
    task: Task,
    speaker: Speaker,
    *,
    episode_id: str,
    context: EnvironmentContext,
    chat: Chat,
    max_model_len: int,
) -> Episode:
    """`run_episode` for any speaker."""
    config = context.domain.config
    transcript = Transcript()
    started = time.monotonic()
    deadline = asyncio.timeout(config.episode_timeout_s)
    try:
        async with deadline:
            result = await _play(task, speaker, transcript, context, chat, max_model_len)
    except RewardOutOfRange:
        raise
    except Exception as error:  # noqa: BLE001 - the one place where what fails outside the policy becomes a status
        result = Score.infra_error(_sentence(error, config, deadline.expired()))
    return Episode(
        id=episode_id,
        domain=config.name,
        task_id=task.id,
        token_ids=tuple(transcript.token_ids),
        loss_mask=tuple(transcript.loss_mask),
        logprobs=tuple(transcript.logprobs),
        versions=tuple(transcript.versions),
        turns=tuple(transcript.turns),
        score=result,
        seconds=time.monotonic() - started,
    )


async def _play(
    task: Task,
    speaker: Speaker,
    transcript: Transcript,
    context: EnvironmentContext,
    chat: Chat,
    max_model_len: int,
) -> Score:
    environment = build_environment(context)
    try:
        status, detail = await _interact(task, speaker, transcript, environment, context, chat, max_model_len)
        return await _grade(task, environment, context.domain.config, status, detail)
    finally:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):  # the episode's own deadline may have passed already
            await environment.close()


async def _interact(
    task: Task,
    speaker: Speaker,
    transcript: Transcript,
    environment: Environment,
    context: EnvironmentContext,
    chat: Chat,
    max_model_len: int,
) -> tuple[Status, str]:
    """Turns until someone ends the episode; returns what ended it."""
    config = context.domain.config
    observation = await environment.reset(task)
    pending: Sequence[int] = chat.prompt_ids(config.system_prompt, observation.text)
    for turn in range(config.max_turns):
        room = max_model_len - len(transcript.token_ids) - len(pending)
        if room < 1 and turn == 0:
            raise EngineConfigError(
                f"the prompt of task {task.id!r} has {len(pending)} tokens, which leaves no room in "
                f"engine.max_model_len = {max_model_len}: raise it"
            )
        if room < 1:
            return Status.TRUNCATED, f"the transcript reached {max_model_len} tokens"
        transcript.read(pending)
        first = len(transcript.token_ids)
        began = time.monotonic()
        generation = await speaker.speak(transcript.token_ids, turn=turn, max_tokens=min(config.max_tokens, room))
        generated = time.monotonic()
        transcript.write(generation)
        action = chat.decode(generation.token_ids)
        observation = Observation("")
        try:
            if generation.finish_reason == "length":
                cut = f"message {turn + 1} reached {len(generation.token_ids)} tokens and was not carried out"
                return Status.TRUNCATED, cut
            observation = await environment.step(action)
        except PolicyFailed as error:
            return Status.POLICY_FAILURE, str(error)
        finally:  # whatever the action did, it is on record
            last, now = len(transcript.token_ids), time.monotonic()
            turns = transcript.turns
            turns.append(Turn(action, observation.text, first, last, generated - began, now - generated))
        if observation.done:
            return Status.OK, ""
        pending = chat.observation_ids(observation.text)
    return Status.TRUNCATED, f"the episode reached {config.max_turns} turns"


async def _grade(task: Task, environment: Environment, config: DomainConfig, status: Status, detail: str) -> Score:
    """The environment's grade, or the worst one when the policy left nothing to grade."""
    try:
        raw = await environment.grade()
    except PolicyFailed as error:
        raw = lowest(config, task)
        if status is Status.OK:
            status, detail = Status.POLICY_FAILURE, str(error)
    return score(config, task, raw, status, detail, task.data.get("labels"))


def _sentence(error: Exception, config: DomainConfig, expired: bool) -> str:
    """What the error says, in one line; errors of ours and others' alike."""
    if expired and isinstance(error, TimeoutError):
        return f"the episode passed its deadline of {config.episode_timeout_s:g} s"
    text = " ".join(str(error).split())[:500]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
