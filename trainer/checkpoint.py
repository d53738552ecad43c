"""Checkpoints of the trainer: one directory, whole or not there.

`policy/` is a Hugging Face directory; `trainer.pt` holds the optimiser, counters and RNG states; `manifest.json`,
written last, holds each file's size, so that a directory that was torn by a copy or a repair of the disk is refused.
"""

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from trainer.atomic import atomic_directory
from trainer.errors import CheckpointError, PolicyNotSaved
from trainer.policy import load_policy, save_policy

_POLICY, _STATE, _MANIFEST = "policy", "trainer.pt", "manifest.json"


def write(
    path: str | os.PathLike[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint; an older one at `path` is replaced, and kept if this one fails. Raises CheckpointError."""
    try:
        with atomic_directory(Path(path)) as directory:
            save_policy(model, tokenizer, directory / _POLICY)
            torch.save(dict(state), directory / _STATE)
            (directory / _MANIFEST).write_text(json.dumps(_sizes(directory), indent=1))
    # A full disk is a RuntimeError to torch.
    except (OSError, RuntimeError, SafetensorError, PolicyNotSaved) as error:
        reason = str(error.__cause__ if isinstance(error, PolicyNotSaved) else error).strip().splitlines()[0]
        raise CheckpointError(f"{path}: no checkpoint could be written ({reason}); free space on that disk.") from error


def read(path: str | os.PathLike[str], model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
    """Load the weights into `model` in place and return the state. Raises CheckpointError with nothing changed."""
    directory = Path(path)
    try:
        expected = json.loads((directory / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no whole checkpoint: {_MANIFEST} is missing or torn; use an older one."
        ) from error
    found = _sizes(directory)
    for name, size in expected.items():
        if found.get(name) != size:
            raise CheckpointError(f"{path} is torn: {name} has {found.get(name, 0)} of {size} bytes; use an older one.")
    try:
        state: dict[str, Any] = torch.load(directory / _STATE, map_location=device, weights_only=True)
        weights = load_policy(directory / _POLICY)[0].state_dict()
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path} cannot be read ({reason}); use an older one.") from error
    if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in model.state_dict().items()}:
        raise CheckpointError(f"{path} holds another architecture; resume with the model that the job began with.")
    model.load_state_dict(weights)
    return state


def rng_state() -> dict[str, torch.Tensor]:
    """The states of torch's generators, by device type."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """The inverse of `rng_state`."""
    torch.set_rng_state(states["cpu"].cpu())
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())


def _sizes(directory: Path) -> dict[str, int]:
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != _MANIFEST)
    return {str(file.relative_to(directory)): file.stat().st_size for file in sorted(files)}
