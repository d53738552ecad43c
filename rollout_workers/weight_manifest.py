"""The weight manifest and the segment it names: the receiving half of the contract in `docs/weight-sync.md`.

Free of torch and vLLM, so that the scripted engine holds manifests to the same rules as the real one. What only a
loader can judge (finite values) is left to `weight_receiver.py`.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout_workers.errors import WeightSyncRejected

_FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TensorEntry(BaseModel):
    """Where one tensor lies in the segment, for example
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
    """First byte, counted from the start of the segment."""


class WeightManifest(BaseModel):
    """Describes one published set of weights."""

    model_config = _FROZEN

    version: int = Field(ge=0)
    """Policy version of the set."""
    checksum: str
    """Hexadecimal SHA-256 of the first `nbytes` bytes of the segment."""
    path: str
    """The segment's file."""
    nbytes: int = Field(gt=0)
    """Bytes of the whole set, padding included."""
    tensors: tuple[TensorEntry, ...] = Field(min_length=1)
    """All tensors of the set."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "WeightManifest":
        """Raises `WeightSyncRejected` naming the first key that is missing, unknown or of the wrong type."""
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise WeightSyncRejected(f"weight manifest: {key}: {first['msg']}") from error


def map_segment(manifest: WeightManifest) -> mmap.mmap:
    """Map the segment and check its size and checksum. Raises `WeightSyncRejected`.

    Copy-on-write: nothing written to the mapping reaches the file. It is `nbytes` long and lives until the last object
    that refers to it is gone.
    """
    try:
        with open(manifest.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < manifest.nbytes:
                raise WeightSyncRejected(
                    f"weights of version {manifest.version}: {manifest.path} has {size} bytes, "
                    f"the manifest names {manifest.nbytes}"
                )
            segment = mmap.mmap(file.fileno(), manifest.nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightSyncRejected(f"weights of version {manifest.version}: {error}") from error
    found = hashlib.sha256(segment).hexdigest()
    if found != manifest.checksum:
        segment.close()
        raise WeightSyncRejected(
            f"weights of version {manifest.version}: {manifest.path} has checksum {found}, "
            f"the manifest names {manifest.checksum}"
        )
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
