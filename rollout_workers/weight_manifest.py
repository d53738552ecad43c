"""The weight manifest, the choice among the ways it offers, and the segment: receiving half of `docs/weight-sync.md`.

Free of torch and vLLM, so that the scripted engine holds manifests to the same rules as the real one. What only a
loader can judge (finite values) is left to `weight_receiver.py`, fetching through the channel to `weight_channel.py`.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_workers.errors import WeightSyncRejected

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Way = Literal["segment", "ipc", "nccl", "gloo"]
"""How a set travels: mapped from shared memory or the same GPU, or fetched through a backend of the channel."""


class TensorEntry(BaseModel):
    """Where one tensor lies in the set, for example
    `TensorEntry(name="model.norm.weight", dtype="float32", shape=(128,), offset=64)`.
    """

    model_config = _FROZEN

    name: str
    """Name in the Hugging Face checkpoint of the architecture."""
    dtype: str
    """Name of the torch dtype, such as `float32`."""
    shape: tuple[int, ...]
    """Sizes of the dimensions."""
    offset: int = Field(ge=0)
    """First byte, counted from the start of the set."""


class SegmentOffer(BaseModel):
    """A file in shared memory, for engines on the trainer's machine."""

    model_config = _FROZEN

    path: str
    """The file."""
    boot_id: str
    """Of the machine that holds it, from `/proc/sys/kernel/random/boot_id`."""


class IpcOffer(BaseModel):
    """A buffer on a GPU, for engines on that GPU: what torch's `rebuild_cuda_tensor` takes, bytes in base64."""

    model_config = _FROZEN

    gpu: str
    """UUID of the GPU."""
    handle: str
    """CUDA IPC handle of the allocation, base64."""
    storage_bytes: int = Field(gt=0)
    """Bytes of the buffer's storage."""
    storage_offset: int = Field(ge=0)
    """First byte of the storage in the allocation."""
    counter: str
    """Name of torch's shared reference counters, base64."""
    counter_offset: int = Field(ge=0)
    """Place of the buffer's counter among them."""
    event: str
    """CUDA IPC handle of the event that the buffer was exported at, base64."""
    event_sync: bool
    """Whether the event has to be waited for."""


class ChannelOffer(BaseModel):
    """Where the trainer serves engines that can map nothing."""

    model_config = _FROZEN

    host: str
    """Address of the trainer's node."""
    port: int = Field(gt=0, lt=65536)
    """Port of the store that engines announce themselves and ask in."""
    gpu: str
    """UUID of the GPU that the set lies on; empty when it lies in host memory."""
    chunk_bytes: int = Field(gt=0)
    """Bytes of each broadcast but the last."""


class WeightManifest(BaseModel):
    """Describes one published set of weights."""

    model_config = _FROZEN

    version: int = Field(ge=0)
    """Policy version of the set."""
    checksum: str
    """Hexadecimal checksum of the set's `nbytes` bytes."""
    checksum_kind: Literal["sha256", "sum64"]
    """SHA-256, or the position-weighted sum that GPUs compute in place."""
    nbytes: int = Field(gt=0)
    """Bytes of the whole set, padding included."""
    tensors: tuple[TensorEntry, ...] = Field(min_length=1)
    """All tensors of the set."""
    segment: SegmentOffer | None = None
    """Offered when the set lies in host memory."""
    ipc: IpcOffer | None = None
    """Offered when the set lies on a GPU."""
    channel: ChannelOffer | None = None
    """Offered by every trainer."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "WeightManifest":
        """Raises `WeightSyncRejected` naming the first key that is missing, unknown or of the wrong type."""
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise WeightSyncRejected(f"weight manifest: {key}: {first['msg']}") from error


def boot_id() -> str:
    """Of the machine that this process runs on."""
    return _BOOT_ID.read_text().strip()


def choose_way(manifest: WeightManifest, machine: str, gpu: str, ranks: int = 1) -> Way:
    """The best offer that an engine on this machine and this GPU (UUID; empty on a CPU) can take.

    `ranks`: processes of the engine. All must choose alike, so that a rank which happens to share the trainer's GPU
    does not go its own way. Raises `WeightSyncRejected` when nothing is offered that applies.
    """
    segment, ipc, channel = manifest.segment, manifest.ipc, manifest.channel
    # Containers of one machine have its boot id in common, but not always their /dev/shm.
    if segment is not None and segment.boot_id == machine and (channel is None or os.path.exists(segment.path)):
        return "segment"
    if ipc is not None and ipc.gpu == gpu and ranks == 1:
        return "ipc"
    if channel is not None:
        return "nccl" if gpu and channel.gpu and channel.gpu != gpu else "gloo"
    raise WeightSyncRejected(
        f"weights of version {manifest.version}: no way that is offered leads to this engine; "
        "a segment needs the trainer's machine, ipc the trainer's GPU"
    )


def require_checksum(manifest: WeightManifest, found: str) -> None:
    """Raises `WeightSyncRejected` unless the checksum that was found is the manifest's."""
    if found != manifest.checksum:
        raise WeightSyncRejected(
            f"weights of version {manifest.version}: the set has checksum {found}, "
            f"the manifest names {manifest.checksum}"
        )


def map_segment(manifest: WeightManifest) -> mmap.mmap:
    """Map the segment and check its size and checksum. Raises `WeightSyncRejected`.

    Copy-on-write: nothing written to the mapping reaches the file. It is `nbytes` long and lives until the last object
    that refers to it is gone.
    """
    if manifest.segment is None:
        raise WeightSyncRejected(f"weights of version {manifest.version}: no segment is offered")
    path = manifest.segment.path
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < manifest.nbytes:
                raise WeightSyncRejected(
                    f"weights of version {manifest.version}: {path} has {size} bytes, "
                    f"the manifest names {manifest.nbytes}"
                )
            segment = mmap.mmap(file.fileno(), manifest.nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightSyncRejected(f"weights of version {manifest.version}: {error}") from error
    try:
        require_checksum(manifest, hashlib.sha256(segment).hexdigest())
    except WeightSyncRejected:
        segment.close()
        raise
    return segment


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the safetensors files of a Hugging Face directory, read from their headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    for name in files:
        with open(directory / name, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {key: tuple(entry["shape"]) for key, entry in header.items() if key != "__metadata__"}
    return shapes


def check_layout(manifest: WeightManifest, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]) -> None:
    """Raises `WeightSyncRejected` unless the manifest names exactly the expected tensors with their shapes.

    `optional` tensors may be absent (an output layer that is tied to the embedding).
    """
    offered = {entry.name: entry.shape for entry in manifest.tensors}
    if len(offered) < len(manifest.tensors):
        raise WeightSyncRejected(f"weights of version {manifest.version}: a tensor is named twice")
    missing = sorted(expected.keys() - offered.keys() - optional)
    unknown = sorted(offered.keys() - expected.keys() - optional)
    if missing or unknown:
        raise WeightSyncRejected(
            f"weights of version {manifest.version}: {len(missing)} tensors are missing {missing[:3]} "
            f"and {len(unknown)} are not of this model {unknown[:3]}"
        )
    for name, shape in offered.items():
        if shape != expected.get(name, shape):
            raise WeightSyncRejected(
                f"weights of version {manifest.version}: {name} has shape {list(shape)}, "
                f"the model's checkpoint {list(expected[name])}"
            )
