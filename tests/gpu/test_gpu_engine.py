"""vLLM on a GPU: the same parity and updates as on the CPU, by each way that weights can take to it."""

import asyncio
from pathlib import Path

import pytest
import torch

from rollout_workers.config import EngineConfig
from rollout_workers.parity import compare
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and vllm's CUDA build"),
]
PROBE = [[(7 * index * row) % 256 for index in range(1, 60)] for row in range(1, 5)]


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
WAYS = [
    pytest.param("cpu", id="segment"),
    pytest.param("cuda:0", id="ipc"),
    pytest.param("cuda:1", id="nccl", marks=TWO_GPUS),  # the engine takes the first device
]


@pytest.mark.parametrize("device", WAYS)
async def test_engine_and_trainer_agree_before_and_after_an_update(tmp_path: Path, device: str) -> None:
    from rollout_workers.engines.vllm import VllmEngine

    policy = tmp_path / "policy"
    init_policy("tiny-moe", policy, seed=0)
    model = load_policy(policy)[0].to(device)
    publisher = Publisher(model, "gpu", tmp_path)
    engine = VllmEngine(str(policy), EngineConfig(gpus_per_worker=1, gpu_memory_utilization=0.2))

    def trainer_logprobs(sequence: list[int]) -> list[float]:
        tokens_T = torch.tensor(sequence, device=device)
        with torch.no_grad():
            logprobs_TV = model(tokens_T[None]).logits[0, :-1].log_softmax(-1)
        return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0].tolist()

    try:
        await engine.start()
        for version in range(1, 4):
            answers = await asyncio.gather(*(engine.token_logprobs(sequence) for sequence in PROBE))
            # Looser than on the CPU: float32 products may run in TF32.
            assert compare(answers, [trainer_logprobs(sequence) for sequence in PROBE]).max_gap < 1e-2
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
            await engine.update_weights(publisher.publish(version))
            assert (await engine.generate([1, 2], request_id="r", max_tokens=4, temperature=1.0)).versions[0] == version
    finally:
        await engine.close()
        publisher.close()
