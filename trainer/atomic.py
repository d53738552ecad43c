"""Directories and files that appear whole or not at all: written beside their place, flushed to disk, then renamed."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` if the block succeeds and vanishes if it raises.

    A directory already at `path` is replaced. A process killed inside leaves at most a hidden `.<name>.*` directory.
    Raises OSError when the disk does not take it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh = work / "new"
        fresh.mkdir()
        yield fresh
        for directory, _, files in os.walk(fresh):
            for name in files:
                _fsync(Path(directory) / name)
            _fsync(Path(directory))
        if path.exists():  # a rename replaces only an empty directory
            path.rename(work / "old")
        fresh.rename(path)
        _fsync(path.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path in the same directory that becomes `path` if the block succeeds and vanishes if it raises.

    A file already at `path` is replaced. Raises OSError when the disk does not take it.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        _fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
