"""How the base image is found, made and, when that is interrupted or impossible, not half made."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from sandboxes.apt import Source, release_source
from sandboxes.docker import RECIPE_LABEL, DockerEngine
from sandboxes.errors import ImageBuildFailed
from sandboxes.image import BASE_IMAGE, ensure_base_image, recipe
from sandboxes.rootfs import archive, root_filesystem

pytestmark = pytest.mark.integration
needs_debootstrap = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("debootstrap") is None, reason="building from packages needs root and debootstrap"
)


async def test_image_is_made_once_whoever_asks_for_it() -> None:
    engines = [await DockerEngine.connect() for _ in range(3)]
    try:
        made = await asyncio.gather(*(ensure_base_image(engine) for engine in engines))
        assert sum(made) <= 1
        labels = await engines[0].labels(BASE_IMAGE)
        assert labels is not None and labels[RECIPE_LABEL] == recipe()
        assert not await ensure_base_image(engines[0])
    finally:
        for engine in engines:
            await engine.aclose()


@needs_debootstrap
async def test_interrupted_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    begun = asyncio.Event()

    async def build() -> None:
        async with root_filesystem(
            release_source(), ["bash"], lambda line: begun.set() if "Retrieving" in line else None
        ):
            raise AssertionError("the build was to be interrupted")

    task = asyncio.ensure_future(build())
    async with asyncio.timeout(120):
        await begun.wait()
    assert leftovers(tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leftovers(tmp_path) == []


def leftovers(folder: Path) -> list[str]:
    """Files, mounts and processes of a build."""
    found = [str(path) for path in folder.iterdir()]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(folder) in line]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(folder).encode() in command:
            found.append(command.decode())
    return found


@needs_debootstrap
async def test_failed_build_names_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nowhere = Source(f"file://{tmp_path}/no-mirror", "bookworm")
    with pytest.raises(ImageBuildFailed, match="no-mirror"):
        async with root_filesystem(nowhere, ["bash"], lambda line: None):
            raise AssertionError("there was nothing to build from")
    assert leftovers(tmp_path) == []


async def test_full_disk_is_said_before_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc")  # a file system without a free byte
    with pytest.raises(ImageBuildFailed, match=r"disk of /proc is full.*TMPDIR"):
        async with root_filesystem(Source("file:///none", "bookworm"), ["bash"], lambda line: None):
            raise AssertionError("there was no room to build in")


def test_archive_of_what_cannot_be_read_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert b"file" in b"".join(archive(tmp_path))
    with pytest.raises(ImageBuildFailed, match="missing"):
        list(archive(tmp_path / "missing"))
