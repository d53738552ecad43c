"""A root file system of Debian packages, made by debootstrap with what this machine's apt is set up for.

debootstrap runs in mount and process namespaces of its own: when it is killed, its mounts and processes end with it and
its folder can be removed.
"""

import asyncio
import collections
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

from sandboxes.apt import Source, fetching
from sandboxes.errors import ImageBuildFailed

NEEDED_BYTES = 1 << 30
"""Free disk space below which a build is not begun: half for the folder, half for the image."""
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists", "var/log")
"""Folders whose content no sandbox needs."""
DPKG_OPTIONS = "force-unsafe-io\npath-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n"
"""An interrupted build is thrown away, so its files need not be flushed to the disk one by one."""
PREFIX = "crosstrain-rootfs-"


def scratch() -> Path:
    """Where builds happen: not `/tmp`, which is often small and forbids device files."""
    return Path(os.environ.get("TMPDIR") or "/var/tmp")  # noqa: S108 - a folder of unpredictable name is made there


@contextlib.asynccontextmanager
async def root_filesystem(
    source: Source, packages: Sequence[str], progress: Callable[[str], None]
) -> AsyncIterator[Path]:
    """A folder with the packages installed; it is gone afterwards, on every way out. Raises `ImageBuildFailed`.

    The caller holds the build lock, so whatever lies around from a build that was killed can be removed.
    """
    for stale in scratch().glob(PREFIX + "*"):
        shutil.rmtree(stale, ignore_errors=True)
    if shutil.disk_usage(scratch()).free < NEEDED_BYTES:
        raise _disk_full()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=scratch()))
    try:
        os.chmod(folder, 0o755)  # noqa: S103 - as a root folder is
        options = folder / "etc/dpkg/dpkg.cfg.d/sandbox"
        os.makedirs(options.parent)
        options.write_text(DPKG_OPTIONS)
        await _debootstrap(folder, source, packages, progress)
        os.remove(options)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _debootstrap(folder: Path, source: Source, packages: Sequence[str], progress: Callable[[str], None]) -> None:
    if os.geteuid() != 0:
        raise ImageBuildFailed("building the sandbox image from packages needs root: run `sudo scripts/setup` once")
    if shutil.which("debootstrap") is None or shutil.which("unshare") is None:
        raise ImageBuildFailed("debootstrap is missing: `apt-get install debootstrap` (scripts/setup does)")
    how = fetching(await _output("apt-config", "dump"), os.environ)
    checks = ["--no-check-gpg"] if source.trusted else [f"--keyring={source.keyring}"] if source.keyring else []
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
        *("debootstrap", "--variant=minbase", f"--include={','.join(packages)}", *checks, *how.options),
        *(source.suite, str(folder), source.mirror),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **how.environment, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
        start_new_session=True,
    )
    last: collections.deque[str] = collections.deque(maxlen=200)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            last.append(line.decode(errors="replace").strip())
            if last[-1].startswith("I: "):
                progress(last[-1].removeprefix("I: "))
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        if any("No space left on device" in line for line in last):
            raise _disk_full()
        raise ImageBuildFailed(f"debootstrap of {source.suite} from {source.mirror} failed: {' / '.join([*last][-3:])}")


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode(errors="replace")


def _disk_full() -> ImageBuildFailed:
    return ImageBuildFailed(
        f"the disk of {scratch()} is full: the sandbox image needs {NEEDED_BYTES >> 20} MiB; free some or set TMPDIR"
    )


def archive(folder: Path) -> Iterator[bytes]:
    """The folder as a tar archive, in pieces. Raises `ImageBuildFailed` before the end when tar fails."""
    exclude = [f"--exclude=./{path}/*" for path in LEFT_OUT]
    with subprocess.Popen(
        ["tar", "--create", "--numeric-owner", "--sort=name", "--directory", str(folder), *exclude, "."],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as tar:
        assert tar.stdout is not None and tar.stderr is not None
        while piece := tar.stdout.read(1 << 20):
            yield piece
        message = tar.stderr.read().decode(errors="replace").strip()
        if tar.wait() != 0:
            raise ImageBuildFailed(f"cannot archive {folder}: {message[-300:]}")
