"""The main job in small, for real: Ray, vLLM, Docker, the trainer. It is stopped, resumed, finished, and killed.

They share one job file. Each run takes about a minute; most of that goes into starting Ray and vLLM.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOMAINS = ROOT / "examples" / "quickstart" / "domains"
UPDATES = 4
JOB = f"""
name = "small"
[policy]
preset = "tiny-moe"
{"".join(f'[[domains]]{chr(10)}path = "{DOMAINS / name}"{chr(10)}' for name in ("terminal", "code", "math", "tools"))}
[sft]
steps = 8
batch_size = 16
[rl]
updates = {UPDATES}
groups_per_batch = 8
group_size = 4
checkpoint_every = 2
[engine]
max_model_len = 256
max_num_seqs = 32
[sandboxes]
pool_size = 8
[evaluation]
max_tasks = 6
"""
pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`crosstrain run` in a process group of its own, as a terminal would start it."""
    (folder / "began").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "stderr.txt").open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "run", "job.toml", "-o", "json", *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def run_folder(folder: Path) -> Path:
    (found,) = (folder / "runs").iterdir()
    return found


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder(folder) / "events.jsonl").read_text().splitlines()]


def updates_made(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (run_folder(folder) / "metrics.jsonl").read_text().splitlines()
    except (FileNotFoundError, ValueError):
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_updates(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 600
    while len(updates_made(folder)) < count:
        assert process.poll() is None, (folder / "stderr.txt").read_text()
        assert time.monotonic() < deadline, (folder / "stderr.txt").read_text()
        time.sleep(0.2)


def left_behind(run: str, folder: Path) -> dict[str, list[str]]:
    """Containers, processes and shared memory that carry the run's id, and orphaned semaphores since it was started."""
    import asyncio

    from orchestrator.run.guardian import RUN_VARIABLE, orphan_semaphores
    from sandboxes.reaper import containers

    wanted = f"{RUN_VARIABLE}={run}".encode()
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    processes.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return {
        "containers": [container.name for container in asyncio.run(containers(run))],
        "processes": processes,
        "shared memory": [path.name for path in Path("/dev/shm").glob(f"crosstrain-{run}-*")],
        "semaphores": [path.name for path in orphan_semaphores((folder / "began").stat().st_mtime)],
    }


NOTHING: dict[str, list[str]] = {"containers": [], "processes": [], "shared memory": [], "semaphores": []}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.toml").write_text(JOB)
    yield folder


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else(job: Path) -> None:
    process = start(job)
    wait_for_updates(process, job, 1)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
    process.communicate(timeout=120)
    assert process.returncode == 3, (job / "stderr.txt").read_text()
    folder = run_folder(job)
    assert left_behind(folder.name, job) == NOTHING
    assert any((folder / "checkpoints").glob("[0-9]*/state.json"))
    assert "Traceback" not in (job / "stderr.txt").read_text()


def test_the_stopped_run_is_resumed_to_its_end_and_everything_holds(job: Path) -> None:
    resumed_from = max(int(path.parent.name) for path in run_folder(job).glob("checkpoints/[0-9]*/state.json"))
    process = start(job, "--resume")
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, (job / "stderr.txt").read_text()
    report = json.loads(output)
    folder = run_folder(job)
    assert report == json.loads((folder / "report.json").read_text())
    assert report["updates"] == UPDATES
    # Rule 3: every version that an engine served was proven. The interruption may have come before the engine had the
    # version that precedes the checkpoint's; then it was never served.
    syncs = [event for event in events(job) if event["kind"] == "sync"]
    assert set(range(UPDATES + 1)) - {sync["version"] for sync in syncs} <= {resumed_from - 1}
    assert report["weight_sync"]["count"] == len(syncs)
    assert all(sync["gap"] < 1e-4 for sync in syncs)
    assert report["weight_sync"]["max_logprob_gap"] < 1e-4
    # Rule 4: staleness.
    assert report["staleness"]["max"] <= 1
    # Exact strata in every batch, also across the interruption.
    updates = updates_made(job)
    assert [update["update"] for update in updates] == list(range(1, UPDATES + 1))
    for update in updates:
        assert sum(part["groups"] for part in update["domains"].values()) == 8
        assert all(part["groups"] == part["quota"] for part in update["domains"].values())
    # Rule 1 and what is promised of the report.
    assert report["episodes"]["infra_error"] == 0
    assert report["sandboxes"]["created"] >= 8 and report["sandboxes"]["leaked"] == 0
    assert set(report["domains"]) == {"terminal", "code", "math", "tools"}
    assert all(delta["n"] == 6 for delta in report["domains"].values())
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG") and (folder / "report.md").is_file()
    assert left_behind(folder.name, job) == NOTHING


def test_the_trained_policy_is_a_model_that_transformers_loads(job: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = run_folder(job) / "policy"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


def test_the_trained_policy_is_a_model_that_vllm_serves(job: Path) -> None:
    """Through the module behind `vllm serve`: that command does not start where vLLM's package is its CPU build."""
    policy = run_folder(job) / "policy"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = f"--model {policy} --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 256 --enforce-eager"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments.split()]
    question = {"model": str(policy), "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    with (job / "serve.txt").open("w") as log:
        server = subprocess.Popen(
            [*command, "--kv-cache-memory-bytes", "16M"], stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while not is_open(port):
            assert server.poll() is None and time.monotonic() < deadline, (job / "serve.txt").read_text()[-3000:]
            time.sleep(0.5)
        answer = post(f"http://127.0.0.1:{port}/v1/chat/completions", question)
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert answer["usage"]["completion_tokens"] >= 1, answer


def is_open(port: int) -> bool:
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - an address of our own
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)


def test_a_full_disk_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    """The policies before and after the warm start and one checkpoint fit; the second checkpoint does not."""
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "runs").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=30m", "none", tmp_path / "runs"], check=False).returncode:
        pytest.skip("only root may mount the small disk that this test fills")
    try:
        process = start(tmp_path)
        process.communicate(timeout=600)
        assert process.returncode == 1
        said = (tmp_path / "stderr.txt").read_text()
        folder = run_folder(tmp_path)
        assert "Traceback" not in said
        assert said.splitlines()[-1].startswith(f"crosstrain: {folder / 'checkpoints' / '000002'}: no checkpoint could")
        assert said.rstrip().endswith("free space on that disk.")
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000000"], "the older one is kept, whole"
        for name in ("events.jsonl", "metrics.jsonl"):
            history = (folder / name).read_text()
            assert history.endswith("\n") and [json.loads(line) for line in history.splitlines()], "no line is torn"
        assert left_behind(folder.name, tmp_path) == NOTHING
    finally:
        subprocess.run(["umount", tmp_path / "runs"], check=True)


def test_a_killed_driver_leaves_nothing_after_a_minute(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    process = start(tmp_path)
    wait_for_updates(process, tmp_path, 1)
    run = run_folder(tmp_path).name
    assert left_behind(run, tmp_path)["containers"], "there is something to clean up"
    process.kill()
    process.communicate(timeout=30)
    deadline = time.monotonic() + 60
    while left_behind(run, tmp_path) != NOTHING and time.monotonic() < deadline:
        time.sleep(1)
    assert left_behind(run, tmp_path) == NOTHING
