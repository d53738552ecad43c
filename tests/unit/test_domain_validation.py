"""Sentences about input that a model refuses, for any model: `job.toml` uses them too."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reward.validation import explain, suggest


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    path: Path
    """Folder of a thing. More about it."""
    weight: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Share."""


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="x", min_length=1, max_length=3)
    things: tuple[Inner, ...] = ()
    table: dict[str, Inner] = {}
    one: Inner | None = None
    ends: tuple[int, int | str] = (0, 0)
    flag: bool = False


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"nam": "x"}, "unknown key `nam`; did you mean `name`?"),
        (
            {"things": [{"path": "a"}, {"path": "b", "wight": 1}]},
            "unknown key `things[1].wight`; did you mean `weight`?",
        ),
        ({"things": [{}]}, "the key `things[0].path` is missing; add it: Folder of a thing"),
        ({"things": [{"path": 3}]}, "`things[0].path` = 3 must be a path"),
        ({"things": [{"path": "a", "weight": 11}]}, "`things[0].weight` = 11 must be at most 10"),
        ({"things": {"path": "a"}}, "`things` = {'path': 'a'} must be a list"),
        ({"things": ["a"]}, "`things[0]` = 'a' must be a table"),
        ({"table": {"k": {"path": "a", "x": 1}}}, "unknown key `table.k.x`; known are `path`, `weight`"),
        ({"one": {"path": "a", "weight": "w"}}, "`one.weight` = 'w' must be a number"),
        ({"one": {"pat": "a"}}, "unknown key `one.pat`; did you mean `path`? (and 1 more)"),
        ({"ends": [1, None]}, "`ends[1]` = None must be a whole number"),
        ({"ends": [1.5, 2]}, "`ends[0]` = 1.5 must be a whole number"),
        ({"name": "long"}, "`name` = 'long' is too long; it may have at most 3"),
        ({"name": ""}, "`name` = '' is too short; it needs at least 1"),
        ({"flag": "perhaps"}, "`flag` = 'perhaps' must be true or false"),
        ({"flag": "no way", "name": 3}, "`name` = 3 must be a string (and 1 more)"),
    ],
)
def test_the_first_mistake_is_one_sentence(raw, sentence):
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(raw)
    assert explain(error.value, "job.toml", Outer) == f"job.toml: {sentence}"


def test_long_values_are_shortened():
    with pytest.raises(ValidationError) as error:
        Outer.model_validate({"flag": "y" * 1000})
    assert len(explain(error.value, "job.toml", Outer)) < 120


def test_a_word_like_none_gets_the_whole_list():
    assert suggest("qqq", ["alpha", "beta"]) == "known are `alpha`, `beta`"
