"""The error tree of rollouts.

RolloutError
├── EngineConfigError   (also ValueError) the engine settings or the model cannot be used; names key and remedy
├── EngineFailed        the engine died or refused a request; episodes in it are infrastructure errors
├── WeightSyncRejected  offered weights were incomplete, corrupt or of the wrong version; the engine serves its old ones
└── PolicyFailed        raised by environments: the policy's action cannot be carried out; the episode ends, graded
"""


class RolloutError(Exception):
    """Base of what goes wrong between environment and engine."""


class EngineConfigError(RolloutError, ValueError):
    """The engine cannot be started with these settings or this model."""


class EngineFailed(RolloutError):
    """The engine is gone or answered with an error."""


class WeightSyncRejected(RolloutError):
    """A set of weights did not pass the checks before loading. The engine goes on with the weights it has."""


class PolicyFailed(RolloutError):
    """The policy's message is nothing that the environment can act on. Ends the episode with `policy_failure`."""
