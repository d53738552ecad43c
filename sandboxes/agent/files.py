"""File operations of the agent, all with the rights of the sandbox user."""

import contextlib
import os
import stat
from collections.abc import Iterator

USER = 1000
"""User and group id of the sandbox user."""
WORKDIR = "/work"
WRITABLE = (WORKDIR, "/tmp", "/dev/shm", "/dev/mqueue")  # noqa: S108 - directories inside the sandbox
"""All that the sandbox user can write."""


class Refused(Exception):
    """The request cannot be carried out, through no fault of the sandbox; the connection stays usable."""


@contextlib.contextmanager
def as_user() -> Iterator[None]:
    """What runs inside has the rights of the sandbox user and no others."""
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)


def write_file(path: str, data: bytes | bytearray) -> None:
    """Create or replace a file and its parents. What stands there is unlinked first, so no link is followed."""
    path = os.path.join(WORKDIR, path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with open(path, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except OSError as error:
        raise Refused(f"cannot write {path}: {error.strerror}") from None


def read_files(root: str, room: int) -> dict[str, bytes]:
    """Regular files below `root` that the user may read, by relative path, `room` bytes at most."""
    root = os.path.join(WORKDIR, root)
    files: dict[str, bytes] = {}
    for path in _regular_files(root):
        data = _read_file(path, room)
        if data is not None:
            room -= len(data)
            files[os.path.relpath(path, root)] = data
    return files


def _regular_files(root: str) -> Iterator[str]:
    """Paths of the regular files below `root`. Links are not followed, unreadable directories are left out."""
    pending = [root] if os.path.isdir(root) and not os.path.islink(root) else []
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry.path


def _read_file(path: str, room: int) -> bytes | None:
    try:
        # The file may have been replaced since it was listed: a named pipe would stop the agent without O_NONBLOCK.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > room:
            raise Refused("the files are larger than the sandbox's disk")
        return file.read(status.st_size)


def wipe(top: str) -> list[str]:
    """Empty a writable directory; the paths that are left. No process may run that could write there meanwhile.

    Nested directories move up to `top` before their turn comes, so that no depth of nesting is too deep.
    """
    moved, prefix = 0, os.path.join(top, os.urandom(16).hex())  # a name that nobody can have taken
    with contextlib.suppress(OSError):
        if os.stat(top).st_uid == os.geteuid():
            os.chmod(top, 0o755)  # noqa: S103 - as it was mounted
        while entries := _scan(top):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in _scan(entry.path):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                        moved += 1
                        os.rename(inner.path, f"{prefix}-{moved}")
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
    return [entry.path for entry in _scan(top)]


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(entries)
