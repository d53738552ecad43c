"""The base image of sandboxes: found in the engine, else made from a registry's image, else from Debian packages.

It is made in two steps, so that a new agent does not mean a new system: the root file system (a registry's image, or
what debootstrap makes), then a layer with the agent. A label with the hash of all that went in says whether an image is
the one that this version needs; images made `FROM` it inherit the label.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import io
import logging
import os
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from sandboxes.apt import release_source
from sandboxes.config import SandboxConfig
from sandboxes.docker import RECIPE_LABEL, DockerEngine
from sandboxes.errors import EngineUnavailable, ImageBuildFailed, SandboxConfigError, SandboxError
from sandboxes.rootfs import archive, root_filesystem, scratch

BASE_IMAGE = SandboxConfig.model_fields["image"].default
REGISTRY_VARIABLE = "CROSSTRAIN_BASE_IMAGE"
"""Environment variable with the registry's image to begin with; empty goes straight to Debian packages."""
REGISTRY_IMAGE = "debian:bookworm-slim"
PULL_TIMEOUT_S = 90.0
BUILD_TIMEOUT_S = 600.0
PACKAGES = ("python3", "git", "gawk", "procps")
"""Beside what every Debian has: bash, coreutils, diffutils, findutils, grep, sed, tar."""
AGENT = Path(__file__).parent / "agent"
INSTALL = "RUN apt-get update && apt-get install -y --no-install-recommends {} && rm -rf /var/lib/apt/lists/*"
DOCKERFILE = """\
FROM {parent}
{install}
RUN groupadd --gid 1000 sandbox \\
 && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /work --shell /bin/bash sandbox \\
 && mkdir -p /work /crosstrain/socket && chmod 0700 /crosstrain
COPY agent /crosstrain/agent
RUN cd /crosstrain && python3 -m compileall -q agent
LABEL {label}={recipe}
"""
Progress = Callable[[str], None]

log = logging.getLogger(__name__)


async def require_image(engine: DockerEngine, image: str) -> None:
    """Make sure that sandboxes can run from `image`.

    Raises `ImageBuildFailed` for the base image, `SandboxConfigError` for one of the user's that is missing or too old.
    """
    if image == BASE_IMAGE:
        await ensure_base_image(engine)
        return
    labels = await engine.labels(image)
    if labels is None:
        raise SandboxConfigError(f"sandboxes.image = {image!r} is not in the Docker engine: build or pull it")
    if labels.get(RECIPE_LABEL) != recipe():
        raise SandboxConfigError(
            f"sandboxes.image = {image!r} lacks this version's agent: run `crosstrain sandboxes build`, then build it "
            f"again `FROM {BASE_IMAGE}`"
        )


async def ensure_base_image(engine: DockerEngine, progress: Progress = log.info) -> bool:
    """Make the base image unless the engine has it; whether it was made. Raises `ImageBuildFailed`."""
    if await _is_current(engine):
        return False
    async with _build_lock(progress):
        if await _is_current(engine):
            return False
        if not await _from_registry(engine, progress):
            await _from_packages(engine, progress)
        await engine.remove_old_images()
    return True


def recipe() -> str:
    """Hash of all that this version puts into the base image."""
    digest = hashlib.sha256(repr((DOCKERFILE, INSTALL, PACKAGES)).encode())
    for path in sorted(AGENT.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


async def _is_current(engine: DockerEngine) -> bool:
    labels = await engine.labels(BASE_IMAGE)
    return labels is not None and labels.get(RECIPE_LABEL) == recipe()


async def _from_registry(engine: DockerEngine, progress: Progress) -> bool:
    """Whether a registry's image and the packages it lacks could be had. Failing is no error: packages come next."""
    parent = os.environ.get(REGISTRY_VARIABLE, REGISTRY_IMAGE)
    if not parent:
        return False
    progress(f"asking for {parent}")
    try:
        if await engine.labels(parent) is None and not await engine.pull(parent, PULL_TIMEOUT_S):
            progress("no registry has it")
            return False
        await _add_agent(engine, parent, INSTALL.format(" ".join(PACKAGES)), progress)
    except SandboxError as error:
        progress(f"cannot use {parent}: {error}")
        return False
    return True


async def _from_packages(engine: DockerEngine, progress: Progress) -> None:
    rootfs = "crosstrain/sandbox-rootfs:" + hashlib.sha256(repr(PACKAGES).encode()).hexdigest()[:16]
    try:
        if await engine.labels(rootfs) is None:
            async with root_filesystem(release_source(), PACKAGES, progress) as folder:
                progress("importing the root file system into the Docker engine")
                await engine.import_image(archive(folder), rootfs)
        await _add_agent(engine, rootfs, "", progress)
    except (EngineUnavailable, ImageBuildFailed):
        raise
    except SandboxError as error:
        remedy = "its disk is full, free some" if "no space left" in str(error).lower() else "run `crosstrain doctor`"
        raise ImageBuildFailed(f"the Docker engine could not take the sandbox image: {error}; {remedy}") from error


async def _add_agent(engine: DockerEngine, parent: str, install: str, progress: Progress) -> None:
    progress("adding the agent")
    text = DOCKERFILE.format(parent=parent, install=install, label=RECIPE_LABEL, recipe=recipe())
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        dockerfile = tarfile.TarInfo("Dockerfile")
        dockerfile.size = len(text)
        tar.addfile(dockerfile, io.BytesIO(text.encode()))
        for path in sorted(AGENT.glob("*.py")):
            tar.add(path, f"agent/{path.name}", filter=_owned_by_root)
    await engine.build_image(context.getvalue(), BASE_IMAGE, BUILD_TIMEOUT_S)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode, member.mtime = 0o644, 0
    return member


@contextlib.asynccontextmanager
async def _build_lock(progress: Progress) -> AsyncIterator[None]:
    """One build at a time on a machine; the second finds the first one's image."""
    path = scratch() / f"crosstrain-image-{os.getuid()}.lock"
    try:
        file = path.open("w")
    except OSError as error:
        raise ImageBuildFailed(f"cannot write {path}: {error.strerror}") from error
    with file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    progress("another process is building the image; waiting for it")
                    told = True
                await asyncio.sleep(0.2)
        yield
