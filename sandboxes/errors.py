"""The error tree of sandboxes.

SandboxError
├── SandboxConfigError   (also ValueError) the user's configuration asks for something that cannot be
├── EngineUnavailable    no Docker engine answers
├── ImageBuildFailed     the base image could not be had from a registry nor built
├── NoCapacity           no sandbox became free before the deadline
├── FilesRefused         files cannot be written or read (disk full, a directory in the way, a tree too large)
└── SandboxLost          the sandbox or its agent died, or broke the protocol; the episode is an infrastructure error
"""


class SandboxError(Exception):
    """Base of all that goes wrong below a sandbox: infrastructure, never the policy's fault."""


class SandboxConfigError(SandboxError, ValueError):
    """A sandbox setting cannot be satisfied; the message names the key and the remedy."""


class EngineUnavailable(SandboxError):
    """The Docker engine does not answer; the message says how to start it."""


class ImageBuildFailed(SandboxError):
    """The base image is neither in the engine nor in a registry and its build failed."""


class NoCapacity(SandboxError):
    """Every sandbox of the host stayed leased until the deadline passed."""


class FilesRefused(SandboxError):
    """The sandbox works, but its disk is full, a path is in use by a directory, or a tree is too large to read."""


class SandboxLost(SandboxError):
    """A sandbox stopped answering while leased. What happened in it cannot be scored."""
