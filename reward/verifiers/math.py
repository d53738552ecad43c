"""Mathematical answers by value, with the `math-verify` library: `1/2`, `0.5` and `\\frac{1}{2}` are the same answer.

What counts as the answer, in this order: the last `\\boxed{…}`, the last `$…$`, `\\(…\\)` or `\\[…\\]`, the whole
message when it is a bare formula, or else the last number in the text.

Where a number is expected, a number must be given. `math-verify` alone would take `3+5` for 8, and a policy soon learns
to repeat the question.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import sympy
from math_verify import parse
from math_verify import verify as equivalent

from reward.errors import UnparsableAnswer

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are the pool's

LONGEST_ANSWER = 1000
"""Characters of an answer that are read, from its end, where the answer stands."""
LONGEST_FORMULA = 100
"""Characters of a message that may be a bare formula; in a longer one a number is looked for."""
DEEPEST_NESTING = 8
"""Brackets inside brackets that are parsed. The parser's time grows exponentially with them: 5 s for 24."""

_DELIMITED = re.compile(r"\\boxed|\$|\\\(|\\\[")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|sin|cos|tan|log|ln|exp|pi)\b)[A-Za-z]{2,}")
_SEVERAL = re.compile(r"[0-9]\s+[0-9]|\n")
_N = r"(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(rf"[+-]?\s*(?:{_N}(?:\s*\\?%)?|{_N}\s*/\s*{_N}|(?:{_N})?\\[dt]?frac\{{[+-]?{_N}\}}\{{{_N}\}})")


def verify(task: dict[str, Any], answer: str) -> dict[str, float]:
    """`{"success": 0 or 1}`. Reads `answer` of the task's data (`reward/builtin.py`)."""
    gold = _parse(task["data"]["answer"])
    if not gold:
        raise ValueError(f"the expected answer {task['data']['answer']!r} of task {task['id']!r} is no mathematics")
    given = _parse(answer[-LONGEST_ANSWER:])
    if not given:
        raise UnparsableAnswer("the answer holds no number or formula")
    if _NUMBER.fullmatch(gold[-1]):
        _, _, value = given[-1].rpartition("=")
        value = value.strip()
        if not _NUMBER.fullmatch(value):
            return {"success": 0.0}
        if isinstance(given[0], sympy.Eq):
            given = [given[0].rhs, value]
    return {"success": float(equivalent(gold, given, timeout_seconds=None))}  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    """The expression and its text, or nothing."""
    _, _, text = text.rpartition("####")  # how GSM8K marks its answers
    text = text.strip()
    if _nesting(text) > DEEPEST_NESTING:
        return []
    delimited = _DELIMITED.search(text)
    if not delimited and len(text) <= LONGEST_FORMULA and not _WORD.search(text) and not _SEVERAL.search(text):
        text = f"${text}$"
    found = parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    return found if found and isinstance(found[0], sympy.Basic | sympy.MatrixBase) else []


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
