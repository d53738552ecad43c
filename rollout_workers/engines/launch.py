"""The surroundings in which vLLM starts: environment variables, a directory for its files, a log for its chatter."""

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollout_workers.config import EngineConfig

LOG = "vllm.log"
"""Name of the log in the engine's directory."""


def debugging() -> bool:
    """Whether vLLM's log goes to the terminal, in full."""
    return bool(os.environ.get("CROSSTRAIN_DEBUG"))


@contextmanager
def surroundings(config: EngineConfig, directory: str) -> Iterator[None]:
    """Holds while vLLM is imported and started; the process that it spawns inherits all of it.

    `directory` takes vLLM's sockets and temporary files, some of which it never removes, and the log. The whole process
    writes to the log meanwhile: vLLM offers no other way to quieten what it spawns.
    """
    saved = {name: os.environ.get(name) for name in variables(config, directory)}
    try:
        _set(variables(config, directory))
        with warnings.catch_warnings():
            if debugging():
                yield
                return
            warnings.simplefilter("ignore")  # its imports use deprecated names
            with _output_to(Path(directory) / LOG):
                yield
    finally:
        _set(saved)


def variables(config: EngineConfig, directory: str) -> dict[str, str | None]:
    """What vLLM reads from the environment; None stands for a variable that must not be set."""
    common: dict[str, str | None] = {
        "TMPDIR": directory,
        "VLLM_RPC_BASE_PATH": directory,
        "VLLM_LOGGING_LEVEL": "DEBUG" if debugging() else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.gpus_per_worker > 0:
        return common
    return common | {
        # More threads spin at barriers and take the trainer's core; Ray sets the same where an actor has one CPU.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # vLLM compiles a few lines of its sampler, which takes seconds and a C++ compiler that many machines lack.
        "TORCH_COMPILE_DISABLE": "1",
        # With multiprocessing on, the CPU platform swaps the in-process executor for one with a further process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # It would win over `kv_cache_memory_bytes`, and crash when empty.
        "VLLM_CPU_KVCACHE_SPACE": None,
    }


def last_error(directory: str) -> str:
    """The last line in the log that names an error, without vLLM's prefix; empty when there is none."""
    try:
        lines = (Path(directory) / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    named = [line for line in lines if "Error: " in line]
    return named[-1].rpartition("] ")[2].strip() if named else ""


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Point the descriptors of standard output and error at a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
        for descriptor in (log, *saved):
            os.close(descriptor)


def _set(wanted: Mapping[str, str | None]) -> None:
    for name, value in wanted.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
