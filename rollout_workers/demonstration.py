"""Plays a task's reference solution through its real environment.

The transcript is a demonstration for the warm start, with the observations that a policy would see, and its score tells
whether the domain is sound: a reference solution has to score full marks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from reward.errors import DomainError
from reward.score import Score
from reward.task import Task
from rollout_workers.chat import Chat
from rollout_workers.engines.base import Generation
from rollout_workers.environment import EnvironmentContext
from rollout_workers.episode import play
from rollout_workers.types import Episode

UNBOUNDED: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class _Reader:
    """Speaks the reference solution, one message a turn, in the tokens a policy would write."""

    task: Task
    chat: Chat

    async def speak(self, prompt_ids: Sequence[int], *, turn: int, max_tokens: int) -> Generation:
        if turn >= len(self.task.solution):
            raise DomainError(f"the solution of task {self.task.id!r} does not end the episode; add its last message")
        ids = self.chat.message_ids(self.task.solution[turn])
        if len(ids) > max_tokens:
            raise DomainError(
                f"message {turn + 1} of the solution of task {self.task.id!r} has {len(ids)} tokens where {max_tokens} "
                "are allowed; raise the domain's max_tokens or engine.max_model_len"
            )
        return Generation(ids, (0.0,) * len(ids), (-1,) * len(ids), "stop")


async def demonstrate(
    task: Task, context: EnvironmentContext, chat: Chat, *, max_model_len: int = UNBOUNDED
) -> Episode:
    """The episode of the reference solution: log-probabilities 0, versions -1, and the score that it gets.

    Its score is an `infra_error` that says what is wrong when the task has no solution, when a message is too long, or
    when the solution stops before the episode does.
    """
    name = f"{task.domain}/{task.id}#demonstration"
    if not task.solution:
        score = Score.infra_error(f"task {task.id!r} has no `solution`; add one to its line in the task file")
        return Episode(name, task.domain, task.id, (), (), (), (), (), score, 0.0)
    return await play(
        task, _Reader(task, chat), episode_id=name, context=context, chat=chat, max_model_len=max_model_len
    )
