"""What a Hugging Face model directory says about serving it. Reads JSON files only: no torch, no vLLM.

vLLM reports a model that does not fit from inside its own process, as a traceback. The checks here come first and say
in one sentence which key to change.
"""

import json
from math import ceil
from pathlib import Path
from typing import Any

from rollout_workers.config import EngineConfig
from rollout_workers.errors import EngineConfigError

CPU_BLOCK = 128
"""Tokens in one block of vLLM's key-value cache on the CPU."""

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def end_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a turn: those of the generation config, the model config and the tokenizer's end-of-sequence token.

    All of them, since base models often name another one in the config than their chat tokenizer ends a turn with.
    Raises `EngineConfigError` when there is none.
    """
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        declared = _read(directory / name).get("eos_token_id")
        ids.update(declared if isinstance(declared, list) else [] if declared is None else [declared])
    token = _read(directory / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(directory / "tokenizer.json").get("added_tokens", [])
    ids.update(entry["id"] for entry in added if entry["content"] == text)
    if not ids:
        raise EngineConfigError(f"model: {directory} names no end-of-turn token; set eos_token_id in its config.json")
    return tuple(sorted(ids))


def check_servable(directory: Path, config: EngineConfig) -> None:
    """Raises `EngineConfigError` when the directory or the settings cannot work, naming the key and the remedy."""
    if not (directory / "config.json").is_file():
        raise EngineConfigError(f"model: {directory} has no config.json; name a Hugging Face causal-LM directory")
    if not any(directory.glob("*.safetensors")):
        raise EngineConfigError(f"model: {directory} has no *.safetensors file; save the weights in that format")
    model = _read(directory / "config.json")
    model = model.get("text_config", model)
    longest = model.get("max_position_embeddings")
    if longest is not None and config.max_model_len > longest:
        raise EngineConfigError(
            f"engine.max_model_len: {config.max_model_len} exceeds the model's max_position_embeddings of {longest}; "
            f"set it to {longest} or less"
        )
    needed = cache_bytes(model, config)
    if config.gpus_per_worker == 0 and needed > config.kv_cache_mb << 20:
        raise EngineConfigError(
            f"engine.kv_cache_mb: {config.kv_cache_mb} cannot hold one sequence of engine.max_model_len "
            f"{config.max_model_len}; set it to {ceil(needed / (1 << 20))} or more"
        )


def cache_bytes(model: dict[str, Any], config: EngineConfig) -> int:
    """Bytes of keys and values of one longest sequence, in whole blocks, and of the one block that vLLM keeps back.

    0 when the config does not say.
    """
    heads = model.get("num_attention_heads")
    if not heads or not model.get("hidden_size") or not model.get("num_hidden_layers"):
        return 0
    head_dim = model.get("head_dim") or model["hidden_size"] // heads
    per_token = 2 * model["num_hidden_layers"] * (model.get("num_key_value_heads") or heads) * head_dim
    tokens = (ceil(config.max_model_len / CPU_BLOCK) + 1) * CPU_BLOCK
    return per_token * _BYTES[config.dtype] * tokens


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EngineConfigError(f"model: {path} is not valid JSON ({error}); copy the model again") from error
    return value if isinstance(value, dict) else {}
