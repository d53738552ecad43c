"""Ray: the only file that imports it. Starts or joins a cluster, makes actors of the plain classes, and hides them
behind the handles of `run/fleet.py`.

Without `RAY_ADDRESS` a cluster is started on this machine for the run alone and ends with it. Ray's servers listen on
all interfaces whatever they are told, so token authentication is always on for it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without GPUs keep the devices they see
if not os.environ.get("RAY_ADDRESS"):
    os.environ["RAY_AUTH_MODE"] = "token"  # read while Ray is imported, never again
    # Ray puts its workers at niceness 15, where anything else on the machine starves the engine and the trainer.
    os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.errors import ClusterError
from orchestrator.run.fleet import Fleet, LearnerHandle, SandboxHostHandle, WorkerHandle
from orchestrator.spec import JobSpec
from reward.domain import Domain
from rollout_workers.worker import RolloutWorker
from sandboxes.pool import LeaseSource, LocalProvider, SandboxHost
from trainer.learner import Learner

H = TypeVar("H")

TOKEN = secrets.token_hex(32)
"""Of the clusters that this process starts: Ray reads a process's token once."""
OBJECT_STORE_MB = 256
"""Ray's shared memory on a cluster of our own: batches and transcripts are small, weights have their own segment."""


class Cluster:
    """A Ray cluster and the actors of one run: `start`, `deploy`, and `close` on every way out."""

    def __init__(self, run: str, scratch: Path) -> None:
        """`scratch`: folder of this run for Ray's files and sockets; its path must stay under 50 bytes."""
        self._run = run
        self._scratch = scratch
        self._actors: list[Any] = []
        self._starting: asyncio.Future[None] | None = None
        self.dashboard = ""
        """Address of Ray's dashboard; empty when there is none."""
        self.token: Path | None = None
        """File with the token that the dashboard asks for, on a cluster of our own."""

    async def start(self) -> None:
        """Join the cluster at `RAY_ADDRESS`, or start one. Raises `ClusterError`."""
        self._starting = asyncio.ensure_future(asyncio.to_thread(self._start))
        await asyncio.shield(self._starting)
        # Ray puts a crash handler of its own on SIGTERM, below Python's: put ours back.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))

    def _start(self) -> None:
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": self._run}
        address = os.environ.get("RAY_ADDRESS")
        try:
            if address:
                context = ray.init(address=address, **common)
            else:
                self._use_token()
                context = ray.init(
                    include_dashboard=True,
                    dashboard_host="127.0.0.1",
                    object_store_memory=OBJECT_STORE_MB << 20,
                    _temp_dir=str(self._scratch / "ray"),
                    **common,
                )
        except (RayError, OSError, ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            where = f"at RAY_ADDRESS = {address}" if address else "on this machine"
            raise ClusterError(f"Ray {where} did not start: {_line(error)}; run `crosstrain doctor`") from error
        self.dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else ""

    def _use_token(self) -> None:
        path = self._scratch / "ray-token"
        path.touch(mode=0o600)
        path.write_text(TOKEN)
        self.token = path
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)

    async def deploy(self, spec: JobSpec, domains: Sequence[Domain], model: Path) -> Fleet:
        """Make the actors and wait until each answers; the engines are not started yet.

        `model`: the policy's Hugging Face directory; the learner makes it first when the job names a preset.
        """
        openmp = {
            "OMP_NUM_THREADS": str(max(spec.trainer.threads, spec.sft.threads)),
            "OMP_WAIT_POLICY": "passive",  # threads that spin at barriers take the cores from the engine
        }
        learner = self._actor(Learner, LearnerHandle, num_gpus=spec.trainer.gpus, runtime_env={"env_vars": openmp})(
            str(model),
            spec.policy.preset,
            spec.trainer,
            spec.sft,
            seed=spec.seed,
            run=self._run,
            many_machines=bool(os.environ.get("RAY_ADDRESS")),
        )
        await learner.ready()
        sandboxed = any(domain.config.environment != "single_turn" for domain in domains)
        workers: list[WorkerHandle] = []
        hosts: dict[str, SandboxHostHandle] = {}
        for _ in range(spec.engine.workers):
            worker = self._actor(_Worker, _WorkerHandle, num_gpus=spec.engine.gpus_per_worker, max_concurrency=1024)(
                str(model), spec.engine, list(domains)
            )
            workers.append(worker)
            if sandboxed:
                node = await worker.node()
                if node not in hosts:
                    hosts[node] = await self._start_host(spec, node)
                await worker.use_host(cast(_Proxy, hosts[node]).actor)
        return Fleet(workers, learner, list(hosts.values()))

    async def _start_host(self, spec: JobSpec, node: str) -> SandboxHostHandle:
        pinned = NodeAffinitySchedulingStrategy(node, soft=False)
        host = self._actor(SandboxHost, SandboxHostHandle, max_concurrency=1024, scheduling_strategy=pinned)(
            spec.sandboxes, self._run, self._scratch / "sandboxes"
        )
        await host.start()
        return host

    def _actor(self, plain: type, handle: type[H], **options: Any) -> Callable[..., H]:
        """A constructor of actors of `plain`, which answer as `handle`."""
        # No CPU is reserved: engines, trainer and sandboxes share the cores of a small machine, and a reservation that
        # does not fit would wait for ever without a word.
        remote = ray.remote(plain).options(num_cpus=0, max_restarts=0, **options)

        def make(*args: Any, **kwargs: Any) -> H:
            actor = remote.remote(*args, **kwargs)
            self._actors.append(actor)
            return cast(H, _Proxy(actor))

        return make

    async def close(self) -> None:
        """End the actors, each by its own clean-up first, then the cluster when it is ours. Idempotent."""
        if self._starting is not None:
            await asyncio.wait(
                [self._starting]
            )  # a thread cannot be cancelled; a half-started cluster cannot be stopped
        await asyncio.gather(*(self._end(actor) for actor in self._actors))
        self._actors.clear()
        await asyncio.to_thread(ray.shutdown)

    @staticmethod
    async def _end(actor: Any) -> None:
        # A dead or hanging actor is killed all the same, and the guardian looks after what it left.
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(actor.close.remote(), timeout=20)
        ray.kill(actor)

    def keep_logs(self, target: Path) -> None:
        """Copy the actors' logs out of the scratch folder of a cluster of our own, which ends with it.

        A disk that is full gets none: the error that the run ends with must not be hidden behind this one.
        """
        logs = self._scratch / "ray" / "session_latest" / "logs"
        try:
            if logs.is_dir():
                shutil.copytree(logs.resolve(), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("old"))
        except OSError:
            shutil.rmtree(target, ignore_errors=True)


class _Worker(RolloutWorker):
    """A rollout worker whose sandboxes come from the host actor of its node; commands go to them directly, past Ray."""

    async def node(self) -> str:
        """Id of the node that the actor runs on."""
        return ray.get_runtime_context().get_node_id()

    async def use_host(self, actor: Any) -> None:
        """Take leases from this host actor."""
        self.use_sandboxes(LocalProvider(cast(LeaseSource, _Proxy(actor))))


class _WorkerHandle(WorkerHandle, Protocol):
    """What only workers in a cluster answer."""

    async def node(self) -> str: ...
    async def use_host(self, actor: Any) -> None: ...


class _Proxy:
    """Calls the methods of an actor as coroutines that raise what was raised there."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await getattr(self.actor, method).remote(*args, **kwargs)
            except RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, Exception) else ClusterError(_line(error))) from None
            except RayActorError as error:
                raise ClusterError(f"an actor died: {_line(error)}; its logs are in the run's folder") from error

        return call


def _line(error: BaseException) -> str:
    """The line of an error that tells the most. Ray's text of a failed constructor ends with what that raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1 if "creation task" in lines[0] else 0]
