"""Weights out of the trainer into shared memory, as `docs/weight-sync.md` lays down.

transformers fuses a layer's experts into one tensor; checkpoints and engines name each expert's. All of them are views
of the trainer's parameters, found once, so that a publish is one copy and one checksum.
"""

import bisect
import contextlib
import hashlib
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.errors import PublishError

_ALIGNMENT = 64
_SLOTS = 2


class Publisher:
    """Owner of the two segments of one run. Parameters must stay where they are: views into them are kept."""

    def __init__(self, model: PreTrainedModel, run: str, directory: str | os.PathLike[str] = "/dev/shm") -> None:  # noqa: S108 - the contract names it
        """Find the views and make the segments. Raises PublishError for a full device or an unfit architecture."""
        self._sources = checkpoint_views(model)
        self._tensors, self._nbytes = _lay_out(self._sources)
        self._slots: list[_Slot] = []
        self._turn = 0
        try:
            for slot in range(_SLOTS):
                path = Path(directory) / f"crosstrain-{run}-weights-{slot}"
                self._slots.append(_Slot(path, self._tensors, self._nbytes, self._sources))
        except PublishError:
            self.close()
            raise

    def publish(self, version: int) -> dict[str, Any]:
        """Copy the current weights into the next slot and return the manifest of policy version `version`."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        checksum = slot.write(self._sources.values())
        return {
            "version": version,
            "checksum": checksum,
            "path": str(slot.path),
            "nbytes": self._nbytes,
            "tensors": self._tensors,
        }

    def close(self) -> None:
        """Unlink the segments. Idempotent."""
        for slot in self._slots:
            slot.close()
        self._slots = []


def checkpoint_views(model: PreTrainedModel) -> dict[str, Tensor]:
    """Name in the Hugging Face checkpoint to a view of the model's own storage. A tied output layer is left out.

    Which element goes where is asked of transformers itself: it converts tensors that hold their own addresses, and the
    strides of the answer are the view. Takes 8 bytes a parameter while it runs. Raises PublishError for an architecture
    whose conversion does arithmetic or gathers from several parameters.
    """
    sources: list[_Source] = []
    seen: set[tuple[int, torch.Size]] = set()
    addresses: dict[str, Tensor] = {}
    start = 0
    for name, tensor in model.state_dict().items():
        if (place := (tensor.data_ptr(), tensor.shape)) in seen:  # the second name of a tied tensor
            continue
        seen.add(place)
        addresses[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape)
        sources.append(_Source(start, tensor.detach(), addresses[name]))
        start += tensor.numel()
    converted: Mapping[str, Tensor] = revert_weight_conversion(model, addresses)
    return {name: _view(name, wanted, sources) for name, wanted in converted.items()}


class _Source(NamedTuple):
    """A parameter and the addresses that stand for its elements, from `start` on."""

    start: int
    parameter: Tensor
    addresses: Tensor


def _view(name: str, wanted: Tensor, sources: Sequence[_Source]) -> Tensor:
    """The view of a parameter whose elements have the addresses `wanted`."""
    first = int(wanted.flatten()[0])
    source = sources[bisect.bisect_right(sources, first, key=lambda s: s.start) - 1]
    strides = [int(wanted.select(d, 1).flatten()[0]) - first if n > 1 else 1 for d, n in enumerate(wanted.shape)]
    offset = first - source.start
    last = offset + sum((n - 1) * stride for n, stride in zip(wanted.shape, strides, strict=True))
    inside = min(strides, default=0) >= 0 and last < source.parameter.numel()
    if not inside or not torch.equal(source.addresses.as_strided(wanted.shape, strides, offset), wanted):
        raise PublishError(
            f"{name} is no view of one parameter in this architecture; publish it through files instead."
        )
    assert source.parameter.is_contiguous()
    return source.parameter.as_strided(wanted.shape, strides, source.parameter.storage_offset() + offset)


def _lay_out(sources: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], int]:
    """The manifest's `tensors` and the bytes of the whole set."""
    tensors: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in sources.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "offset": offset})
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return tensors, offset


class _Slot:
    """One segment, mapped once, with a tensor over each part of it."""

    def __init__(self, path: Path, tensors: list[dict[str, Any]], nbytes: int, sources: Mapping[str, Tensor]) -> None:
        self.path = path
        self._memory = _map(path, nbytes)
        self._targets = [
            torch.frombuffer(self._memory, dtype=source.dtype, count=source.numel(), offset=entry["offset"]).view(
                source.shape
            )
            for entry, source in zip(tensors, sources.values(), strict=True)
        ]

    def write(self, sources: Iterable[Tensor]) -> str:
        """Copy and return the checksum of what then lies in the segment."""
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source)
        return hashlib.sha256(self._memory).hexdigest()

    def close(self) -> None:
        self._targets.clear()
        self._memory.close()
        self.path.unlink(missing_ok=True)


def _map(path: Path, nbytes: int) -> mmap.mmap:
    path.unlink(missing_ok=True)  # of a killed run; a reader that still maps it keeps its own copy
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, nbytes)  # else a full device shows as SIGBUS in the middle of a copy
            return mmap.mmap(descriptor, nbytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise PublishError(
            f"{path} cannot take {nbytes} bytes of weights ({error.strerror}); free shared memory."
        ) from error
