"""Checkpoints of a run: one directory a version, whole or absent.

    checkpoints/000025/
        trainer/      weights (Hugging Face format), optimiser, step, RNG: written by the learner
        state.json    sampler, normaliser, baseline, counters: everything else the loop goes on from

Groups in flight are not saved. The sampler's state is the one from before the next batch was planned, so a resumed
run plans that batch again and skips no task.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.run.events import finite
from orchestrator.run.fleet import LearnerHandle
from trainer.atomic import atomic_directory
from trainer.errors import CheckpointError

STATE = "state.json"
TRAINER = "trainer"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`keep`: newest checkpoints kept."""
        self._folder = folder
        self._keep = keep

    async def save(self, version: int, state: Mapping[str, Any], learner: LearnerHandle) -> Path:
        """Write the checkpoint of `version`. Raises `CheckpointError`; older ones stay as they are."""
        target = self._folder / f"{version:06d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_directory(target) as partial:
                await _save_trainer(learner, partial / TRAINER, target)
                (partial / STATE).write_text(json.dumps({"version": version, **finite(state)}), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"{target}: no checkpoint could be written ({error.strerror}); free space on that disk."
            ) from error
        for old in self._whole()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The trainer's directory and the state of the newest checkpoint, or None when there is none.

        Raises `CheckpointError` when it cannot be read.
        """
        whole = self._whole()
        if not whole:
            return None
        path = whole[-1]
        try:
            return path / TRAINER, json.loads((path / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); remove it to go on from the one before"
            ) from error

    def _whole(self) -> list[Path]:
        """Complete checkpoints, oldest first. Unfinished ones have another name until they are whole."""
        if not self._folder.is_dir():
            return []
        return sorted(path for path in self._folder.iterdir() if path.name.isdigit() and (path / STATE).is_file())


async def _save_trainer(learner: LearnerHandle, path: Path, target: Path) -> None:
    try:
        await learner.save(path)
    except CheckpointError as error:  # names the passing place that the learner was given
        raise CheckpointError(str(error).replace(str(path), str(target))) from error
