"""The history of a run: whole lines on a disk that is full, and after a run that was killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.run.events import EventLog

ROOT = Path(__file__).parents[2]
FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from orchestrator.run.events import EventLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
log = EventLog(Path(sys.argv[1]))
try:
    for number in range(100):
        log.write("note", {"number": number})
except OSError as error:
    log.close()
    sys.exit(f"{error.filename}: {error.strerror}")
"""
"""A limit on a file's size is met as a full disk is: first a part of the line fits, then nothing does."""


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path / 'events.jsonl'}: ")
    lines = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    assert lines and all(line.endswith("\n") for line in lines)
    assert [json.loads(line)["number"] for line in lines] == list(range(len(lines)))


@pytest.mark.parametrize("torn", ["", '{"time": 1, "kind": "no', '{"time": 1}\n{"ti'])
def test_a_line_that_a_killed_run_left_half_is_cut_off(tmp_path: Path, torn: str) -> None:
    (tmp_path / "events.jsonl").write_text(torn)
    log = EventLog(tmp_path)
    log.write("phase", {"phase": "rl"})
    log.write("phase", {"phase": "eval"})
    log.close()
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [record.get("phase") for record in records] == [None] * torn.count("\n") + ["rl", "eval"]
