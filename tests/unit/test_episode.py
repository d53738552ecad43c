"""The episode loop: ids and masks are the engine's, budgets end an episode, failures outside the policy score
nothing."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward.config import DomainConfig
from reward.domain import Domain
from reward.errors import RewardOutOfRange
from reward.score import Status
from reward.task import Task
from reward.verifiers.pool import VerifierPool
from rollout_workers.chat import ByteChat
from rollout_workers.demonstration import demonstrate
from rollout_workers.engines.base import EngineStats, Generation, WeightUpdate
from rollout_workers.environment import EnvironmentContext
from rollout_workers.episode import run_episode
from rollout_workers.errors import EngineFailed
from rollout_workers.types import Episode
from sandboxes.fake import FakeProvider

ENVIRONMENT = '''
import asyncio
from rollout_workers.environment import Observation
from rollout_workers.errors import PolicyFailed

CLOSED = []

class Guess:
    """Ends with the message `end`; raises or stalls where the task says so."""

    def __init__(self, context):
        self._messages = []

    async def reset(self, task):
        self._data = task.data
        await self._fail("reset")
        return Observation(task.prompt)

    async def step(self, action):
        self._messages.append(action)
        if action == "nonsense":
            raise PolicyFailed("nonsense cannot be carried out")
        await self._fail("step")
        return Observation("saw " + action, done=action == "end")

    async def grade(self):
        await self._fail("grade")
        if self._data.get("nothing_to_grade"):
            raise PolicyFailed("nothing was left")
        return self._data.get("raw", {"success": float("right" in self._messages)})

    async def close(self):
        CLOSED.append(list(self._messages))
        await self._fail("close")

    async def _fail(self, where):
        if self._data.get("fail") == where:
            raise OSError(f"{where} broke\\n  badly")
        if self._data.get("stall") == where:
            await asyncio.sleep(3600)
'''


@dataclass
class Script:
    """An engine that says given messages; ids are bytes, each with its own log-probability and the version of its
    turn."""

    messages: Sequence[str]
    version: int = 3
    requests: list[tuple[tuple[int, ...], str, int, int | None]] = field(default_factory=list)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Generation:
        self.requests.append((tuple(prompt_ids), request_id, max_tokens, seed))
        turn = len(self.requests) - 1
        if self.messages[turn] == "<dies>":
            raise EngineFailed("the engine is gone")
        whole = (*self.messages[turn].encode(), ByteChat.eos_id)
        ids = whole[:max_tokens]
        logprobs = tuple(-0.001 * (index + 1) for index in range(len(ids)))
        return Generation(ids, logprobs, (self.version + turn,) * len(ids), "stop" if ids == whole else "length")

    async def start(self) -> None: ...
    async def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        raise NotImplementedError

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("guess")
    (folder / "guess.py").write_text(ENVIRONMENT)
    return folder


def context(folder: Path, **keys: Any) -> EnvironmentContext:
    config = {
        "name": "guess",
        "environment": "guess.py:Guess",
        "max_turns": 4,
        "max_tokens": 16,
        "components": {"success": {"range": [0, 1]}},
        **keys,
    }
    domain = Domain(DomainConfig.model_validate(config), folder, "0", (), ())
    return EnvironmentContext(domain, FakeProvider(), VerifierPool(1))


def closed(folder: Path) -> list[list[str]]:
    from reward.user_code import load_reference

    return load_reference(folder, "guess.py:CLOSED")


async def play(
    folder: Path, messages: Sequence[str], data: Mapping[str, Any] | None = None, max_model_len: int = 4096, **keys: Any
) -> tuple[Episode, Script]:
    engine = Script(messages)
    before = len(closed(folder))
    try:
        episode = await run_episode(
            Task("t", "guess", "train", "guess:", data or {}),
            episode_id="guess/t#0.0",
            context=context(folder, **keys),
            engine=engine,
            chat=ByteChat(),
            max_model_len=max_model_len,
            temperature=1.0,
            seed=7,
        )
    finally:
        assert len(closed(folder)) == before + 1, "the environment is closed once, whatever happens"
    return episode, engine


def check_invariants(episode: Episode, engine: Script, max_model_len: int = 4096) -> None:
    """What the trainer relies on."""
    ids, mask = episode.token_ids, episode.loss_mask
    assert len(ids) == len(mask) == len(episode.logprobs) == len(episode.versions) <= max_model_len
    written: list[int] = []
    for turn, (prompt, _, _, _) in zip(episode.turns, engine.requests, strict=False):
        assert prompt == ids[: turn.first_token], "each request is the transcript so far"
        assert all(mask[turn.first_token : turn.last_token])
        written.extend(range(turn.first_token, turn.last_token))
    assert [index for index, bit in enumerate(mask) if bit] == written, "1 on the policy's tokens and nowhere else"
    for index, bit in enumerate(mask):
        assert bit == (episode.versions[index] >= 0) == (episode.logprobs[index] < 0)
    assert not mask or mask[-1] == 1, "nothing follows the policy's last token"


MESSAGES = st.lists(st.sampled_from(["right", "wrong", "", "nonsense", "ünïcode", "x" * 15, "x" * 16, "y" * 40, "end"]))


@given(messages=MESSAGES, max_model_len=st.integers(7, 90), max_turns=st.integers(1, 5))
def test_ids_and_masks_are_the_engines(folder, messages, max_model_len, max_turns):
    script = [*messages, *["end"] * 5]
    episode, engine = asyncio.run(play(folder, script, max_model_len=max_model_len, max_turns=max_turns))
    check_invariants(episode, engine, max_model_len)
    said = [bytes(i for i in episode.token_ids[t.first_token : t.last_token] if i < 256) for t in episode.turns]
    for text, turn, wanted in zip(said, episode.turns, script, strict=False):
        assert wanted.encode().startswith(text)
        assert turn.action == text.decode(errors="replace")
    carried_out = closed(folder)[-1]
    cut = len(episode.turns) - len(carried_out)
    assert carried_out == [turn.action for turn in episode.turns][: len(carried_out)]
    assert cut in (0, 1)
    assert 1 <= len(episode.turns) <= max_turns
    ended = "truncated" if cut or not carried_out else {"end": "ok", "nonsense": "policy_failure"}.get(carried_out[-1])
    assert episode.score.status == (ended or "truncated")
    assert episode.score.passed == ("right" in carried_out)


async def test_a_transcript_alternates_between_policy_and_environment(folder):
    episode, engine = await play(folder, ["a", "end"], system_prompt="sys ")
    assert bytes(i for i in episode.token_ids if i < 256) == b"sys guess:asaw aend"
    assert episode.loss_mask == (0,) * 10 + (1, 1) + (0,) * 5 + (1,) * 4
    assert episode.versions == (-1,) * 10 + (3, 3) + (-1,) * 5 + (4,) * 4
    assert [(turn.action, turn.observation) for turn in episode.turns] == [("a", "saw a"), ("end", "saw end")]
    assert [request for _, request, _, _ in engine.requests] == ["guess/t#0.0/0", "guess/t#0.0/1"]
    assert len({seed for _, _, _, seed in engine.requests}) == 2
    check_invariants(episode, engine)


async def test_a_cut_message_is_not_carried_out(folder):
    episode, engine = await play(folder, ["right", "end" + "x" * 20])
    assert episode.score.status is Status.TRUNCATED
    assert "message 2 reached 16 tokens" in episode.score.detail
    assert episode.score.passed, "what was done before is graded"
    assert closed(folder)[-1] == ["right"]
    check_invariants(episode, engine)


async def test_the_turn_budget_truncates(folder):
    episode, _ = await play(folder, ["a", "right", "b", "c"])
    assert (episode.score.status, episode.score.passed) == (Status.TRUNCATED, True)
    assert closed(folder)[-1] == ["a", "right", "b", "c"]


async def test_the_model_length_bounds_the_message_and_the_transcript(folder):
    episode, engine = await play(folder, ["a", "b"], max_model_len=6 + 2 + 5 + 1)
    assert engine.requests[1][2] == 1
    assert episode.score.status is Status.TRUNCATED
    episode, engine = await play(folder, ["a", "b"], max_model_len=6 + 2 + 5)
    assert len(engine.requests) == 1
    assert episode.score.detail == "the transcript reached 13 tokens"


async def test_a_prompt_that_does_not_fit_says_nothing_about_the_policy(folder):
    episode, engine = await play(folder, ["a"], max_model_len=6)
    assert episode.score.status is Status.INFRA_ERROR
    assert "engine.max_model_len = 6: raise it" in episode.score.detail
    assert not engine.requests
    assert episode.token_ids == ()


async def test_a_policy_failure_ends_the_episode_and_is_graded(folder):
    episode, _ = await play(folder, ["right", "nonsense", "end"])
    assert (episode.score.status, episode.score.passed) == (Status.POLICY_FAILURE, True)
    assert episode.score.detail == "nonsense cannot be carried out"
    assert len(episode.turns) == 2


async def test_nothing_to_grade_scores_the_worst(folder):
    episode, _ = await play(folder, ["right", "end"], {"nothing_to_grade": True})
    assert (episode.score.status, episode.score.total) == (Status.POLICY_FAILURE, 0.0)
    assert episode.score.detail == "nothing was left"
    episode, _ = await play(folder, ["x" * 20], {"nothing_to_grade": True})
    assert (episode.score.status, episode.score.total) == (Status.TRUNCATED, 0.0)


@pytest.mark.parametrize("where", ["reset", "step", "grade", "close"])
async def test_a_failing_environment_is_an_infrastructure_error_in_one_line(folder, where):
    episode, engine = await play(folder, ["right", "end"], {"fail": where})
    assert episode.score.status is Status.INFRA_ERROR
    assert episode.score.detail == f"OSError: {where} broke badly"
    assert math.isnan(episode.score.total)
    check_invariants(episode, engine)


@pytest.mark.parametrize("where", ["reset", "step", "grade"])
async def test_an_episode_that_passes_its_deadline_is_an_infrastructure_error(folder, where):
    episode, _ = await play(folder, ["end"], {"stall": where}, episode_timeout_s=0.05)
    assert episode.score.status is Status.INFRA_ERROR
    assert episode.score.detail == "the episode passed its deadline of 0.05 s"


async def test_a_dead_engine_is_an_infrastructure_error(folder):
    episode, _ = await play(folder, ["right", "<dies>"])
    assert episode.score.status is Status.INFRA_ERROR
    assert episode.score.detail == "EngineFailed: the engine is gone"
    assert len(episode.turns) == 1


@pytest.mark.parametrize("raw", [{"success": math.nan}, {}, {"success": 1, "bonus": 2}, {"success": "full"}], ids=repr)
async def test_an_unsound_grade_is_an_infrastructure_error(folder, raw):
    episode, _ = await play(folder, ["end"], {"raw": raw})
    assert episode.score.status is Status.INFRA_ERROR
    assert episode.score.detail.startswith("VerifierFailed: domain 'guess'")


async def test_a_reward_out_of_range_stops_the_run(folder):
    with pytest.raises(RewardOutOfRange, match="'success' = 2 on task 't'"):
        await play(folder, ["end"], {"raw": {"success": 2}})


async def test_cancelling_comes_out_and_closes_the_environment(folder):
    task = asyncio.create_task(play(folder, ["end"], {"stall": "step"}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_labels_of_the_task_reach_the_score(folder):
    episode, _ = await play(folder, ["end"], {"labels": {"kind": "easy"}})
    assert episode.score.labels == {"kind": "easy"}


# Demonstrations.


async def show(folder: Path, solution: Sequence[str], **keys: Any) -> Episode:
    task = Task("t", "guess", "train", "guess:", {}, tuple(solution))
    return await demonstrate(task, context(folder, **keys), ByteChat(), max_model_len=4096)


async def test_a_demonstration_is_the_solution_with_real_observations(folder):
    episode = await show(folder, ["right", "end"])
    assert bytes(i for i in episode.token_ids if i < 256) == b"guess:rightsaw rightend"
    assert episode.loss_mask == (0,) * 6 + (1,) * 6 + (0,) * 9 + (1,) * 4
    assert set(episode.logprobs) == {0.0}
    assert set(episode.versions) == {-1}
    assert (episode.score.status, episode.score.passed) == (Status.OK, True)


@pytest.mark.parametrize(
    ("solution", "says"),
    [
        ([], "task 't' has no `solution`"),
        (["right"], "the solution of task 't' does not end the episode"),
        (["r" * 16], "message 1 of the solution of task 't' has 17 tokens where 16 are allowed"),
    ],
)
async def test_a_solution_that_cannot_be_shown_says_why(folder, solution, says):
    episode = await show(folder, solution)
    assert episode.score.status is Status.INFRA_ERROR
    assert says in episode.score.detail


async def test_a_solution_may_end_with_the_turns(folder):
    episode = await show(folder, ["right"], max_turns=1)
    assert (episode.score.status, episode.score.passed) == (Status.TRUNCATED, True)
