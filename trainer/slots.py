"""The two buffers that published weights lie in: files in shared memory, or memory of the trainer's GPU.

A slot is one flat run of bytes with a view for each tensor. Senders read it in threads of their own while the next
version goes into the other slot; a slot that is being read is not written.
"""

import base64
import contextlib
import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.errors import PublishError

ALIGNMENT = 64
"""Bytes. Each tensor begins at a multiple, which suits every dtype and the words of `sum64`."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Random since the machine started: the same for two processes exactly when they run under one kernel."""
READERS_S = 600.0
"""How long a write waits for engines that still fetch the slot's old version. The run itself waits for every engine
before it trains on, so that only an engine which it gave up can hold a slot; chunk deadlines end that one in minutes.
"""
_CHUNK_WORDS = 1 << 23
"""Words summed at once: 64 MiB, so that the products take little memory beside the weights."""


class Slot:
    """A flat uint8 tensor with views of its parts, written whole and read under a lease."""

    checksum_kind = ""
    """Name of the checksum in the manifest."""

    def __init__(self, flat_N: Tensor, tensors: Sequence[Mapping[str, Any]], sources: Iterable[Tensor]) -> None:
        self._flat_N = flat_N
        self._targets = [
            flat_N[entry["offset"] : entry["offset"] + source.numel() * source.element_size()]
            .view(source.dtype)
            .view(source.shape)
            for entry, source in zip(tensors, sources, strict=True)
        ]
        self._holds: tuple[int, str] | None = None
        self._readers = 0
        self._changed = threading.Condition()

    def write(self, version: int, sources: Iterable[Tensor]) -> str:
        """Wait until nobody reads, copy, and return the checksum of what then lies here.

        Raises PublishError when a reader does not end in time.
        """
        with self._changed:
            self._holds = None  # from here on the old version is refused, so the wait ends
            if not self._changed.wait_for(lambda: self._readers == 0, READERS_S):
                raise PublishError(f"an engine has fetched an old version for {READERS_S:.0f} s; end that engine.")
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source)
        checksum = self._checksum()
        with self._changed:
            self._holds = (version, checksum)
        return checksum

    @contextlib.contextmanager
    def read(self, version: int, checksum: str) -> Iterator[Tensor | None]:
        """Lend the bytes, unchanged until the block ends; None when this very set is not here."""
        with self._changed:
            held = self._holds == (version, checksum)
            self._readers += held
        try:
            yield self._flat_N if held else None
        finally:
            with self._changed:
                self._readers -= held
                self._changed.notify_all()

    def offer(self) -> dict[str, Any]:
        """The manifest's keys for what can be mapped without a sender."""
        return {}

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._holds = None
        self._targets.clear()
        self._flat_N = torch.empty(0, dtype=torch.uint8)

    def _checksum(self) -> str:
        raise NotImplementedError


class HostSlot(Slot):
    """A segment in shared memory."""

    checksum_kind = "sha256"

    def __init__(
        self, path: Path, nbytes: int, tensors: Sequence[Mapping[str, Any]], sources: Sequence[Tensor]
    ) -> None:
        """Raises PublishError when the file cannot be made."""
        self.path = path
        self._memory = _map(path, nbytes)
        super().__init__(torch.frombuffer(self._memory, dtype=torch.uint8), tensors, sources)

    def offer(self) -> dict[str, Any]:
        """See `Slot.offer`: the segment."""
        return {"segment": {"path": str(self.path), "boot_id": BOOT_ID.read_text().strip()}}

    def close(self) -> None:
        """See `Slot.close`: unlinks the file."""
        self.path.unlink(missing_ok=True)
        super().close()
        with contextlib.suppress(BufferError):  # of a sender that could not be ended: it goes with the process
            self._memory.close()

    def _checksum(self) -> str:
        return hashlib.sha256(self._memory).hexdigest()


class DeviceSlot(Slot):
    """A buffer beside the weights. Works on any device; only a GPU's memory can be mapped by other processes."""

    checksum_kind = "sum64"

    def __init__(
        self, device: torch.device, nbytes: int, tensors: Sequence[Mapping[str, Any]], sources: Sequence[Tensor]
    ) -> None:
        """Raises PublishError when the device has no room."""
        try:
            flat_N = torch.zeros(nbytes, dtype=torch.uint8, device=device)  # zeros: padding is part of the checksum
        except torch.OutOfMemoryError as error:
            raise PublishError(f"{device} has no room for {nbytes} bytes of weights to publish.") from error
        # Made once: each export wraps the buffer once more and would grow with every publish.
        self._offer = {"ipc": ipc_offer(flat_N)} if device.type == "cuda" else {}
        super().__init__(flat_N, tensors, sources)

    def offer(self) -> dict[str, Any]:
        """See `Slot.offer`: the handle of the buffer, on a GPU."""
        return self._offer

    def _checksum(self) -> str:
        return sum64(self._flat_N)  # its answer is awaited, so all copies are done when the manifest goes out


def sum64(flat_N: Tensor) -> str:
    """Position-weighted sum of 8-byte words, Σ (2i + 1)·wordᵢ modulo 2⁶⁴, as 16 hexadecimal digits.

    Computed where the bytes lie. Odd weights have inverses, so any change of a single word shows, and a swap of two
    words as good as always. It guards against corruption, not against an attacker.
    """
    words_W = flat_N.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat_N.device)
    for start in range(0, len(words_W), _CHUNK_WORDS):
        part_W = words_W[start : start + _CHUNK_WORDS]
        weights_W = torch.arange(start, start + len(part_W), device=flat_N.device).mul_(2).add_(1)
        total += weights_W.mul_(part_W).sum()
    return f"{int(total) % 2**64:016x}"


def ipc_offer(flat_N: Tensor) -> dict[str, Any]:
    """The CUDA IPC handle of a buffer, as torch's own reduction makes it, with bytes in base64 instead of a pickle."""
    from torch.multiprocessing.reductions import reduce_tensor

    rebuilt_from: Any = reduce_tensor(flat_N)[1]
    handle, size, offset, _, counter, counter_offset, event, sync = rebuilt_from[7:15]
    return {
        "gpu": gpu_uuid(flat_N.device),
        "handle": base64.b64encode(handle).decode(),
        "storage_bytes": size,
        "storage_offset": offset,
        "counter": base64.b64encode(counter).decode(),
        "counter_offset": counter_offset,
        "event": base64.b64encode(event).decode(),
        "event_sync": bool(sync),
    }


def gpu_uuid(device: torch.device) -> str:
    """UUID of a GPU, whatever number the process knows it by; empty for a device that is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


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
