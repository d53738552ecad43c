"""What is read from a model directory before vLLM starts, and the sentences for what cannot be served."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_workers.config import EngineConfig
from rollout_workers.engines.model_directory import cache_bytes, check_servable, end_ids
from rollout_workers.errors import EngineConfigError

MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "max_position_embeddings": 1024,
}


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    (directory / "model.safetensors").touch()
    return directory


def test_end_tokens_of_model_generation_and_tokenizer_all_count(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [7, 8]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
        tokenizer={"added_tokens": [{"id": 3, "content": "<|im_start|>"}, {"id": 9, "content": "<|im_end|>"}]},
    )
    assert end_ids(tmp_path) == (7, 8, 9)


def test_a_model_without_an_end_token_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match="eos_token_id"):
        end_ids(write(tmp_path, config={"eos_token_id": None}))


def test_damaged_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineConfigError, match=r"config\.json is not valid JSON"):
        end_ids(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"model: .*nowhere has no config\.json"):
        check_servable(tmp_path / "nowhere", EngineConfig())


def test_weights_must_be_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineConfigError, match="safetensors"):
        check_servable(tmp_path, EngineConfig())


def test_a_length_beyond_the_models_is_refused_with_the_limit(tmp_path: Path) -> None:
    write(tmp_path, config=MODEL)
    check_servable(tmp_path, EngineConfig(max_model_len=1024))
    with pytest.raises(EngineConfigError, match=r"engine\.max_model_len: 1025 .* 1024 or less"):
        check_servable(tmp_path, EngineConfig(max_model_len=1025))


def test_a_cache_too_small_for_one_sequence_is_refused_with_a_size_that_is_not(tmp_path: Path) -> None:
    write(tmp_path, config={**MODEL, "num_hidden_layers": 28, "hidden_size": 2048, "num_key_value_heads": 8})
    with pytest.raises(EngineConfigError, match=r"engine\.kv_cache_mb: 1 .* set it to (\d+) or more") as refusal:
        check_servable(tmp_path, EngineConfig(kv_cache_mb=1, max_model_len=512))
    enough = int(str(refusal.value).rpartition("set it to ")[2].split()[0])
    check_servable(tmp_path, EngineConfig(kv_cache_mb=enough, max_model_len=512))
    check_servable(tmp_path, EngineConfig(kv_cache_mb=1, max_model_len=512, gpus_per_worker=1))


def test_cache_size_is_keys_and_values_of_whole_blocks() -> None:
    config = EngineConfig(max_model_len=129, dtype="float32")
    assert cache_bytes(MODEL, config) == 2 * 4 * 2 * 32 * 4 * 384
    assert cache_bytes({**MODEL, "head_dim": 64}, config) == 2 * 4 * 2 * 64 * 4 * 384
    assert cache_bytes({}, config) == 0
