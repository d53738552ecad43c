"""The history of a run as JSON lines: `events.jsonl` for what happened, `metrics.jsonl` for an entry an update."""

import errno
import io
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
    """Appends lines, each of them whole or not at all, at once, so that a killed run keeps its history.

    Files are made by the first line. What a killed run left of its last one is cut off.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, io.FileIO] = {}

    def write(self, kind: str, data: Mapping[str, Any]) -> None:
        """Append a record with the time in seconds since the epoch. Raises OSError, with the file's name."""
        path = self._folder / ("metrics.jsonl" if kind == "update" else "events.jsonl")
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **finite(data)}) + "\n"
        if path.name not in self._files:
            self._files[path.name] = _open_after_last_line(path)
        _append(self._files[path.name], line.encode(), path)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()


def _open_after_last_line(path: Path) -> io.FileIO:
    file = io.FileIO(path, "a+")
    file.seek(0)
    known = file.readall()
    file.truncate(known.rfind(b"\n") + 1)
    return file


def _append(file: io.FileIO, line: bytes, path: Path) -> None:
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) < len(line):  # what fits is written first; the next write would say why no more does
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        file.truncate(end)
        raise OSError(error.errno, error.strerror, str(path)) from error
