"""What a vLLM that cannot start leaves behind: a reason, and nothing else."""

import gc
import multiprocessing
import tempfile
from pathlib import Path

import pytest

from rollout_workers.config import EngineConfig
from rollout_workers.engines.vllm import VllmEngine
from rollout_workers.errors import EngineFailed
from trainer.policy import init_policy

pytestmark = pytest.mark.integration


def engine_directories() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("crosstrain-engine-*"))


# vLLM forgets to close the ZeroMQ context of a client that did not come to be.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*Context:pytest.PytestUnraisableExceptionWarning")
async def test_damaged_weights_end_the_start_with_the_cause(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    init_policy("tiny-moe", policy, seed=0)
    weights = policy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    before = engine_directories()
    engine = VllmEngine(str(policy), EngineConfig(kv_cache_mb=16))
    with pytest.raises(EngineFailed, match=r"did not start with .*policy: .*Safetensor"):
        await engine.start()
    assert not multiprocessing.active_children()
    assert engine_directories() <= before
    with pytest.raises(EngineFailed):
        await engine.token_logprobs([1, 2])
    await engine.close()
    gc.collect()
