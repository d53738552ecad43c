"""The history of a run as JSON lines: `events.jsonl` for what happened, `metrics.jsonl` for an entry an update."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


def finite(value: Any) -> Any:
    """The same data with NaN and infinities as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class EventLog:
    """Appends lines; each is flushed, so that a killed run keeps its history. Files are made by the first line."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append a record with the time in seconds since the epoch."""
        name = "metrics.jsonl" if kind == "update" else "events.jsonl"
        if name not in self._files:
            self._files[name] = (self._folder / name).open("a", encoding="utf-8")
        target = self._files[name]
        target.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **finite(data)}) + "\n")
        target.flush()

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()
