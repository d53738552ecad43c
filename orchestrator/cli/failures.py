"""The one place where an exception becomes a sentence and an exit code."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

SUCCESS, FAILED, INVALID, CANCELLED = 0, 1, 2, 3
DEBUG = "CROSSTRAIN_DEBUG"
"""Environment variable that shows tracebacks."""


def guarded(app: Callable[[], Any]) -> int:
    """Run the application and return its exit code; errors of ours and the system's are told in one sentence."""
    try:
        app()
    except SystemExit as end:  # how typer ends, also after a usage error, which it tells itself
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt:
        return CANCELLED
    except Exception as error:  # noqa: BLE001 - the last stop of every error; what is not ours is shown in full
        return _tell(error)
    return SUCCESS


def _tell(error: Exception) -> int:
    if os.environ.get(DEBUG) or not _ours(error):
        traceback.print_exception(error)
    sys.stderr.write(f"crosstrain: {sentence(error)}\n")
    return INVALID if _ours(error) and isinstance(error, ValueError) else FAILED


def sentence(error: BaseException) -> str:
    """One line about an error."""
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "; free some space and use --resume" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{where}{error.strerror}{remedy}"
    return " ".join(str(error).split()) or type(error).__name__


def _ours(error: BaseException) -> bool:
    """Whether the message was written for people: our error trees, and what the operating system says of a file."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in (
        "orchestrator",
        "rollout_workers",
        "sandboxes",
        "reward",
        "trainer",
    )
