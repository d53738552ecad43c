"""Settings of the sandbox hosts. Cheap to import: no Docker here."""

from pydantic import BaseModel, ConfigDict, Field


class SandboxConfig(BaseModel):
    """The `[sandboxes]` table of a job."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    image: str = "crosstrain/sandbox-base:1"
    """Image of every sandbox. The default is made by `crosstrain sandboxes build` when no registry has it."""
    pool_size: int = Field(default=16, ge=1, le=1000)
    """Sandboxes kept running on a host. 16 serve 128 concurrent short episodes, which hold one only while they act."""
    memory_mb: int = Field(default=256, ge=16)
    """Memory limit of a sandbox in MiB, swap included."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU limit of a sandbox in cores."""
    pids: int = Field(default=64, ge=8)
    """Largest number of processes and threads in a sandbox."""
    disk_mb: int = Field(default=32, ge=1)
    """Size of each writable directory (`/work`, `/tmp`) in MiB; all else is read-only."""
    command_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one command in seconds; its whole process tree is killed when it passes."""
    output_bytes: int = Field(default=16384, ge=256)
    """Longest output kept of each stream of a command in bytes: half from its head, half from its tail."""
    acquire_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for a free sandbox in seconds; then the episode is an infrastructure error."""
    lifetime_s: float = Field(default=6 * 3600, gt=0)
    """Age in seconds at which a sandbox ends itself whatever happened to its host: the last guard against leaks."""
