"""Partial credit of a tool call."""

import json

import pytest

from reward.errors import UnparsableAnswer
from reward.verifiers.tool_call import verify

TOOLS = [
    {
        "name": "heat",
        "parameters": {
            "type": "object",
            "properties": {"deg": {"type": "integer"}, "room": {"type": "string"}},
            "required": ["deg"],
            "additionalProperties": False,
        },
    },
    {"name": "open", "parameters": {"type": "object", "properties": {"app": {}}}},
]
CALL = {"name": "heat", "arguments": {"deg": 20, "room": "hall"}}


def points(answer, call=CALL, tools=TOOLS) -> float:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return verify({"data": {"tools": tools, "call": call}}, text)["points"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (CALL, 100),
        ({"name": "heat", "arguments": {"deg": 20.0, "room": "hall"}}, 100),
        ({"name": "heat", "arguments": {"deg": 21, "room": "hall"}}, 75),
        ({"name": "heat", "arguments": {"deg": 20}}, 75),
        ({"name": "heat", "arguments": {"deg": 0}}, 50),
        ({"name": "open", "arguments": {"app": "x"}}, 30),
        ({"name": "heat", "arguments": {"deg": "20", "room": "hall"}}, 10),
        ({"name": "heat", "arguments": {"deg": 20, "room": "hall", "x": 1}}, 10),
        ({"name": "heat", "arguments": {"room": "hall"}}, 10),
        ({"name": "cool", "arguments": {"deg": 20}}, 10),
        ({"name": "heat"}, 10),
        ({"name": ["heat"], "arguments": {}}, 10),
        ({"name": "heat", "arguments": [20]}, 10),
        ({**CALL, "comment": "please"}, 10),
        ({}, 10),
    ],
    ids=repr,
)
def test_points_by_how_far_the_call_is_right(answer, expected):
    assert points(answer) == expected


def test_extra_arguments_cost_in_proportion():
    call = {"name": "open", "arguments": {"app": "x"}}
    assert points({"name": "open", "arguments": {"app": "x", "y": 1}}, call) == 75
    assert points({"name": "open", "arguments": {}}, {"name": "open", "arguments": {}}) == 100


def test_true_is_no_number_and_nested_values_compare_whole():
    call = {"name": "open", "arguments": {"app": [1, {"a": 1.0}]}}
    assert points({"name": "open", "arguments": {"app": [1.0, {"a": 1}]}}, call) == 100
    assert points({"name": "open", "arguments": {"app": [True, {"a": 1}]}}, call) == 50
    assert points({"name": "open", "arguments": {"app": [1, {"a": 1, "b": 2}]}}, call) == 50


@pytest.mark.parametrize("answer", ["", "heat(20)", '{"name": "heat"', "[1]", "3", '"heat"', "[" * 100_000, "null"])
def test_what_is_no_json_object_is_unparsable(answer):
    with pytest.raises(UnparsableAnswer):
        points(answer)


def test_numbers_that_json_does_not_know_earn_nothing_by_comparison():
    call = {"name": "open", "arguments": {"app": 1}}
    assert points('{"name": "open", "arguments": {"app": NaN}}', call) == 50
