"""Small policies and samples for the tests of the trainer."""

import random
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.policy import byte_tokenizer, save_policy
from trainer.sample import Sample


def make_policy(path: Path, seed: int = 0) -> Path:
    """A Qwen3-MoE of two layers and 60 k parameters, quick enough for property tests."""
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            initializer_range=0.1,
            pad_token_id=256,
            eos_token_id=257,
        )
        save_policy(Qwen3MoeForCausalLM(config), tokenizer, path)
    return path


def make_sample(seed: int, tag: str = "", length: int | None = None, advantage: float | None = None) -> Sample:
    """A random sample whose weights make a batch of some ten of them sum to about 1."""
    draw = random.Random(seed)
    length = length or draw.randint(4, 30)
    prompt = draw.randint(1, length - 2)
    mask = tuple(int(place >= prompt and draw.random() < 0.8) for place in range(length - 1))
    advantages = tuple(draw.gauss(0, 1) if advantage is None else advantage for _ in range(length))
    return Sample(
        tuple(draw.randrange(256) for _ in range(length)),
        (*mask, 1),
        tuple(draw.gauss(-5.5, 0.3) for _ in range(length)),
        advantages,
        tuple(draw.uniform(0.005, 0.02) for _ in range(length)),
        tag,
    )


def make_batch(seed: int, tags: tuple[str, ...] = ("code", "math", "terminal"), each: int = 4) -> list[Sample]:
    """Samples of several tags."""
    return [make_sample(1000 * seed + 100 * t + i, tag) for t, tag in enumerate(tags) for i in range(each)]
