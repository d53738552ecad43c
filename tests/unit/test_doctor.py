"""The doctor's verdicts, and how it asks the Docker engine; the engine here is a small real server on a socket."""

import json
import os
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import doctor
from orchestrator.docker_probe import ProbeError, ask
from orchestrator.doctor import GIB
from orchestrator.run.guardian import RUN_VARIABLE

INFO = {
    "ServerVersion": "20.10.24",
    "Driver": "overlay2",
    "CgroupVersion": "2",
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
    "DockerRootDir": "/",
}
VERSION = {"ApiVersion": "1.41"}


class Engine(BaseHTTPRequestHandler):
    """Answers like an engine that has no image and one leftover container."""

    def do_GET(self) -> None:
        answers = {
            "/info": INFO,
            "/version": VERSION,
            "/containers/json": [{"Labels": {"crosstrain.run": "r1"}}],
        }
        path = self.path.partition("?")[0]
        if path == "/_ping":
            self.reply(200, "text/plain", b"OK")
        elif path in answers:
            self.reply(200, "application/json", json.dumps(answers[path]).encode())
        else:
            self.reply(404, "application/json", b'{"message": "no such image"}')

    def reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders can be too deep for a socket's path
        path = f"{folder}/docker.sock"
        with socketserver.ThreadingUnixStreamServer(path, Engine) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
            yield
            server.shutdown()
            thread.join()


def test_the_engine_is_asked(engine: None) -> None:
    assert ask("/_ping") == "OK"
    assert ask("/info") == INFO
    with pytest.raises(ProbeError, match=r"HTTP status 404: .*no such image"):
        ask("/images/x/json")


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("unix:///nowhere/docker.sock", "no Docker engine answers at unix:///nowhere/docker.sock"),
        ("tcp://127.0.0.1:1", "no Docker engine answers .*refused"),
        ("ssh://machine", "use unix:// or tcp://"),
    ],
)
def test_an_engine_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, host: str, message: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(ProbeError, match=message):
        ask("/_ping")
    (check,) = doctor.check_docker()
    assert check.failed and host in check.found and "scripts/setup" in check.remedy


def test_all_of_an_engine_is_judged(engine: None) -> None:
    checks = {check.name: check for check in doctor.check_docker()}
    assert checks["docker engine"].status == checks["sandbox limits"].status == "ok"
    assert checks["sandbox image"].failed and "sandboxes build" in checks["sandbox image"].remedy
    assert checks["sandboxes"].status == "warn" and "r1" in checks["sandboxes"].found


def test_old_and_slow_engines_are_told() -> None:
    assert doctor.judge_docker(INFO, {"ApiVersion": "1.9"}).failed
    assert doctor.judge_docker({**INFO, "Driver": "vfs"}, VERSION).status == "warn"


@pytest.mark.parametrize("key", ["MemoryLimit", "PidsLimit", "CpuCfsQuota"])
def test_an_engine_without_a_limit_fails(key: str) -> None:
    assert doctor.judge_limits({**INFO, key: False}).failed


def test_what_belongs_to_a_live_run_is_no_leftover() -> None:
    assert doctor.judge_leftovers("sandboxes", ["r1", "r2", "r1"], {"r1", "r2"}).status == "ok"
    dead = doctor.judge_leftovers("sandboxes", ["r1", "r2", "r1"], {"r2"})
    assert dead.status == "warn" and dead.found.startswith("2 ") and "(r1)" in dead.found


def test_a_run_lives_while_it_has_a_process(tmp_path: Path) -> None:
    (tmp_path / "crosstrain-my-run-weights-0").touch()
    (tmp_path / "crosstrain-my-run-weights-1").touch()
    (tmp_path / "another-programs").touch()
    dead = doctor.check_segments(tmp_path)
    assert dead.status == "warn" and "2 left over from dead runs (my-run)" in dead.found
    with subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_VARIABLE: "my-run"}) as process:
        try:
            assert doctor.check_segments(tmp_path).status == "ok"
        finally:
            process.kill()


def test_every_check_answers_and_only_a_complaint_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    checks = doctor.run_checks(runs=tmp_path / "not" / "yet")
    assert len({check.name for check in checks}) == len(checks) >= 10
    for check in checks:
        assert check.found and bool(check.remedy) == (check.status != "ok"), check
        assert json.loads(json.dumps(check.as_dict())) == check.as_dict()


@given(total=st.integers(0, 1 << 45), available=st.integers(0, 1 << 45), more=st.integers(0, 1 << 45))
def test_more_memory_is_never_worse(total: int, available: int, more: int) -> None:
    order = ["fail", "warn", "ok"]
    less, better = doctor.judge_memory(total, available), doctor.judge_memory(total, available + more)
    assert order.index(less.status) <= order.index(better.status)


def test_the_smallest_machine_that_is_promised_is_enough() -> None:
    cpuinfo = "processor\t: 0\nflags\t\t: fpu sse4_2 avx2 fma\n"
    assert doctor.judge_cpu(2, cpuinfo).status == "ok"
    assert doctor.judge_memory(24 * GIB, 20 * GIB).status == "ok"
    assert doctor.judge_shared_memory(12 * GIB).status == "ok"
    assert doctor.judge_disk("disk", Path("/"), 20 * GIB).status == "ok"


def test_what_is_too_small_is_told() -> None:
    assert doctor.judge_cpu(1, "flags : avx2").status == "warn"
    assert doctor.judge_cpu(8, "flags : sse4_2").failed
    assert doctor.judge_cpu(8, "").failed
    assert doctor.judge_shared_memory(64 << 20).failed  # what Docker gives a container
    assert doctor.judge_disk("disk", Path("/"), GIB // 2).failed


def test_a_missing_and_a_different_package_are_told(tmp_path: Path) -> None:
    (tmp_path / "torch.txt").write_text("# comment\n")
    for flavour in ("cpu", "gpu"):
        (tmp_path / f"{flavour}.lock").write_text("pytest==0.1 \\\n    --hash=sha256:00\n")
    different = doctor.check_packages(tmp_path)
    assert different.status == "warn" and "pytest" in different.found
    for flavour in ("cpu", "gpu"):
        (tmp_path / f"{flavour}.lock").write_text("no-such-package[extra]==1.0 ; python_version > '3'\n")
    missing = doctor.check_packages(tmp_path)
    assert missing.failed and missing.found.endswith("no-such-package missing")


def test_pins_are_read_with_their_versions_only(tmp_path: Path) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text("a-b==1.0 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\nc[d]==2.0+cpu ; x\n# e==3\n")
    assert doctor.read_pins(lock) == {"a-b": "1.0", "c": "2.0+cpu"}
    assert doctor.read_pins(tmp_path / "none") == {}


def test_a_package_is_loaded_in_a_process_of_its_own() -> None:
    assert doctor.check_import("pydantic", "pydantic.BaseModel").status == "ok"
    assert doctor.check_import("pydantic", "pydantic.no_such_thing").failed
    broken = doctor.check_import("no_such_package")
    assert broken.failed and "no_such_package" in broken.found


def test_a_folder_that_cannot_be_written_fails() -> None:
    assert doctor.check_disk("disk", Path("/proc/1/runs")).failed
