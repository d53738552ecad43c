"""Writes the task files of the four quickstart domains: `python examples/quickstart/make_tasks.py`.

Deterministic: the committed files are its output, and a test compares them. Every kind of task occurs in both splits,
and no instance occurs twice: no prompt with its solution, and no tool call whatever else is offered. The tasks are tiny
on purpose: a byte-level policy of about two million parameters on two CPU cores has to learn them in minutes, so names
have two characters and answers are short.
"""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

EVAL_TASKS = 80
TRAIN_TASKS = {"terminal": 1200, "code": 840, "math": 2400, "tools": 860}
"""So many that a run meets few of them twice: with a third of them training rates rose and held-out rates did not."""
DOMAINS = Path(__file__).parent / "domains"

LETTERS = "ABCDEFGHIJKLMNOP"
"""A name is one of these and a digit. Capitals and digits stand out in a prompt, so copying a name is learnt early."""


class Draft(NamedTuple):
    """A task before it has an id and a split."""

    prompt: str
    data: dict[str, Any]
    solution: tuple[str, ...]


Kind = Callable[[random.Random], Draft]


# terminal: files before, files wanted after, and the commands in between --------------------------------------------


def _name(rng: random.Random) -> str:
    return rng.choice(LETTERS) + str(rng.randrange(10))


def _names(rng: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[_name(rng)] = None
    return list(names)


def _copy(rng: random.Random) -> Draft:
    old, new, word = _names(rng, 3)
    data = {"files": {old: f"{word}\n"}, "expect": {old: f"{word}\n", new: f"{word}\n"}}
    return Draft(f"copy {old} to {new}", data, (f"cp {old} {new}", "exit"))


def _rename(rng: random.Random) -> Draft:
    old, new, word = _names(rng, 3)
    data = {"files": {old: f"{word}\n"}, "expect": {old: None, new: f"{word}\n"}}
    return Draft(f"rename {old} to {new}", data, (f"mv {old} {new}", "exit"))


def _follow(rng: random.Random) -> Draft:
    note, target = _names(rng, 2)
    data = {"files": {note: f"{target}\n"}, "expect": {note: f"{target}\n", target: ""}}
    return Draft(f"make what {note} names", data, (f"cat {note}", f"touch {target}", "exit"))


def _clean(rng: random.Random) -> Draft:
    kept, other = _names(rng, 2)
    data = {"files": {kept: "1\n", other: "1\n"}, "expect": {kept: "1\n", other: None}}
    return Draft(f"delete all but {kept}", data, ("ls", f"rm {other}", "exit"))


# code: the comment says what the completion must compute -------------------------------------------------------------


def _function(parameter: str, wish: str, body: str, arguments: list[Any]) -> Draft:
    compute = eval(f"lambda {parameter}: {body}")  # noqa: S307 - our own expression, the reference solution itself
    tests = [[[argument], compute(argument)] for argument in arguments]
    prompt = f"def f({parameter}): # {wish}\n"
    return Draft(prompt, {"entry_point": "f", "include_prompt": True, "tests": tests}, (f" return {body}",))


_OPERATIONS = {"add": "+", "subtract": "-", "times": "*"}


def _arithmetic(rng: random.Random) -> Draft:
    operation, constant = rng.choice(list(_OPERATIONS)), rng.randint(2, 149)
    return _function(
        "x", f"{operation} {constant}", f"x{_OPERATIONS[operation]}{constant}", rng.sample(range(-50, 50), 2)
    )


def _affix(rng: random.Random) -> Draft:
    word = _name(rng)
    wish, body = rng.choice([(f"append {word}", f"s+'{word}'"), (f"prepend {word}", f"'{word}'+s")])
    return _function("s", wish, body, [_name(rng) + _name(rng) for _ in range(2)])


def _aggregate(rng: random.Random) -> Draft:
    call = rng.choice(["sum", "max", "min", "len"])
    operation, constant = rng.choice(list(_OPERATIONS)), rng.randint(2, 29)
    lists = [rng.sample(range(10, 60), size) for size in (2, 3, 4)]
    return _function("a", f"{call}, {operation} {constant}", f"{call}(a){_OPERATIONS[operation]}{constant}", lists)


# math: place value, so that one rule holds for all digits ------------------------------------------------------------


def _compose(rng: random.Random) -> Draft:
    parts = [place * rng.randint(1, 9) for place in (1000, 100, 10, 1)]
    rng.shuffle(parts)
    return _equation("+".join(map(str, parts)), sum(parts))


def _remove(rng: random.Random) -> Draft:
    parts = [place * rng.randint(1, 9) for place in (1000, 100, 10, 1)]
    part = rng.choice(parts)
    return _equation(f"{sum(parts)}-{part}", sum(parts) - part)


def _equation(question: str, answer: int) -> Draft:
    return Draft(question, {"answer": str(answer)}, (f"{question}={answer}",))


# tools: one JSON call ------------------------------------------------------------------------------------------------

_TOOLS: Mapping[str, tuple[str, str, str]] = {
    "nap": ("s", "integer", "pause for"),
    "dim": ("pc", "integer", "light at"),
    "heat": ("to", "integer", "warm to"),
    "call": ("id", "string", "ring"),
    "run": ("app", "string", "start"),
    "find": ("by", "string", "look for"),
}
"""Name of the tool: its one parameter, the parameter's type, and how people ask for it."""


def _schema(tool: str) -> dict[str, Any]:
    key, kind, _ = _TOOLS[tool]
    return {"name": tool, "parameters": {"type": "object", "properties": {key: {"type": kind}}, "required": [key]}}


def _call(rng: random.Random, kind: str, value: int | str) -> Draft:
    tool = rng.choice([name for name, (_, k, _) in _TOOLS.items() if k == kind])
    other = rng.choice([name for name in _TOOLS if name != tool])
    listed = rng.sample([tool, other], 2)
    key, _, request = _TOOLS[tool]
    signatures = " ".join(f"{name}({_TOOLS[name][0]})" for name in listed)
    call = {"name": tool, "arguments": {key: value}}
    data = {"tools": [_schema(name) for name in listed], "call": call}
    return Draft(f"{signatures}\n{request} {value}", data, (json.dumps(call, separators=(",", ":")),))


def _number(rng: random.Random) -> Draft:
    return _call(rng, "integer", rng.randint(10, 199))


def _word(rng: random.Random) -> Draft:
    return _call(rng, "string", _name(rng))


KINDS: Mapping[str, Mapping[str, Kind]] = {
    "terminal": {"copy": _copy, "rename": _rename, "follow": _follow, "clean": _clean},
    "code": {"arithmetic": _arithmetic, "affix": _affix, "aggregate": _aggregate},
    "math": {"compose": _compose, "remove": _remove},
    "tools": {"number": _number, "word": _word},
}


def make_domain(domain: str) -> dict[str, list[dict[str, Any]]]:
    """Rows of `train` and `eval` for one domain, kinds in turn, so that any prefix is balanced."""
    rng = random.Random(f"quickstart/{domain}")  # noqa: S311 - reproducible, not secret
    kinds = KINDS[domain]
    seen: set[tuple[str, ...]] = set()
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, count in (("eval", EVAL_TASKS), ("train", TRAIN_TASKS[domain])):
        rows = splits[split] = []
        while len(rows) < count:
            kind = list(kinds)[len(rows) % len(kinds)]
            draft = kinds[kind](rng)
            instance = draft.solution if "call" in draft.data else (draft.prompt, *draft.solution)
            if instance in seen:
                continue
            seen.add(instance)
            row: dict[str, Any] = {"id": f"{split}-{kind}-{len(rows):03d}", "prompt": draft.prompt}
            row["data"] = {**draft.data, "labels": {"kind": kind}}
            rows.append({**row, "solution": list(draft.solution)})
    return splits


def render(rows: list[dict[str, Any]]) -> str:
    """JSON lines, one task a line."""
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)


if __name__ == "__main__":
    for name in KINDS:
        for split, rows in make_domain(name).items():
            (DOMAINS / name / f"{split}.jsonl").write_text(render(rows), encoding="utf-8")
