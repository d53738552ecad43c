"""The error tree of rewards.

RewardError
├── DomainError        (also ValueError) a domain folder is malformed; names file, key and remedy
├── RewardOutOfRange   (also ValueError) a component left its declared range: the declaration is wrong, so the run stops
├── VerifierFailed     a verifier crashed, hung or returned something that is no number: an infrastructure error
└── UnparsableAnswer   raised by verifiers: nothing in the answer can be graded; it gets the lowest score
"""


class RewardError(Exception):
    """Base of what goes wrong between a transcript and its score."""


class DomainError(RewardError, ValueError):
    """A `domain.toml`, a task file or a domain's Python file cannot be used as it is."""


class RewardOutOfRange(RewardError, ValueError):
    """A reward component left the range that its domain declares; scaling it silently would bias the domain."""


class VerifierFailed(RewardError):
    """The verifier did not produce a finite number for each declared component."""


class UnparsableAnswer(RewardError):
    """The policy's answer cannot be read at all. The episode is a `policy_failure`, every component at its worst."""
