"""Verifiers in processes of their own: what breaks one fails its own call and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reward.config import DomainConfig
from reward.domain import Domain
from reward.errors import UnparsableAnswer, VerifierFailed
from reward.score import Status
from reward.scoring import score
from reward.task import Task
from reward.verifiers.pool import VerifierPool

FILE = """
import os, re, subprocess, sys, time
from reward.errors import UnparsableAnswer

CALLS = []

def verify(task, answer):
    CALLS.append(answer)
    print("noise on the output")
    sys.stdin.read()
    if answer == "pid": return {"success": os.getpid()}
    if answer == "calls": return {"success": len(CALLS)}
    if answer == "crash": os.kill(os.getpid(), 11)
    if answer == "exit": os._exit(3)
    if answer == "quit": sys.exit("enough")
    if answer == "raise": raise RuntimeError("no luck\\nat all")
    if answer == "hang": time.sleep(3600)
    if answer == "lock": re.match(r"(a+)+$", "a" * 64 + "b")
    if answer == "nan": return {"success": float("nan")}
    if answer == "text": return {"success": "full"}
    if answer == "list": return [1]
    if answer == "none": return None
    if answer == "unparsable": raise UnparsableAnswer("no answer in it")
    if answer == "child":
        child = subprocess.Popen(["sleep", "3600"])
        open(task["data"]["pid_file"], "w").write(str(child.pid))
        time.sleep(3600)
    return {"success": float(answer)}
"""


@pytest.fixture
def domain(tmp_path: Path) -> Domain:
    (tmp_path / "check.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("import no_such_module\ndef verify(task, answer): ...")
    return make(tmp_path, "check.py:verify")


def make(folder: Path, verifier: str, timeout_s: float = 20.0) -> Domain:
    config = DomainConfig.model_validate(
        {
            "name": "demo",
            "environment": "single_turn",
            "verifier": verifier,
            "verifier_timeout_s": timeout_s,
            "components": {"success": {"range": [0, 1]}},
        }
    )
    return Domain(config, folder, "0", (), ())


@pytest.fixture
async def pool():
    pool = VerifierPool(1)
    yield pool
    await pool.close()


TASK = Task("t", "demo", "train", "go", {"answer": "8"})


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while alive(pid):  # noqa: ASYNC110 - a foreign process sets no event
            await asyncio.sleep(0.02)


async def test_a_users_function_grades_and_its_worker_is_used_again(pool, domain):
    assert await pool.grade(domain, TASK, "0.5") == {"success": 0.5}
    assert await pool.grade(domain, TASK, "calls") == {"success": 2}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("crash", "'check.py:verify' died (signal SIGSEGV)"),
        ("exit", "died (exit status 3)"),
        ("quit", "raised SystemExit: enough"),
        ("raise", "raised RuntimeError: no luck"),
        ("text", "raised ValueError"),
        ("list", "raised AttributeError"),
        ("none", "raised AttributeError"),
    ],
)
async def test_a_broken_call_fails_alone(pool, domain, answer, says):
    with pytest.raises(VerifierFailed) as error:
        await pool.grade(domain, TASK, answer)
    assert says in str(error.value)
    assert await pool.grade(domain, TASK, "1") == {"success": 1.0}


@pytest.mark.parametrize("answer", ["hang", "lock"])
async def test_a_hang_is_killed_and_replaced(pool, domain, answer):
    pid = int((await pool.grade(domain, TASK, "pid"))["success"])
    with pytest.raises(VerifierFailed, match=r"did not answer within 0\.3 s and was killed"):
        await pool.grade(make(domain.folder, "check.py:verify", 0.3), TASK, answer)
    await until_gone(pid)
    assert await pool.grade(domain, TASK, "1") == {"success": 1.0}


async def test_nan_is_a_failure_when_it_is_scored(pool, domain):
    raw = await pool.grade(domain, TASK, "nan")
    with pytest.raises(VerifierFailed, match="'success' is nan"):
        score(domain.config, TASK, raw, Status.OK)


async def test_an_unparsable_answer_comes_out_as_such_and_keeps_the_worker(pool, domain):
    pid = await pool.grade(domain, TASK, "pid")
    with pytest.raises(UnparsableAnswer, match="no answer in it"):
        await pool.grade(domain, TASK, "unparsable")
    assert await pool.grade(domain, TASK, "pid") == pid


async def test_a_module_that_cannot_be_imported_is_named(pool, domain):
    with pytest.raises(VerifierFailed, match=r"'broken\.py:verify' cannot be loaded: ModuleNotFoundError"):
        await pool.grade(make(domain.folder, "broken.py:verify"), TASK, "1")


async def test_a_cancelled_call_leaves_no_frame_for_the_next(pool, domain):
    await pool.grade(domain, TASK, "1")
    call = asyncio.create_task(pool.grade(domain, TASK, "hang"))
    await asyncio.sleep(0.1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.grade(domain, TASK, "0.25") == {"success": 0.25}


async def test_many_calls_share_few_workers(domain):
    pool = VerifierPool(2)
    try:
        results = await asyncio.gather(*(pool.grade(domain, TASK, "pid") for _ in range(20)))
        assert len({result["success"] for result in results}) <= 2
    finally:
        await pool.close()


async def test_closing_ends_workers_their_children_and_calls_in_progress(domain, tmp_path):
    pool = VerifierPool(1)
    pid = int((await pool.grade(domain, TASK, "pid"))["success"])
    pid_file = tmp_path / "child.pid"
    task = Task("t", "demo", "train", "go", {"pid_file": str(pid_file)})
    call = asyncio.create_task(pool.grade(domain, task, "child"))
    async with asyncio.timeout(30):
        while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110 - neither does a file
            await asyncio.sleep(0.02)
    await pool.close()
    with pytest.raises(VerifierFailed):
        await call
    await until_gone(pid)
    await until_gone(int(pid_file.read_text()))
    with pytest.raises(VerifierFailed, match="closed"):
        await pool.grade(domain, TASK, "1")
    await pool.close()


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_verifier_pool import TASK, make
from reward.verifiers.pool import VerifierPool

async def main():
    domain = make(Path({folder!r}), "check.py:verify", {timeout_s})
    pool = VerifierPool(1)
    print(int((await pool.grade(domain, TASK, "pid"))["success"]), flush=True)
    await pool.grade(domain, TASK, {answer!r})

asyncio.run(main())
"""


@pytest.mark.parametrize(("answer", "timeout_s"), [("hang", 600.0), ("lock", 1.0)])
async def test_workers_do_not_outlive_a_killed_parent(domain, answer, timeout_s):
    """Even where a regular expression holds the interpreter's lock, the kernel's timer ends the worker."""
    source = PARENT.format(
        tests=str(Path(__file__).parent), folder=str(domain.folder), timeout_s=timeout_s, answer=answer
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert parent.stdout is not None
    with parent.stdout:
        worker = int(parent.stdout.readline())
        assert alive(worker)
        time.sleep(0.3)  # noqa: ASYNC251 - until the second call hangs
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    await until_gone(worker)


async def test_built_in_verifiers_run_by_name(pool, domain):
    math = make(domain.folder, "math")
    assert await pool.grade(math, TASK, "16/2") == {"success": 1.0}
    with pytest.raises(UnparsableAnswer):
        await pool.grade(math, TASK, "no idea")
    tools = make(domain.folder, "tool_call")
    call = {"name": "open", "arguments": {}}
    task = Task("t", "demo", "train", "go", {"tools": [{"name": "open"}], "call": call})
    assert await pool.grade(tools, task, json.dumps(call)) == {"points": 100.0}


def test_a_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="size = 0"):
        VerifierPool(0)
