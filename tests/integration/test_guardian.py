"""Nothing of a run is left on the machine, however its driver ends. Real processes, containers and shared memory."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.run.guardian import RUN_VARIABLE, Guardian, clean
from sandboxes.reaper import containers, reap

pytestmark = pytest.mark.integration

DRIVER = """
import asyncio, json, os, subprocess, sys, time
from pathlib import Path
from orchestrator.run.guardian import Guardian
from sandboxes.config import SandboxConfig
from sandboxes.pool import SandboxHost

run, scratch, ending = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
scratch.mkdir()
with Guardian(run, [scratch]) as guardian:
    os.environ["CROSSTRAIN_RUN"] = run
    Path("/dev/shm", f"crosstrain-{run}-weights").write_bytes(b"x")
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=False)
    forked = os.fork()
    if forked == 0:  # like a worker that Ray or multiprocessing forks: it shares every descriptor of the driver
        time.sleep(600)
    host = SandboxHost(SandboxConfig(pool_size=2), run, scratch / "s")
    async def start():
        await host.start()
    asyncio.run(start())
    print(json.dumps([guardian.pid, worker.pid, forked]), flush=True)
    if ending == "wait":
        time.sleep(600)
    if ending == "raise":
        raise RuntimeError("the run has failed")
print(json.dumps([len(guardian.leftovers.processes), len(guardian.leftovers.containers)]), flush=True)
"""


@pytest.fixture
def run() -> Iterator[str]:
    name = f"guardian-{os.getpid()}-{time.monotonic_ns()}"
    yield name
    clean(name)


def drive(run: str, scratch: Path, ending: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A driver with two containers and a segment, and the ids of its guardian, a marked child and a forked one."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, run, str(scratch), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert driver.stdout is not None
    return driver, json.loads(driver.stdout.readline())


def alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def remains(run: str, scratch: Path) -> list[str]:
    found = [container.name for container in asyncio.run(containers(run))]
    found += [path.name for path in Path("/dev/shm").glob(f"crosstrain-{run}-*")]
    return found + [str(scratch)] * scratch.exists()


def test_killed_driver(run: str, tmp_path: Path) -> None:
    driver, (guardian, worker, forked) = drive(run, tmp_path / "scratch", "wait")
    with driver:
        try:
            assert len(remains(run, tmp_path / "scratch")) == 4
            driver.kill()
            driver.wait()
            assert alive(forked), "this test is about a child that keeps the driver's end of the pipe"
            deadline = time.monotonic() + 60
            while alive(guardian) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not alive(guardian)
            assert remains(run, tmp_path / "scratch") == []
            assert not alive(worker)
        finally:
            for pid in (forked, worker):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ending", ["return", "raise"])
def test_driver_that_leaves_things_behind(run: str, tmp_path: Path, ending: str) -> None:
    driver, (guardian, worker, forked) = drive(run, tmp_path / "scratch", ending)
    with driver:
        try:
            assert driver.wait(60) == (0 if ending == "return" else 1)
            assert remains(run, tmp_path / "scratch") == []
            assert not alive(worker) and not alive(guardian)
            assert driver.stdout is not None
            if ending == "return":
                assert json.loads(driver.stdout.readline()) == [1, 2], "the driver learns what it had left"
        finally:
            if alive(forked):
                os.kill(forked, signal.SIGKILL)


def test_interrupt_of_the_terminal_does_not_reach_it(run: str, tmp_path: Path) -> None:
    driver, (guardian, worker, forked) = drive(run, tmp_path / "scratch", "wait")
    with driver:
        try:
            assert os.getsid(guardian) == guardian != os.getsid(driver.pid)
            os.kill(guardian, signal.SIGINT)
            os.kill(guardian, signal.SIGTERM)
            driver.send_signal(signal.SIGINT)
            assert driver.wait(60) != 0
            assert remains(run, tmp_path / "scratch") == []
            assert not alive(worker) and not alive(guardian)
        finally:
            if alive(forked):
                os.kill(forked, signal.SIGKILL)


def test_clean_run_leaves_nothing_to_remove(run: str, tmp_path: Path) -> None:
    with Guardian(run, [tmp_path / "scratch"]) as guardian:
        (tmp_path / "scratch").mkdir()
    assert not guardian.leftovers
    assert guardian.leftovers.paths == [str(tmp_path / "scratch")]


def test_other_runs_are_left_alone(run: str) -> None:
    segment = Path(f"/dev/shm/crosstrain-{run[:-1]}-x")
    segment.touch()
    with subprocess.Popen(["sleep", "600"], env={RUN_VARIABLE: run + "-longer"}) as other:
        try:
            assert not clean(run)
            assert other.poll() is None and segment.exists()
        finally:
            segment.unlink()
            other.kill()


def test_inside_a_running_event_loop(run: str) -> None:
    async def inside() -> None:
        with Guardian(run):
            pass

    asyncio.run(inside())
    assert asyncio.run(reap(run)) == []


@pytest.mark.parametrize("name", ["", "*", "../x", "a b", "a\0"])
def test_a_name_that_is_a_pattern_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="run id"):
        clean(name)
