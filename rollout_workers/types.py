"""Wire types of rollouts: what a worker sends back. Plain data, picklable, free of torch, vLLM and Ray."""

from dataclasses import dataclass

from reward.score import Score


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy message and what the environment answered, as text for people and replays.

    Example: `Turn(action="ls", observation="a.txt\\n", first_token=31, last_token=34, generate_s=0.02,
    environment_s=0.004)`.
    """

    action: str
    """The policy's message, decoded from its tokens for the environment. Never encoded again."""
    observation: str
    """The environment's answer; empty after the last turn."""
    first_token: int
    """Index in `Episode.token_ids` of the first token of the action."""
    last_token: int
    """Index one past the last token of the action."""
    generate_s: float
    """Seconds the engine took."""
    environment_s: float
    """Seconds the environment took."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The transcript of one attempt at one task. The four token tuples have the same length T.

    Example of a single-turn episode with prompt ids (5, 6), answered by ids (7, 2) under policy version 3:
    `token_ids=(5, 6, 7, 2), loss_mask=(0, 0, 1, 1), logprobs=(0.0, 0.0, -0.2, -0.1), versions=(-1, -1, 3, 3)`.
    """

    id: str
    """`<domain>/<task>#<batch>.<index>`, unique in a run."""
    domain: str
    """Name of the task's domain."""
    task_id: str
    """Id of the task."""
    token_ids: tuple[int, ...]
    """Prompt, actions and observations, exactly the ids that the engine read and wrote."""
    loss_mask: tuple[int, ...]
    """1 where the policy wrote the token, 0 where prompt or environment did."""
    logprobs: tuple[float, ...]
    """Log-probability in nats of each policy token under the engine's sampling distribution; 0.0 elsewhere."""
    versions: tuple[int, ...]
    """Policy version that wrote each policy token; -1 elsewhere."""
    turns: tuple[Turn, ...]
    """The same as text, a turn a policy message."""
    score: Score
    """How it was graded."""
    seconds: float
    """Wall time from reset to grade."""

    @property
    def policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(self.loss_mask)
