"""Weights out of the trainer to where engines read them, as `docs/weight-sync.md` lays down.

transformers fuses a layer's experts into one tensor; checkpoints and engines name each expert's. All of them are views
of the trainer's parameters, found once, so that a publish is one copy and one checksum. What holds the copy is in
`slots.py`, what sends it to engines that cannot map it in `channel.py`.
"""

import bisect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.channel import CHUNK_BYTES, ChannelServer
from trainer.errors import PublishError
from trainer.slots import ALIGNMENT, DeviceSlot, HostSlot, Slot

_SLOTS = 2


class Publisher:
    """Owner of the two slots of one run. Parameters must stay where they are: views into them are kept."""

    def __init__(
        self,
        model: PreTrainedModel,
        run: str,
        directory: str | os.PathLike[str] = "/dev/shm",  # noqa: S108 - the contract names it
        *,
        on_device: bool | None = None,
        address: str = "127.0.0.1",
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Find the views, make the slots, open the channel.

        Raises PublishError for a full device or an unfit architecture.

        `on_device`: whether slots lie beside the weights instead of in shared memory; by default if that is on a GPU.
        `address`: of this node, where the channel listens; by default loopback, which no other machine reaches.
        `chunk_bytes`: sent at once through the channel.
        """
        self._sources = checkpoint_views(model)
        self._tensors, self._nbytes = _lay_out(self._sources)
        self._slots: list[Slot] = []
        self._channel: ChannelServer | None = None
        self._turn = 0
        sources = list(self._sources.values())
        device = sources[0].device
        on_device = device.type == "cuda" if on_device is None else on_device
        try:
            for number in range(_SLOTS):
                if on_device:
                    self._slots.append(DeviceSlot(device, self._nbytes, self._tensors, sources))
                else:
                    path = Path(directory) / f"crosstrain-{run}-weights-{number}"
                    self._slots.append(HostSlot(path, self._nbytes, self._tensors, sources))
            self._channel = ChannelServer(
                tuple(self._slots),
                device if on_device else torch.device("cpu"),
                address,
                chunk_bytes,
            )
        except PublishError:
            self.close()
            raise

    def publish(self, version: int) -> dict[str, Any]:
        """Copy the current weights into the next slot and return the manifest of policy version `version`.

        Waits for engines that still fetch what the slot held before. Raises PublishError when they do not end.
        """
        assert self._channel is not None, "closed"
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        return {
            "version": version,
            "checksum": slot.write(version, self._sources.values()),
            "checksum_kind": slot.checksum_kind,
            "nbytes": self._nbytes,
            "tensors": self._tensors,
            **slot.offer(),
            "channel": self._channel.offer(),
        }

    def close(self) -> None:
        """End the channel and let go of the slots. Idempotent."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
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
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return tensors, offset
