"""The real engine: vLLM's AsyncLLM, token ids in and out.

vLLM is imported in `start`, in the process that serves. It runs its core in a process of its own, which `close` ends
for certain and whose death fails every request at once. How weights get in: `docs/weight-sync.md`.
"""

import asyncio
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_workers.config import EngineConfig
from rollout_workers.engines.base import EngineStats, Generation, WeightUpdate
from rollout_workers.engines.launch import last_error, surroundings
from rollout_workers.engines.model_directory import check_servable, end_ids
from rollout_workers.errors import EngineFailed, WeightSyncRejected
from rollout_workers.weight_manifest import WeightManifest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

WARM_UP_TOKENS = 8
"""Tokens of each warm-up request: enough to run the kernels of prefill and decode once at full width."""
REAPED_S = 0.5
"""How long the exit code of an ended process may take to show."""
BLOCK_TOKENS = 32
"""Tokens of a cache block on a CPU, the fewest its kernels take. Only whole blocks are shared, and vLLM's own 128 are
more than most prompts have: a group's episodes and an episode's turns would compute each prompt anew.
"""
PREFILL_TOKENS = 4096
"""Prompt tokens computed in one engine step on a CPU; more would hold up the requests that are being written."""


class VllmEngine:
    """Serves the policy in a Hugging Face directory. Single use: once closed it stays closed."""

    receiver = "rollout_workers.weight_receiver.WeightReceiver"
    """Worker extension that vLLM imports in the engine's process."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        """`model`: directory with weights in safetensors format. Nothing is loaded before `start`."""
        self._model = model
        self._config = config
        self._llm: AsyncLLM | None = None
        self._failure = "the engine is not started"
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[BaseProcess] = []
        self._end_ids: tuple[int, ...] = ()
        self._version = 0
        self._update_lock = asyncio.Lock()
        self._updates: set[asyncio.Task[WeightUpdate]] = set()
        self._probe_ids = itertools.count()
        self._in_flight = 0
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0

    @property
    def version(self) -> int:
        """Policy version served to requests that start now; 0 for the weights of the directory."""
        return self._version

    async def start(self) -> None:
        """See `Engine.start`. Holds up the event loop for 10 to 20 s, most of which goes into importing vLLM."""
        assert self._directory is None, "an engine starts once"
        directory = Path(self._model)
        check_servable(directory, self._config)
        self._end_ids = end_ids(directory)
        self._directory = tempfile.TemporaryDirectory(prefix="crosstrain-engine-")
        before = set(multiprocessing.active_children())
        try:
            self._launch(self._directory.name)
        except (RuntimeError, ValueError, OSError, ImportError) as error:
            cause = last_error(self._directory.name) or str(error)
            raise EngineFailed(
                f"vLLM did not start with {self._model}: {cause}; CROSSTRAIN_DEBUG=1 shows its log"
            ) from error
        finally:
            self._processes = [child for child in multiprocessing.active_children() if child not in before]
            if self._llm is None:
                await self.close()
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.add_reader(process.sentinel, self._on_exit, process)
        try:
            await self._warm_up()
        except EngineFailed:
            await self.close()
            raise

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
        )
        output = (await self._request(prompt_ids, request_id, params)).outputs[0]
        assert output.logprobs is not None
        assert output.weight_versions is not None
        versions: list[int] = []
        for span in output.weight_versions:
            versions += [int(span.version)] * (span.end - span.start)
        self._generated_tokens += len(versions)
        return Generation(
            tuple(output.token_ids),
            tuple(output.logprobs.logprobs),  # type: ignore[union-attr]  # flat, as asked for
            tuple(versions),
            "length" if output.finish_reason == "length" else "stop",
        )

    async def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """See `Engine.token_logprobs`. vLLM never reads the prefix cache for prompt log-probabilities."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._request(token_ids, f"probe-{next(self._probe_ids)}", params)
        assert output.prompt_logprobs is not None
        return tuple(output.prompt_logprobs.logprobs)  # type: ignore[union-attr]  # flat, as asked for

    async def update_weights(self, manifest: Mapping[str, Any]) -> WeightUpdate:
        """See `Engine.update_weights`. An update that began is finished even when the caller is cancelled."""
        task = asyncio.create_task(self._load(WeightManifest.parse(manifest).version, dict(manifest)))
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by us, since the engine is gone
                raise EngineFailed(self._failure) from None
            raise

    async def stats(self) -> EngineStats:
        """See `Engine.stats`. A request's tokens count when it ends: vLLM's own statistics cost time per token."""
        running = min(self._in_flight, self._config.max_num_seqs)
        return EngineStats(
            generated_tokens=self._generated_tokens,
            prompt_tokens=self._prompt_tokens,
            cached_prompt_tokens=self._cached_tokens,
            running=running,
            waiting=self._in_flight - running,
        )

    async def close(self) -> None:
        """See `Engine.close`. Requests in flight raise `EngineFailed`."""
        self._fail("the engine is closed")
        for process in self._processes:
            process.kill()
            await asyncio.to_thread(process.join)
        self._processes = []
        if self._directory is not None:
            self._directory.cleanup()

    def _launch(self, directory: str) -> None:
        with surroundings(self._config, directory):
            from vllm.v1.engine.async_llm import AsyncLLM

            self._llm = AsyncLLM.from_engine_args(engine_args(self._model, self._config, self.receiver))

    async def _warm_up(self) -> None:
        """The first batch takes seconds; better now than in the first group."""
        async with self._running() as llm:
            await llm.update_weight_version(str(self._version))
        prompt = [self._end_ids[0]] * 16
        requests = (
            self.generate(prompt, request_id=f"warm-up-{index}", max_tokens=WARM_UP_TOKENS, temperature=1.0)
            for index in range(self._config.max_num_seqs)
        )
        await asyncio.gather(self.token_logprobs(prompt), *requests)
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0

    async def _request(self, token_ids: Sequence[int], request_id: str, params: "SamplingParams") -> "RequestOutput":
        """Run one request to its end. vLLM aborts it when this coroutine is cancelled."""
        from vllm import TokensPrompt

        self._in_flight += 1
        try:
            async with self._running() as llm:
                prompt = TokensPrompt(prompt_token_ids=list(token_ids))
                (output,) = [output async for output in llm.generate(prompt, params, request_id)]
        finally:
            self._in_flight -= 1
        self._prompt_tokens += len(token_ids)
        self._cached_tokens += output.num_cached_tokens or 0
        return output

    async def _load(self, version: int, manifest: dict[str, Any]) -> WeightUpdate:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self._update_lock, self._running() as llm:
            if version < self._version:
                raise WeightSyncRejected(
                    f"weights of version {version} are older than {self._version}, which is served"
                )
            began = time.perf_counter()
            # Sent together, since the engine answers only between its steps: they arrive in order and cost one wait.
            # The pause is vLLM's `pause_generation` less a sleep of 20 ms. It clears the cache: requests in flight go
            # on under the new weights and compute what they have so far again.
            update = WeightTransferUpdateRequest(update_info={"manifest": manifest})
            *received, paused = await asyncio.gather(
                llm.start_weight_update(),
                llm.update_weights(update),
                llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True),
                return_exceptions=True,
            )
            if isinstance(paused, BaseException):
                raise paused
            if refusal := next((answer for answer in received if answer is not None), None):
                await llm.resume_generation()
                # vLLM hands on the text of what its process raised; the model was not touched.
                text = str(refusal)
                raise WeightSyncRejected(text.partition("method failed: ")[2] or text) from refusal
            try:
                _, checksums = await asyncio.gather(llm.finish_weight_update(), llm.collective_rpc("loaded_checksum"))
                (checksum,) = set(checksums)
                await asyncio.gather(llm.update_weight_version(str(version)), llm.resume_generation())
            except Exception as error:
                await self.close()
                raise EngineFailed(f"weights of version {version} were loaded in part: {error}") from error
            seconds = time.perf_counter() - began
            self._version = version
            return WeightUpdate(version, checksum, seconds)

    @asynccontextmanager
    async def _running(self) -> "AsyncIterator[AsyncLLM]":
        """The one place where vLLM's exceptions become ours."""
        if self._llm is None:
            raise EngineFailed(self._failure)
        from vllm.exceptions import VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield self._llm
        except EngineDeadError as error:
            raise EngineFailed(self._reason(str(error))) from error
        except (EngineGenerateError, VLLMError, ValueError) as error:
            raise EngineFailed(f"vLLM refused a request: {error.__cause__ or error}") from error

    def _reason(self, seen: str) -> str:
        """Why the engine died: what its process said last. A request may hear of the death before `_on_exit` does."""
        if self._llm is None or self._directory is None:
            return self._failure
        return last_error(self._directory.name) or seen

    def _on_exit(self, process: BaseProcess) -> None:
        """A process of the engine ended by itself."""
        assert self._directory is not None
        deadline = time.monotonic() + REAPED_S
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)  # vLLM's own monitor thread may have collected the exit code and not have noted it yet
        cause = last_error(self._directory.name)
        self._fail(f"the engine's process ended with exit code {process.exitcode}" + (f": {cause}" if cause else ""))

    def _fail(self, reason: str) -> None:
        """Fail what is in flight and all that comes later, and let go of vLLM."""
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.sentinel)
        llm, self._llm = self._llm, None
        if llm is None:
            return
        self._failure = reason
        from vllm.v1.engine.exceptions import EngineDeadError

        llm.output_processor.propagate_error(EngineDeadError())
        for update in self._updates - {asyncio.current_task()}:
            update.cancel()
        llm.shutdown(timeout=0)  # an idle core ignores a polite request for seconds
        close_sockets(llm)


def close_sockets(llm: "AsyncLLM") -> None:
    """vLLM leaves its ZeroMQ context, with two threads, to the garbage collector, and its sockets to the event loop."""
    resources: Any = llm.engine_core.resources  # type: ignore[attr-defined]  # of the client that AsyncLLM makes
    for socket in (resources.input_socket, resources.output_socket):
        socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def engine_args(model: str, config: EngineConfig, receiver: str) -> "AsyncEngineArgs":
    """Our settings in vLLM's words."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rollout_workers.weight_receiver import TRANSFER

    on_cpu: dict[str, Any] = {
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "kv_cache_memory_bytes": config.kv_cache_mb << 20,
        "block_size": BLOCK_TOKENS,
        # A seeded request whose prompt is computed in parts kills the engine: a generator on the CPU has no offset.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(PREFILL_TOKENS, config.max_model_len),
    }
    on_gpu: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
    return AsyncEngineArgs(
        model=model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
        worker_extension_cls=receiver,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **(on_cpu if config.gpus_per_worker == 0 else on_gpu),
    )
