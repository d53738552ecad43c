"""The error tree of training.

TrainerError
├── PolicyError        (also ValueError) the model directory is missing, incomplete or unfit; names what to do
├── PolicyNotSaved     a policy cannot be written; nothing is left of it
├── TrainingDiverged   loss or gradients are not finite
├── CheckpointError    a checkpoint cannot be written or read; an older one stays usable
└── PublishError       the weights cannot be put where engines read them
"""


class TrainerError(Exception):
    """Base of what goes wrong in training."""


class PolicyError(TrainerError, ValueError):
    """The policy cannot be made, loaded or trained as asked."""


class PolicyNotSaved(TrainerError):
    """The disk did not take a policy."""


class TrainingDiverged(TrainerError):
    """A step produced numbers that are not finite; nothing was applied."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or is not whole."""


class PublishError(TrainerError):
    """The weights could not be exported."""
