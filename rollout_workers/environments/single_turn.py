"""One prompt, one answer, graded by a verifier."""

from collections.abc import Mapping

from reward.errors import UnparsableAnswer
from reward.task import Task
from rollout_workers.environment import EnvironmentContext, Observation
from rollout_workers.errors import PolicyFailed


class SingleTurn:
    """`environment = "single_turn"`: the policy's first message is the answer."""

    def __init__(self, context: EnvironmentContext) -> None:
        self._context = context
        self._task: Task | None = None
        self._answer: str | None = None

    async def reset(self, task: Task) -> Observation:
        """The task's prompt."""
        self._task = task
        return Observation(task.prompt)

    async def step(self, action: str) -> Observation:
        """Take the answer; it is graded later."""
        self._answer = action
        return Observation("", done=True)

    async def grade(self) -> Mapping[str, float]:
        """What the verifier says. Raises `PolicyFailed` for an answer that is none, or that was never finished."""
        assert self._task is not None, "reset() comes first"
        if self._answer is None:
            raise PolicyFailed("the answer was not finished")
        try:
            return await self._context.verifiers.grade(self._context.domain, self._task, self._answer)
        except UnparsableAnswer as error:
            raise PolicyFailed(str(error)) from error

    async def close(self) -> None:
        """Nothing to give back."""
