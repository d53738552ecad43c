"""Policies on disk: Hugging Face causal-LM directories, made, loaded and saved.

Whatever `load_policy` accepts, vLLM serves: config, safetensors under the checkpoint names of the architecture, a
tokenizer with a chat template, and an end-of-turn token.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from trainer.atomic import atomic_directory
from trainer.errors import PolicyError, PolicyNotSaved

Preset = Literal["tiny-moe"]

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Two tokens of overhead a turn. A rendering is a token prefix of every longer one of the same conversation."""


def init_policy(preset: Preset, path: str | os.PathLike[str], seed: int) -> None:
    """Write a freshly initialised policy to the new directory `path`, whole or not at all.

    `tiny-moe`: a Qwen3-MoE of 2.0 M float32 parameters (2 layers, 8 experts, top-2) over bytes. Two layers are the
    fewest that can copy by attention; more of them cost engine and trainer time and learnt later.
    Raises PolicyError for an unknown preset and when `path` exists, PolicyNotSaved when the disk does not take it.
    """
    if preset != "tiny-moe":
        raise PolicyError(f"There is no preset {preset!r}; choose tiny-moe.")
    if Path(path).exists():
        raise PolicyError(f"{path} exists already; remove it or choose another place for the new policy.")
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(_tiny_moe_config(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_policy(model, tokenizer, path)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0 to 255 are the bytes of UTF-8, followed by the special tokens.

    Any text comes back as it was; bytes that are no UTF-8 decode to U+FFFD.
    """
    ids = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = [END_OF_TEXT, END_OF_TURN, *(f"<|{role}|>" for role in ROLES)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=specials[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def load_policy(
    path: str | os.PathLike[str], dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load any Hugging Face causal-LM directory, on the CPU, in evaluation mode. Nothing is downloaded.

    Experts run as transformers chooses: `grouped_mm` where torch has it, the fastest of its three for training
    (`batched_mm` copies weights for every token: fifty times slower on a CPU).

    Raises PolicyError, one sentence with the place and the remedy, if something is missing, torn or unfit.
    """
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise PolicyError(
            f"{directory} holds no config.json; name a Hugging Face model directory, "
            "or make one with `crosstrain models init`."
        )
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                local_files_only=True,
                dtype=dtype,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PolicyError(f"{directory} cannot be loaded ({reason}); copy or export the model again.") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise PolicyError(f"{directory} lacks weights such as {missing[0]}; copy or export the model again.")
    _require_chat(directory, tokenizer)
    return model.eval(), tokenizer


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: str | os.PathLike[str]) -> None:
    """Write a Hugging Face directory, whole or not at all, under the architecture's checkpoint names (experts apart).

    Replaces a directory at `path`. Raises PolicyNotSaved if the disk does not take it.
    """
    try:
        with atomic_directory(Path(path)) as directory, _quiet():
            model.save_pretrained(directory)
            tokenizer.save_pretrained(directory)
    except (OSError, SafetensorError) as error:
        raise PolicyNotSaved(
            f"The policy cannot be written to {path} ({error}); free space on that disk or choose another."
        ) from error


def _tiny_moe_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=256,  # of dense layers: there are none
        moe_intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        initializer_range=0.06,  # near 1/√hidden; the usual 0.02 is made for widths in the thousands
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        pad_token_id=tokenizer.get_vocab()[END_OF_TEXT],
        eos_token_id=tokenizer.get_vocab()[END_OF_TURN],
        dtype="float32",
        use_cache=True,
    )


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    stands_for = {byte: byte for byte in printable} | {byte: 256 + rank for rank, byte in enumerate(others)}
    return [chr(stands_for[byte]) for byte in range(256)]


def _require_chat(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    if not tokenizer.chat_template:
        raise PolicyError(f"The tokenizer in {directory} has no chat template; add a chat_template.jinja beside it.")
    if tokenizer.eos_token_id is None:
        raise PolicyError(
            f"The tokenizer in {directory} has no end token; set eos_token in tokenizer_config.json "
            "to the token that ends an assistant turn."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: loading is one line of our own log."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
