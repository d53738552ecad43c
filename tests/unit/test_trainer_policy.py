"""Policies on disk: what is written loads elsewhere, and what is unfit is named."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from trainer_kit import make_policy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trainer.errors import PolicyError, PolicyNotSaved
from trainer.policy import byte_tokenizer, init_policy, load_policy, save_policy

TOKENIZER = byte_tokenizer()
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hé"},
    {"role": "assistant", "content": "ok"},
    {"role": "tool", "content": "42"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policies") / "tiny"
    init_policy("tiny-moe", path, seed=0)
    return path


@given(st.text())
def test_text_comes_back_from_its_bytes(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@given(st.lists(st.integers(0, 261)))
def test_any_ids_decode(ids: list[int]) -> None:
    assert isinstance(TOKENIZER.decode(ids), str)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == TOKENIZER.decode([i for i in ids if i < 256])


def test_chat_template_costs_two_tokens_a_turn(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|system|>s<|im_end|><|user|>hé<|im_end|><|assistant|>ok<|im_end|><|tool|>42<|im_end|><|assistant|>"
    )
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len("shéok42".encode()) + 2 * len(CHAT) + 1
    assert ids[2] == tokenizer.eos_token_id


def test_a_shorter_conversation_is_a_prefix_of_a_longer_one() -> None:
    renders = [
        TOKENIZER(TOKENIZER.apply_chat_template(CHAT[:n], tokenize=False))["input_ids"] for n in range(1, len(CHAT) + 1)
    ]
    for short, long in itertools.pairwise(renders):
        assert long[: len(short)] == short


def test_tiny_moe_is_what_it_says(tiny: Path) -> None:
    model, tokenizer = load_policy(tiny)
    assert 1.7e6 < sum(parameter.numel() for parameter in model.parameters()) < 2.3e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (model.config.num_experts, model.config.num_experts_per_tok) == (8, 2)
    assert model.config.vocab_size == len(tokenizer) == 262
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 257
    assert not model.training
    assert model.config._experts_implementation == "grouped_mm"


def test_the_seed_decides_the_weights_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    init_policy("tiny-moe", tmp_path / "same", seed=0)
    init_policy("tiny-moe", tmp_path / "other", seed=1)
    assert torch.equal(before, torch.get_rng_state())
    stored = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in ("same", "other")}
    assert stored["same"] == (tiny / "model.safetensors").read_bytes() != stored["other"]


def test_experts_lie_apart_under_the_checkpoints_names(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.1.mlp.experts.7.gate_proj.weight").get_shape() == [192, 192]
    assert "lm_head.weight" not in names
    assert not any("gate_up_proj" in name for name in names)


def test_saving_keeps_every_bit_and_replaces_what_was_there(tmp_path: Path) -> None:
    model, tokenizer = load_policy(make_policy(tmp_path / "a", seed=1))
    make_policy(tmp_path / "b", seed=2)
    (tmp_path / "b" / "stale.txt").write_text("of the old one")
    save_policy(model, tokenizer, tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert not (tmp_path / "b" / "stale.txt").exists()


def test_a_dense_model_loads_as_well(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=262, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    save_policy(LlamaForCausalLM(config), TOKENIZER, tmp_path / "dense")
    model, _ = load_policy(tmp_path / "dense")
    assert isinstance(model, LlamaForCausalLM)


def test_init_refuses_a_place_that_is_taken(tiny: Path) -> None:
    with pytest.raises(PolicyError, match="exists already; remove it"):
        init_policy("tiny-moe", tiny, seed=0)


def test_init_refuses_an_unknown_preset(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no preset 'huge'; choose tiny-moe"):
        init_policy("huge", tmp_path / "x", seed=0)  # type: ignore[arg-type]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PolicyNotSaved, match=r"cannot be written to .*file/policy"):
        init_policy("tiny-moe", tmp_path / "file" / "policy", seed=0)


def damage(path: Path, kind: str) -> None:
    if kind == "config":
        (path / "config.json").unlink()
    elif kind == "config text":
        (path / "config.json").write_text("{")
    elif kind == "template":
        (path / "chat_template.jinja").unlink()
    elif kind == "end":
        settings = json.loads((path / "tokenizer_config.json").read_text())
        del settings["eos_token"]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    elif kind == "tokenizer":
        (path / "tokenizer.json").unlink()
    elif kind == "weights":
        (path / "model.safetensors").unlink()
    elif kind == "half the weights":
        weights = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    else:
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("config", "holds no config.json; name a Hugging Face model directory"),
        ("config text", "cannot be loaded"),
        ("template", "has no chat template; add a chat_template.jinja"),
        ("end", "has no end token; set eos_token"),
        ("tokenizer", "cannot be loaded"),
        ("weights", "cannot be loaded"),
        ("half the weights", "cannot be loaded"),
        ("a layer too many", r"lacks weights such as model\.layers\.2"),
    ],
)
def test_an_unfit_directory_is_named_in_one_sentence(tmp_path: Path, kind: str, message: str) -> None:
    path = make_policy(tmp_path / "policy")
    damage(path, kind)
    with pytest.raises(PolicyError, match=message) as raised:
        load_policy(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere holds no config.json"):
        load_policy(tmp_path / "nowhere")
