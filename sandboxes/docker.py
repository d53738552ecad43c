"""The Docker engine, and the only place that knows the Docker SDK. Calls run in threads, each under a deadline."""

import asyncio
import contextlib
import io
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils import kwargs_from_env

from sandboxes.config import SandboxConfig
from sandboxes.errors import EngineUnavailable, SandboxConfigError, SandboxError

RUN_LABEL = "crosstrain.run"
HOST_LABEL = "crosstrain.host"
DEADLINE_LABEL = "crosstrain.deadline"
SOCKET_LABEL = "crosstrain.socket"
RECIPE_LABEL = "crosstrain.recipe"
CALL_TIMEOUT_S = 60
"""Deadline of one engine call. Making a container takes half a second, much more when many are made at once."""
SHM_MB = 16
"""Size of `/dev/shm` in a sandbox."""
INODES = 16384
"""Largest number of files in each writable directory."""
DEFAULT_HOST = "unix:///var/run/docker.sock"
T = TypeVar("T")
REMEDY = "start it (`scripts/setup` does, or `systemctl start docker`) or set DOCKER_HOST"


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """A container of ours.

    Example: `ContainerInfo("9f…", "crosstrain-r1-7c1d", "r1", "node-1", 1767225600.0, "/tmp/ct/7c1d", "running")`.
    """

    id: str
    """The engine's id."""
    name: str
    """Its name."""
    run: str
    """Run it belongs to."""
    host: str
    """Machine whose sandbox host made it."""
    deadline: float
    """Unix time after which it is a leftover."""
    socket_dir: str
    """Directory on the machine that holds its agent's socket."""
    state: str
    """`created`, `running`, `exited`…"""


class DockerEngine:
    """A connection to the engine at DOCKER_HOST or the default socket."""

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client

    @classmethod
    async def connect(cls) -> "DockerEngine":
        """Raises `EngineUnavailable` when no engine answers."""
        return cls(await _in_thread(_client))

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        self._client.close()

    async def create(self, config: SandboxConfig, name: str, labels: Mapping[str, str], socket_dir: Path) -> str:
        """Make and start a sandbox's container; its id. Raises `SandboxConfigError` when there is no such image."""
        return await _in_thread(self._create, config, name, dict(labels), socket_dir)

    def _create(self, config: SandboxConfig, name: str, labels: dict[str, str], socket_dir: Path) -> str:
        client = self._client
        tmpfs = f"rw,exec,nosuid,nodev,size={config.disk_mb}m,nr_inodes={INODES},uid=1000,gid=1000,mode=0755"
        limits = client.create_host_config(
            network_mode="none",
            mem_limit=config.memory_mb << 20,
            memswap_limit=config.memory_mb << 20,
            pids_limit=config.pids,
            nano_cpus=int(config.cpus * 1e9),
            shm_size=SHM_MB << 20,
            read_only=True,
            tmpfs={"/work": tmpfs, "/tmp": tmpfs},  # noqa: S108 - inside the sandbox
            binds=[f"{socket_dir}:/crosstrain/socket:rw"],
            cap_drop=["ALL"],
            cap_add=["SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges"],
            init=False,
            auto_remove=True,
            log_config={"Type": "none"},
        )
        try:
            made = client.create_container(
                config.image,
                ["python3", "-E", "-s", "-S", "-m", "agent", str(config.lifetime_s)],
                name=name,
                hostname="sandbox",
                stop_signal="SIGKILL",
                user="0:0",
                working_dir="/crosstrain",
                labels=labels,
                host_config=limits,
            )
        except ImageNotFound:
            raise SandboxConfigError(
                f"sandboxes.image = {config.image!r} is not in the Docker engine: run `crosstrain sandboxes build`"
            ) from None
        client.start(made["Id"])
        return made["Id"]

    async def containers(self, run: str | None = None) -> list[ContainerInfo]:
        """All containers of a run, or of all runs, in any state."""
        label = RUN_LABEL if run is None else f"{RUN_LABEL}={run}"
        found = await _in_thread(self._client.containers, all=True, filters={"label": label})
        return [_info(entry) for entry in found]

    async def remove(self, container: str) -> None:
        """Kill and remove a container. One that is gone, or going, is no error."""
        await _in_thread(self._remove, container)

    def _remove(self, container: str) -> None:
        try:
            self._client.remove_container(container, v=True, force=True)
        except NotFound:
            return
        except APIError as error:
            if error.status_code != requests.codes.conflict:
                raise
        # The engine is removing it, because it ended by itself: wait for that.
        deadline = time.monotonic() + 10
        with contextlib.suppress(NotFound):
            while time.monotonic() < deadline:
                self._client.inspect_container(container)
                time.sleep(0.05)

    async def labels(self, image: str) -> dict[str, str] | None:
        """Labels of an image; None when the engine does not have it."""
        return await _in_thread(self._labels, image)

    def _labels(self, image: str) -> dict[str, str] | None:
        try:
            return self._client.inspect_image(image)["Config"]["Labels"] or {}
        except ImageNotFound:
            return None

    async def import_image(self, archive: Iterable[bytes], image: str) -> None:
        """Make an image of a tar archive of a root file system."""
        repository, _, tag = image.partition(":")
        await _in_thread(self._client.import_image, iter(archive), repository, tag, stream_src=True, timeout_s=600.0)

    async def build_image(self, context: bytes, image: str, timeout_s: float) -> None:
        """Build an image from a tar archive with a Dockerfile. Raises `SandboxError` with the step that failed."""
        await _in_thread(self._build, context, image, timeout_s=timeout_s)

    async def remove_old_images(self) -> None:
        """Remove images of ours that a newer one has taken the name of, unless a container uses them."""
        await _in_thread(self._client.prune_images, {"dangling": True, "label": RECIPE_LABEL})

    def _build(self, context: bytes, image: str) -> None:
        last = ""
        proxies = {name: os.environ[name] for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ}
        for line in self._client.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            tag=image,
            buildargs=proxies,
            rm=True,
            forcerm=True,
            decode=True,
        ):
            if "error" in line:
                raise SandboxError(f"{line['error'].strip()} ({last})")
            last = line.get("stream", "").strip() or last

    async def pull(self, image: str, timeout_s: float) -> bool:
        """Whether a registry gave the image."""
        return await _in_thread(self._pull, image, timeout_s=timeout_s)

    def _pull(self, image: str) -> bool:
        try:
            self._client.pull(image)
        except (APIError, NotFound):
            return False
        return True

    async def remove_image(self, image: str) -> None:
        """Remove an image that no container uses; others stay."""
        await _in_thread(self._remove_image, image)

    def _remove_image(self, image: str) -> None:
        with contextlib.suppress(APIError):
            self._client.remove_image(image)


def _client() -> docker.APIClient:
    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    if host.startswith("unix://"):
        # Before the SDK tries, because it would tell less of why, and not close its socket.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(host.removeprefix("unix://"))
            except OSError as error:
                raise EngineUnavailable(f"no Docker engine answers at {host} ({error.strerror}): {REMEDY}") from None
    return docker.APIClient(version="auto", timeout=CALL_TIMEOUT_S, **kwargs_from_env())


def _info(entry: Mapping[str, Any]) -> ContainerInfo:
    labels = entry["Labels"]
    return ContainerInfo(
        id=entry["Id"],
        name=(entry["Names"] or ["?"])[0].lstrip("/"),
        run=labels[RUN_LABEL],
        host=labels.get(HOST_LABEL, ""),
        deadline=float(labels.get(DEADLINE_LABEL, 0)),
        socket_dir=labels.get(SOCKET_LABEL, ""),
        state=entry["State"],
    )


async def _in_thread(function: Callable[..., T], *args: Any, timeout_s: float = CALL_TIMEOUT_S, **kwargs: Any) -> T:
    """The one place where exceptions of the SDK and of its HTTP library become ours."""

    def call() -> T:
        with _translated():
            return function(*args, **kwargs)

    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(call)
    except TimeoutError:
        raise EngineUnavailable(f"the Docker engine did not answer within {timeout_s:.0f} s: {REMEDY}") from None


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (requests.ConnectionError, requests.Timeout) as error:
        raise EngineUnavailable(f"the Docker engine does not answer: {REMEDY}") from error
    except APIError as error:
        raise SandboxError(f"the Docker engine refused: {error.explanation or error}") from error
    except DockerException as error:  # raised while connecting, around the error of the HTTP library
        raise EngineUnavailable(f"there is no Docker engine: {REMEDY}") from error
