"""What lies in shared memory is the checkpoint, bit for bit."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import make_batch, make_policy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter, revert_weight_conversion

from trainer.config import TrainerConfig
from trainer.errors import PublishError
from trainer.policy import init_policy, load_policy
from trainer.publish import Publisher, checkpoint_views
from trainer.step import Trainer


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policies") / "small")


def expected(model: Any) -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return revert_weight_conversion(model, state)


def read(manifest: dict[str, Any]) -> dict[str, torch.Tensor]:
    raw = bytearray(Path(manifest["segment"]["path"]).read_bytes())
    assert len(raw) == manifest["nbytes"]
    assert hashlib.sha256(raw).hexdigest() == manifest["checksum"]
    found: dict[str, torch.Tensor] = {}
    end = 0
    for entry in manifest["tensors"]:
        assert entry["offset"] % 64 == 0
        assert entry["offset"] >= end
        dtype = getattr(torch, entry["dtype"])
        count = torch.Size(entry["shape"]).numel()
        end = entry["offset"] + count * dtype.itemsize
        found[entry["name"]] = torch.frombuffer(raw, dtype=dtype, count=count, offset=entry["offset"]).view(
            entry["shape"]
        )
    assert end <= manifest["nbytes"]
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def test_views_are_what_transformers_would_save(tmp_path: Path) -> None:
    init_policy("tiny-moe", tmp_path / "tiny", seed=0)
    model, _ = load_policy(tmp_path / "tiny")
    assert same(checkpoint_views(model), expected(model))


def test_segments_follow_training_in_turn(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, TrainerConfig())
    publisher = Publisher(trainer.model, "run", tmp_path)
    first = publisher.publish(0)
    assert same(read(first), expected(trainer.model))
    trainer.train_step(make_batch(0))
    second = publisher.publish(trainer.version)
    assert same(read(second), expected(trainer.model))
    assert not same(read(first), read(second))
    assert (first["version"], second["version"]) == (0, 1)
    assert [Path(m["segment"]["path"]).name for m in (first, second)] == [
        f"crosstrain-run-weights-{slot}" for slot in (0, 1)
    ]
    assert publisher.publish(2)["segment"] == first["segment"]
    publisher.close()
    publisher.close()
    assert os.listdir(tmp_path) == []


def test_views_outlive_a_loaded_checkpoint(policy: Path, tmp_path: Path) -> None:
    trainer = Trainer(policy, TrainerConfig())
    trainer.save_checkpoint(tmp_path / "start")
    publisher = Publisher(trainer.model, "run", tmp_path)
    before = publisher.publish(0)
    trainer.train_step(make_batch(0))
    assert publisher.publish(1)["checksum"] != before["checksum"]
    trainer.load_checkpoint(tmp_path / "start")
    assert publisher.publish(0)["checksum"] == before["checksum"]
    publisher.close()


def test_half_precision_and_an_untied_output_layer_travel_as_they_are(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    publisher = Publisher(model, "run", tmp_path)
    found = read(publisher.publish(5))
    publisher.close()
    assert same(found, dict(model.state_dict()))
    assert "lm_head.weight" in found


def test_a_segment_of_a_killed_run_is_replaced_without_touching_its_reader(policy: Path, tmp_path: Path) -> None:
    stale = tmp_path / "crosstrain-run-weights-0"
    stale.write_bytes(b"old")
    with stale.open("rb") as reader:
        publisher = Publisher(load_policy(policy)[0], "run", tmp_path)
        assert reader.read() == b"old"
    publisher.close()


def test_segments_are_private(policy: Path, tmp_path: Path) -> None:
    publisher = Publisher(load_policy(policy)[0], "run", tmp_path)
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    publisher.close()


def test_a_place_without_room_is_named(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="missing/crosstrain-run-weights-0 cannot take"):
        Publisher(load_policy(policy)[0], "run", tmp_path / "missing")


def test_an_architecture_that_shuffles_elements_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    shuffled = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Interleave(dim=0)])
    model._weight_conversions = [shuffled]
    with pytest.raises(PublishError, match=r"layers\.0\.mlp\.up_proj\.weight is no view of one parameter"):
        checkpoint_views(model)
