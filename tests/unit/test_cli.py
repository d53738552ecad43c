"""The command line: exit codes, one sentence an error, no traceback for a user's mistake, nothing half-written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "job.toml"


def crosstrain(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def one_sentence(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    told = result.stderr.strip().splitlines()
    assert len(told) == 1 and told[0].startswith("crosstrain: "), result.stderr
    for word in words:
        assert word in told[0]


def test_help_names_every_command(tmp_path: Path) -> None:
    result = crosstrain("--help", cwd=tmp_path)
    assert result.returncode == 0
    for command in ("run", "doctor", "models", "sandboxes", "domains"):
        assert command in result.stdout


def test_an_unknown_command_is_a_usage_error(tmp_path: Path) -> None:
    assert crosstrain("fly", cwd=tmp_path).returncode == 2


def test_a_job_file_that_is_not_there(tmp_path: Path) -> None:
    one_sentence(crosstrain("run", "job.toml", cwd=tmp_path), "job.toml: no such file")
    assert list(tmp_path.iterdir()) == []


JOB = """
name = "job"
[policy]
preset = "tiny-moe"
[[domains]]
path = "d"
"""
DOMAIN = """
name = "d"
environment = "single_turn"
verifier = "math"
[components.success]
range = [0, 1]
"""


def project(folder: Path, job: str = JOB, domain: str = DOMAIN) -> None:
    (folder / "d").mkdir()
    (folder / "job.toml").write_text(job)
    (folder / "d" / "domain.toml").write_text(domain)
    (folder / "d" / "train.jsonl").write_text('{"id": "a", "prompt": "1+1=", "data": {"answer": "2"}}\n')
    (folder / "d" / "eval.jsonl").write_text('{"id": "b", "prompt": "1+2=", "data": {"answer": "3"}}\n')


@pytest.mark.parametrize(
    "job, domain, words",
    [
        (JOB + "[rl]\nupdatess = 1\n", DOMAIN, ("job.toml", "rl.updatess", "updates")),
        (JOB, DOMAIN + 'weigth = 1\nkind = "outcome"\n', ("domain.toml", "weigth", "weight")),
        (JOB, DOMAIN + "weight = -1\n", ("domain.toml", "weight", "at least 0")),
        (JOB, DOMAIN.replace('"math"', '"maths"'), ("domain.toml", "maths", "math")),
        (JOB, DOMAIN.replace("[0, 1]", "[1, 1]"), ("domain.toml", "range")),
        (JOB.replace('preset = "tiny-moe"', 'path = "nowhere"'), DOMAIN, ("job.toml", "policy.path", "nowhere")),
    ],
)
def test_a_malformed_file_is_refused_before_anything_starts(
    tmp_path: Path, job: str, domain: str, words: tuple[str, ...]
) -> None:
    project(tmp_path, job, domain)
    one_sentence(crosstrain("run", "job.toml", cwd=tmp_path), *words)
    assert not (tmp_path / "runs").exists()


def test_a_domain_without_an_eval_split(tmp_path: Path) -> None:
    project(tmp_path)
    (tmp_path / "d" / "eval.jsonl").unlink()
    one_sentence(crosstrain("run", "job.toml", cwd=tmp_path), "eval.jsonl", "no such file")


def test_resuming_what_was_never_run(tmp_path: Path) -> None:
    project(tmp_path)
    one_sentence(crosstrain("run", "job.toml", "--resume", cwd=tmp_path), "--resume", "run it without --resume")
    one_sentence(crosstrain("run", "job.toml", "--run", "job-x", cwd=tmp_path), "job-x", "no such run")


def test_a_job_with_the_same_domain_twice(tmp_path: Path) -> None:
    project(tmp_path, JOB + '[[domains]]\npath = "d"\n[rl]\ngroups_per_batch = 4\n')
    one_sentence(crosstrain("run", "job.toml", cwd=tmp_path), "domains[1].path", "'d' is taken")


def test_a_model_is_made_once_and_never_overwritten(tmp_path: Path) -> None:
    made = crosstrain("models", "init", "policy", "-o", "json", cwd=tmp_path)
    assert made.returncode == 0 and json.loads(made.stdout) == {"path": "policy", "preset": "tiny-moe"}
    assert (tmp_path / "policy" / "config.json").is_file()
    one_sentence(crosstrain("models", "init", "policy", cwd=tmp_path), "policy exists already")


def test_a_dead_docker_engine_is_one_sentence_and_exit_code_1(tmp_path: Path) -> None:
    result = crosstrain("sandboxes", "ps", cwd=tmp_path, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "Docker engine" in result.stderr and "start it" in result.stderr


def test_validation_of_a_folder_that_is_no_domain(tmp_path: Path) -> None:
    one_sentence(crosstrain("domains", "validate", ".", cwd=tmp_path), "domain.toml", "no such file")


def test_the_quickstart_is_valid(tmp_path: Path) -> None:
    from orchestrator.spec import load_spec

    assert [entry.path.name for entry in load_spec(QUICKSTART).domains] == ["terminal", "code", "math", "tools"]
