"""The weight manifest and the segment it names: the receiving half of the contract in `docs/weight-sync.md`.

Free of torch and vLLM, so that the scripted engine holds manifests to the same rules as the real one. What only the
model can judge (names, shapes, finite values) is left to `weight_receiver.py`.
"""

import hashlib
import mmap
import os
from collections.abc import Mapping
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
