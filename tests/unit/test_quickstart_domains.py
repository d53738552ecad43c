"""The committed task files of the quickstart: reproducible, disjoint, and short enough for the tiny policy."""

import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from reward.config import DomainConfig

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
DOMAINS = ("terminal", "code", "math", "tools")

PROMPT_TOKENS = 64
"""Budget of a prompt: bytes, which are the tokens of the byte-level policy, without the two that mark the turn."""
COMMITTED_BYTES = 1_200_000
"""Task files are committed, so all of them together stay small."""


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tasks", QUICKSTART / "make_tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rows(domain: str, split: str) -> list[dict[str, Any]]:
    text = (QUICKSTART / "domains" / domain / f"{split}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _config(domain: str) -> DomainConfig:
    text = (QUICKSTART / "domains" / domain / "domain.toml").read_text(encoding="utf-8")
    return DomainConfig.model_validate(tomllib.loads(text))


def _kind(row: dict[str, Any]) -> str:
    return row["data"]["labels"]["kind"]


@pytest.mark.parametrize("domain", DOMAINS)
def test_generator_reproduces_the_committed_files(domain: str) -> None:
    generator = _generator()
    for split, rows in generator.make_domain(domain).items():
        committed = (QUICKSTART / "domains" / domain / f"{split}.jsonl").read_text(encoding="utf-8")
        assert generator.render(rows) == committed, f"run examples/quickstart/make_tasks.py and commit {domain}"


def test_task_files_stay_small() -> None:
    assert sum(path.stat().st_size for path in (QUICKSTART / "domains").rglob("*.jsonl")) < COMMITTED_BYTES


@pytest.mark.parametrize("domain", DOMAINS)
def test_splits_share_no_instance(domain: str) -> None:
    train, held_out = _rows(domain, "train"), _rows(domain, "eval")
    instances = [json.dumps([row["data"].get("call", row["prompt"]), row["solution"]]) for row in train + held_out]
    assert len(set(instances)) == len(instances)
    assert len({row["id"] for row in train + held_out}) == len(train) + len(held_out)
    assert 800 <= len(train) <= 2400
    assert 64 <= len(held_out) <= 100


@pytest.mark.parametrize("domain", DOMAINS)
def test_held_out_kinds_are_trained_in_the_same_proportion(domain: str) -> None:
    train, held_out = ([_kind(row) for row in _rows(domain, split)] for split in ("train", "eval"))
    assert set(train) == set(held_out)
    for kind in set(train):
        assert train.count(kind) / len(train) == pytest.approx(held_out.count(kind) / len(held_out), abs=0.02)


@pytest.mark.parametrize("domain", DOMAINS)
def test_solutions_and_prompts_fit_the_budget(domain: str) -> None:
    config = _config(domain)
    assert config.name == domain
    for row in _rows(domain, "train") + _rows(domain, "eval"):
        assert 1 <= len(row["solution"]) <= config.max_turns
        assert len(row["prompt"].encode()) <= PROMPT_TOKENS
        for message in row["solution"]:
            # One token more than the bytes: the one that ends the turn.
            assert len(message.encode()) + 1 <= config.max_tokens


def test_some_terminal_tasks_need_a_look_first() -> None:
    """The name to act on appears neither in the prompt nor in the first command."""
    for row in _rows("terminal", "eval"):
        if _kind(row) in {"follow", "clean"}:
            look, act, _ = row["solution"]
            name = act.split()[1]
            assert name not in row["prompt"] + look
