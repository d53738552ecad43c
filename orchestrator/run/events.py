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
    """Appends lines; each is flushed, so that a killed run keeps its history."""

    def __init__(self, folder: Path) -> None:
        self._events = self._open(folder / "events.jsonl")
        self._metrics = self._open(folder / "metrics.jsonl")

    @staticmethod
    def _open(path: Path) -> TextIO:
        return path.open("a", encoding="utf-8")

    def write(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append a record with the time in seconds since the epoch."""
        target = self._metrics if kind == "update" else self._events
        target.write(json.dumps({"time": round(time.time(), 3), "kind": kind, **finite(data)}) + "\n")
        target.flush()

    def close(self) -> None:
        """Close both files. Idempotent."""
        self._events.close()
        self._metrics.close()
