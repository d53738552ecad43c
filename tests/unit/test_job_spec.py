"""A job file that cannot run is refused in one sentence that names file, key and remedy."""

from pathlib import Path

import pytest

from orchestrator.errors import SpecError
from orchestrator.spec import load_spec

GOOD = """
name = "job"
[policy]
preset = "tiny-moe"
[[domains]]
path = "d"
"""


def write(folder: Path, text: str) -> Path:
    (folder / "d").mkdir(exist_ok=True)
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, GOOD))
    assert spec.domains[0].path == (tmp_path / "d").resolve()
    assert spec.rl.updates == 100


BAD = {
    "unknown key": (GOOD + "[rl]\nupdate = 3\n", "`rl.update`; did you mean `updates`"),
    "wrong type": (GOOD + '[rl]\nupdates = "many"\n', "`rl.updates` = 'many' must be a whole number"),
    "negative": (GOOD + "[rl]\nupdates = -1\n", "`rl.updates` = -1 must be at least 0"),
    "negative weight": (
        GOOD.replace('path = "d"', 'path = "d"\nweight = -1'),
        "`domains[0].weight` = -1 must be at least 0",
    ),
    "no weight": (GOOD.replace('path = "d"', 'path = "d"\nweight = 0'), "give one a weight above 0"),
    "missing folder": (GOOD.replace('"d"', '"elsewhere"'), "domains[0].path = 'elsewhere' is no folder"),
    "no policy": (GOOD.replace('preset = "tiny-moe"', ""), "give either `preset` or `path`"),
    "missing model": (GOOD.replace('preset = "tiny-moe"', 'path = "m"'), "policy.path = 'm' is no Hugging Face model"),
    "broken TOML": ("name = ", "is not valid TOML"),
    "no domains": ('name = "x"\n[policy]\npreset = "tiny-moe"\n', "`domains` is missing"),
    "too few groups": (
        GOOD + '[[domains]]\npath = "d"\n[rl]\ngroups_per_batch = 1\n',
        "rl.groups_per_batch = 1 is less than the 2 trained domains",
    ),
    "bad port": (GOOD + "[metrics]\nport = 99999\n", "`metrics.port` = 99999 must be at most 65535"),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD.keys())
def test_a_bad_job_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    told = str(caught.value)
    assert told.startswith(str(path)) and message in told and "\n" not in told


def test_a_missing_file_a_directory_and_binary_data_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load_spec(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="is a directory"):
        load_spec(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not UTF-8"):
        load_spec(tmp_path / "binary.toml")
