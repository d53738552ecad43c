"""Checkpoints are whole or absent, the newest are kept, and a torn one is never the latest."""

import json
from pathlib import Path

import pytest

from orchestrator.run.checkpoint import Checkpoints
from orchestrator.run.fake import FakeLearner
from trainer.errors import CheckpointError


async def test_the_newest_is_found_and_only_some_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    learner = FakeLearner()
    assert checkpoints.latest() is None
    for version in (0, 25, 50, 100):
        learner.current = version
        await checkpoints.save(version, {"sampler": {"next_batch": version}}, learner)
    latest = checkpoints.latest()
    assert latest is not None
    trainer, state = latest
    assert (trainer / "version").read_text() == "100"
    assert state["version"] == state["sampler"]["next_batch"] == 100
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["000050", "000100"]


async def test_a_failed_save_leaves_the_older_one_and_no_rubbish(tmp_path: Path) -> None:
    class Full(FakeLearner):
        async def save(self, path: Path) -> None:
            raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    await checkpoints.save(1, {}, FakeLearner(current=1))
    with pytest.raises(CheckpointError, match="No space left on device"):
        await checkpoints.save(2, {}, Full())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001"]


async def test_the_learners_error_names_the_checkpoint_and_not_its_passing_place(tmp_path: Path) -> None:
    class Full(FakeLearner):
        async def save(self, path: Path) -> None:
            raise CheckpointError(f"{path}: no checkpoint could be written (No space left on device)")

    with pytest.raises(CheckpointError) as raised:
        await Checkpoints(tmp_path / "checkpoints", keep=2).save(2, {}, Full())
    target = tmp_path / "checkpoints" / "000002"
    assert str(raised.value) == f"{target}: no checkpoint could be written (No space left on device)"


async def test_what_is_unfinished_or_foreign_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=2)
    await checkpoints.save(3, {}, FakeLearner(current=3))
    (folder / "000009").mkdir()
    (folder / ".000010.abc").mkdir()
    latest = checkpoints.latest()
    assert latest is not None and latest[0].parent.name == "000003"


async def test_a_state_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    path = await checkpoints.save(3, {}, FakeLearner(current=3))
    (path / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"000003.*remove it"):
        checkpoints.latest()


async def test_nan_is_saved_as_null(tmp_path: Path) -> None:
    path = await Checkpoints(tmp_path, keep=1).save(0, {"baseline": {"a": float("nan")}}, FakeLearner())
    assert json.loads((path / "state.json").read_text()) == {"version": 0, "baseline": {"a": None}}
