"""The error tree of jobs, and how any error of ours becomes an exit code.

OrchestratorError
├── SpecError        (also ValueError) a job file is malformed; names file, key and remedy
├── ClusterError     Ray cannot be started or reached
├── DomainFailing    a domain yields nothing but infrastructure errors; names it and the first error
├── ParityBroken     an engine computes with other weights than the trainer's, also after a reload
└── RunStalled       a part of the loop made no progress before its deadline; names the part
"""


class OrchestratorError(Exception):
    """Base of what goes wrong between a job file and its report."""


class SpecError(OrchestratorError, ValueError):
    """A job file cannot be run as it is."""


class ClusterError(OrchestratorError):
    """The Ray cluster or one of its actors is not there."""


class DomainFailing(OrchestratorError):
    """Every recent episode of a domain was an infrastructure error: going on would train without it unnoticed."""


class ParityBroken(OrchestratorError):
    """Log-probabilities of engine and trainer differ by more than the tolerance, twice in a row."""


class RunStalled(OrchestratorError):
    """A wait passed its deadline."""
