"""Semaphores that a killed process left are removed; those in use, and older ones, are not."""

import multiprocessing
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.run.guardian import SHARED_MEMORY, clean


@pytest.fixture
def orphan() -> Iterator[Path]:
    """A file as a killed process leaves it: mapped by nobody."""
    path = SHARED_MEMORY / f"sem.mp-{uuid.uuid4().hex[:8]}"
    path.write_bytes(b"\0" * 32)
    yield path
    path.unlink(missing_ok=True)


def test_an_orphan_goes_and_a_semaphore_in_use_stays(orphan: Path) -> None:
    before = time.time() - 60
    known = set(SHARED_MEMORY.glob("sem.mp-*"))
    living = multiprocessing.get_context("spawn").Semaphore()
    (path,) = set(SHARED_MEMORY.glob("sem.mp-*")) - known
    clean("no-such-run", since=before)
    assert not orphan.exists()
    assert path.exists()
    del living


def test_what_is_older_than_the_run_is_not_touched(orphan: Path) -> None:
    clean("no-such-run", since=time.time() + 60)
    assert orphan.exists()
    clean("no-such-run")
    assert orphan.exists()
