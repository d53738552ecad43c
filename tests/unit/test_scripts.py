"""What can be tested of the scripts without setting up a machine: syntax, messages, and that a second start is idle."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(path for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci/run"] if path.suffix == "")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd="/",  # scripts find their folder wherever they are called from
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


@pytest.mark.parametrize("path", [*COMMANDS, ROOT / "scripts/common.sh"], ids=lambda path: path.name)
def test_scripts_are_valid_bash(path: Path) -> None:
    checked = run("bash", "-n", path)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_commands_can_be_started_and_stop_at_errors(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert os.access(path, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "set -euo pipefail" in text


def in_common(root: Path, code: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-c", f'set -euo pipefail; . "{ROOT}/scripts/common.sh"; log="{root}/log"; {code}')


def test_a_step_is_one_line_and_its_output_is_in_the_log(tmp_path: Path) -> None:
    done = in_common(tmp_path, "step 'the label' bash -c 'echo noise; echo more >&2'")
    assert done.returncode == 0 and done.stdout == ""
    assert done.stderr.split() == ["the", "label", "0", "s"] and done.stderr.count("\n") == 1
    assert {"noise", "more"} <= set((tmp_path / "log").read_text().split("\n"))


def test_a_failed_step_shows_the_end_of_the_log_and_stops(tmp_path: Path) -> None:
    done = in_common(tmp_path, "step 'the label' bash -c 'echo the cause; exit 7'; echo went on")
    assert done.returncode == 7 and "went on" not in done.stdout
    assert "the cause" in done.stderr and f"{tmp_path}/log" in done.stderr


def test_an_unknown_argument_is_refused() -> None:
    for script in ("setup", "docker-engine"):
        done = run(ROOT / "scripts" / script, "--nonsense")
        assert done.returncode == 1 and done.stderr.startswith(f"{script}: ")


def test_a_docker_host_of_the_users_own_is_never_replaced() -> None:
    for verb in ("status", "start"):
        done = run(ROOT / "scripts/docker-engine", verb, DOCKER_HOST="unix:///nowhere")
        assert done.returncode == 1
        assert "no Docker engine answers at unix:///nowhere" in done.stderr


def test_a_second_start_does_nothing_and_two_at_once_agree() -> None:
    if not (ROOT / ".venv/crosstrain-stamp").is_file():
        pytest.skip("this .venv was not made by scripts/setup")
    assert run(ROOT / "scripts/setup", "--packages").returncode == 0
    both = [
        subprocess.Popen(
            [ROOT / "scripts/setup", "--packages"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all("setting up" not in output for output in outputs), outputs
