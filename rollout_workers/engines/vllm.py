"""The real engine: vLLM's AsyncLLM, token ids in and out.

vLLM is imported in `start`, in the process that serves and after the environment variables that it reads at import are set.
It runs its core in a process of its own, which `close` ends for certain. How weights get in: `docs/weight-sync.md`.
"""

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_workers.config import EngineConfig
from rollout_workers.engines.base import EngineStats, Generation, WeightUpdate
from rollout_workers.engines.model_directory import check_servable, end_ids
from rollout_workers.errors import EngineFailed, WeightSyncRejected
from rollout_workers.weight_manifest import WeightManifest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

WARM_UP_TOKENS = 8
"""Tokens of each warm-up request: enough to run prefill and decode kernels once at full width."""


class VllmEngine:
    """Serves the policy in a Hugging Face directory. Single use: once closed it stays closed."""

    receiver = "rollout_workers.weight_receiver.WeightReceiver"
    """Worker extension that vLLM imports in the engine's process."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        """`model`: directory with weights in safetensors format. Nothing is loaded before `start`."""
        self._model = model
        self._config = config
        self._llm: AsyncLLM | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._end_ids: tuple[int, ...] = ()
        self._version = 0
        self._updating = asyncio.Lock()
        self._probes = 0
        self._in_flight = 0
        self._generated = self._prompt = self._cached = 0

    @property
    def version(self) -> int:
        """Policy version served to requests that start now; 0 for the weights of the directory."""
        return self._version

    async def start(self) -> None:
        """Load the model and warm up: 10 to 20 s, most of it importing vLLM. See `Engine.start`."""
        assert self._llm is None, "an engine starts once"
        directory = Path(self._model)
        check_servable(directory, self._config)
        self._end_ids = end_ids(directory)
        self._sockets = tempfile.TemporaryDirectory(prefix="crosstrain-engine-")
        set_environment(self._config, self._sockets.name)
        children = set(multiprocessing.active_children())
        try:
            self._llm = self._launch()
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            self._processes = [child for child in multiprocessing.active_children() if child not in children]
            await self.close()
            raise EngineFailed(
                f"vLLM did not start with {self._model}: {error}; CROSSTRAIN_DEBUG=1 shows its log"
            ) from error
        self._processes = [child for child in multiprocessing.active_children() if child not in children]
        async with self._failures() as llm:
            await llm.update_weight_version(str(self._version))
        await self._warm_up()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Generation:
        """See `Engine.generate`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=list(self._end_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        output = await self._request(prompt_ids, request_id, params)
        completion = output.outputs[0]
        assert completion.logprobs is not None and completion.weight_versions is not None
        self._generated += len(completion.token_ids)
        versions: list[int] = []
        for span in completion.weight_versions:
            versions += [int(span.version)] * (span.end - span.start)
        return Generation(
            tuple(completion.token_ids),
            tuple(completion.logprobs.logprobs),  # type: ignore[union-attr]  # flat, as asked
            tuple(versions),
            "length" if completion.finish_reason == "length" else "stop",
        )

    async def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """See `Engine.token_logprobs`. vLLM reads no cached prefix for requests with prompt log-probabilities."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._probes += 1
        output = await self._request(token_ids, f"probe-{self._probes}", params)
        assert output.prompt_logprobs is not None
        return tuple(output.prompt_logprobs.logprobs)  # type: ignore[union-attr]  # flat, as asked

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """See `Engine.update_weights`. Cancelling the caller does not stop an update half-way."""
        offered = WeightManifest.parse(manifest)
        if offered.version < self._version:
            raise WeightSyncRejected(
                f"weights of version {offered.version} are older than {self._version}, which is served"
            )
        return await asyncio.shield(asyncio.ensure_future(self._apply(dict(manifest), offered)))

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        running = min(self._in_flight, self._config.max_num_seqs)
        return EngineStats(self._generated, self._prompt, self._cached, running, self._in_flight - running)

    async def close(self) -> None:
        """See `Engine.close`. Requests in flight raise `EngineFailed`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            llm.output_processor.propagate_error(EngineDeadError())
            llm.shutdown(timeout=1.0)
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.join)
        self._processes = []
        if self._sockets is not None:
            self._sockets.cleanup()
            self._sockets = None

    def _launch(self) -> "AsyncLLM":
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(engine_args(self._model, self._config, self.receiver))

    async def _warm_up(self) -> None:
        prompt = [self._end_ids[0]] * 16
        await asyncio.gather(
            self.token_logprobs(prompt),
            *(
                self.generate(prompt, request_id=f"warm-up-{index}", max_tokens=WARM_UP_TOKENS, temperature=1.0)
                for index in range(self._config.max_num_seqs)
            ),
        )
        self._generated = self._prompt = self._cached = 0

    async def _request(self, token_ids: Sequence[int], request_id: str, params: "SamplingParams") -> "RequestOutput":
        """Run one request to its end. vLLM aborts it when this coroutine is cancelled."""
        from vllm import TokensPrompt

        self._in_flight += 1
        try:
            async with self._failures() as llm:
                async for output in llm.generate(TokensPrompt(prompt_token_ids=list(token_ids)), params, request_id):
                    final = output
        finally:
            self._in_flight -= 1
        self._prompt += len(token_ids)
        self._cached += final.num_cached_tokens or 0
        return final

    async def _apply(self, manifest: dict[str, Any], offered: WeightManifest) -> WeightUpdate:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._updating, self._failures() as llm:
            began = time.perf_counter()
            await llm.pause_generation(mode="keep", clear_cache=True)
            try:
                await llm.start_weight_update()
                try:
                    await llm.update_weights(WeightTransferUpdateRequest(update_info={"manifest": manifest}))
                except Exception as error:  # noqa: BLE001
                    raise WeightSyncRejected(str(error)) from error
                await llm.finish_weight_update(weight_version=str(offered.version))
            finally:
                await llm.resume_generation()
            seconds = time.perf_counter() - began
            (checksum,) = set(await llm.collective_rpc("loaded_checksum"))
            self._version = offered.version
            return WeightUpdate(offered.version, checksum, seconds)

    @asynccontextmanager
    async def _failures(self) -> "AsyncIterator[AsyncLLM]":
        """The one place where vLLM's exceptions become ours."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._llm is None:
            raise EngineFailed("the engine is not running")
        try:
            yield self._llm
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM: {error}") from error


def set_environment(config: EngineConfig, sockets: str) -> None:
    """Set what vLLM reads from the environment, here and in the process it spawns."""
    debug = bool(os.environ.get("CROSSTRAIN_DEBUG"))
    os.environ.update(
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="DEBUG" if debug else "ERROR",
        VLLM_RPC_BASE_PATH=sockets,
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
    )
    if config.gpus_per_worker == 0:
        # With multiprocessing on, the CPU platform swaps the in-process executor for one with a further process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # It would win over `kv_cache_memory_bytes`, and crash when empty.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def engine_args(model: str, config: EngineConfig, receiver: str) -> "AsyncEngineArgs":
    """Our settings in vLLM's words."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout_workers.weight_receiver import SHARED_MEMORY

    cpu: dict[str, Any] = {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": config.kv_cache_mb << 20,
    }
    gpu: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    return AsyncEngineArgs(
        model=model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=SHARED_MEMORY),
        worker_extension_cls=receiver,
        disable_log_stats=True,
        **(cpu if config.gpus_per_worker == 0 else gpu),
    )
