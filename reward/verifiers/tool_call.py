"""A tool call written as JSON, `{"name": …, "arguments": {…}}`, against the tools' schemas and the expected call.

Points from 0 to 100, earned in this order, each step needing the one before: 10 the answer is a JSON object, 20 it is a
valid call of a known tool by its JSON schema, 20 the tool is the right one, 50 the arguments, in proportion to how many
of the expected and the given names carry the expected value.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator

from reward.errors import UnparsableAnswer

OBJECT, VALID, TOOL, ARGUMENTS = 10.0, 20.0, 20.0, 50.0


def verify(task: dict[str, Any], answer: str) -> dict[str, float]:
    """`{"points": …}`. Reads `tools` and `call` of the task's data (`reward/builtin.py`)."""
    try:
        call = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise UnparsableAnswer(f"the answer is not JSON: {error}") from None
    if not isinstance(call, dict):
        raise UnparsableAnswer("the answer is no JSON object")
    return {"points": _points(call, task["data"])}


def _points(call: dict[str, Any], data: Mapping[str, Any]) -> float:
    name, arguments = call.get("name"), call.get("arguments")
    schemas = {tool["name"]: tool.get("parameters", {}) for tool in data["tools"]}
    if set(call) != {"name", "arguments"} or not isinstance(name, str) or not isinstance(arguments, dict):
        return OBJECT
    if name not in schemas or not _validator(json.dumps(schemas[name])).is_valid(arguments):
        return OBJECT
    expected = data["call"]
    if name != expected["name"]:
        return OBJECT + VALID
    wanted = expected.get("arguments", {})
    names = set(wanted) | set(arguments)
    right = sum(key in wanted and key in arguments and _equal(wanted[key], arguments[key]) for key in names)
    share = right / len(names) if names else 1.0
    return OBJECT + VALID + TOOL + ARGUMENTS * share


@lru_cache(maxsize=1024)
def _validator(schema: str) -> Draft202012Validator:
    parsed = json.loads(schema)
    Draft202012Validator.check_schema(parsed)
    return Draft202012Validator(parsed)


def _equal(left: Any, right: Any) -> bool:
    """JSON equality: 1 equals 1.0, but true is no number."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return left == right
