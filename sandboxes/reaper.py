"""Removes containers whose host is gone: those of one run, or of all runs once their deadline has passed."""

import contextlib
import time
from pathlib import Path

from sandboxes.docker import ContainerInfo, DockerEngine


async def containers(run: str | None = None) -> list[ContainerInfo]:
    """The containers of a run, or of all runs, oldest deadline first. Raises `EngineUnavailable`."""
    async with contextlib.aclosing(await DockerEngine.connect()) as engine:
        return sorted(await engine.containers(run), key=lambda container: container.deadline)


async def reap(run: str | None = None) -> list[ContainerInfo]:
    """Remove all containers of `run`, or without one those that are past their deadline; what was removed.

    Their socket directories go with them. Raises `EngineUnavailable`.
    """
    async with contextlib.aclosing(await DockerEngine.connect()) as engine:
        doomed = [c for c in await engine.containers(run) if run is not None or c.deadline < time.time()]
        for container in doomed:
            await engine.remove(container.id)
            _remove_socket(container.socket_dir)
        return doomed


def _remove_socket(directory: str) -> None:
    """The directory comes from a label: nothing in it but the socket is touched."""
    if directory:
        with contextlib.suppress(OSError):
            Path(directory, "agent.sock").unlink(missing_ok=True)
            Path(directory).rmdir()
