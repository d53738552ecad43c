"""The trainer on a CUDA device computes what it computes on the CPU."""

from pathlib import Path

import pytest
import torch

from rollout_workers.weight_channel import Channel, Member, sum64
from rollout_workers.weight_manifest import WeightManifest
from trainer.config import TrainerConfig
from trainer.policy import init_policy
from trainer.publish import Publisher
from trainer.sample import Sample
from trainer.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy("tiny-moe", path, seed=0)
    return path


def samples(seed: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(8):
        ids = tuple(torch.randint(0, 256, (20 + index,), generator=generator).tolist())
        length = len(ids)
        advantage = 1.0 if index % 2 else -1.0
        rows.append(
            Sample(
                ids,
                (0,) * 8 + (1,) * (length - 8),
                (-5.5,) * length,
                (advantage,) * length,
                (0.01,) * length,
                "code" if index < 4 else "math",
            )
        )
    return rows


def test_a_step_agrees_with_the_cpu(policy: Path) -> None:
    config = TrainerConfig()
    cpu, gpu = Trainer(policy, config), Trainer(policy, config, device="cuda")
    for seed in range(2):
        expected, found = cpu.train_step(samples(seed)), gpu.train_step(samples(seed))
        assert found.loss == pytest.approx(expected.loss, rel=1e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
        assert found.gradient_share == pytest.approx(expected.gradient_share, rel=1e-3)
    ids = samples(9)[0].token_ids
    assert gpu.token_logprobs(ids) == pytest.approx(cpu.token_logprobs(ids), abs=1e-3)


def test_bfloat16_steps(policy: Path) -> None:
    run = Trainer(policy, TrainerConfig(dtype="bfloat16"), device="cuda")
    assert run.train_step(samples(0)).optimizer_steps == 1
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


def test_weights_are_published_on_the_device_and_fetched_through_host_memory(policy: Path, tmp_path: Path) -> None:
    run = Trainer(policy, TrainerConfig(), device="cuda")
    publisher = Publisher(run.model, "gpu", tmp_path, address="127.0.0.1")
    manifest = WeightManifest.parse(publisher.publish(0))
    assert manifest.segment is None
    assert manifest.ipc is not None
    assert manifest.channel is not None
    assert manifest.ipc.gpu == manifest.channel.gpu != ""
    channel = Channel(manifest.channel, Member("engine", 0, 1), "gloo", torch.device("cpu"))
    raw = channel.pull(manifest)
    assert sum64(raw) == sum64(raw.cuda()) == manifest.checksum
    embedding = raw[: 262 * 128 * 4].view(torch.float32).view(262, 128)
    assert manifest.tensors[0].name == "model.embed_tokens.weight"
    assert torch.equal(embedding, run.model.get_input_embeddings().weight.detach().cpu())
    publisher.close()


def test_a_checkpoint_resumes_on_the_device(policy: Path, tmp_path: Path) -> None:
    run = Trainer(policy, TrainerConfig(), device="cuda")
    run.train_step(samples(0))
    run.save_checkpoint(tmp_path / "checkpoint")
    resumed = Trainer(policy, TrainerConfig(), device="cuda")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.version == 1
    assert resumed.train_step(samples(1)).loss == pytest.approx(run.train_step(samples(1)).loss, rel=1e-5)
