"""Turns a pydantic error into one sentence that names file, key and remedy. For `domain.toml`, task files and
`job.toml`."""

import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_KINDS = {
    "string_type": "a string",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "a table",
    "model_type": "a table",
    "list_type": "a list",
    "tuple_type": "a list",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, source: object, model: type[BaseModel]) -> str:
    """One sentence about the first thing wrong with the input of `model`, for example
    ``job.toml: unknown key `seeed`; did you mean `seed`?``.

    `source` is whatever names the input best: a path, or a path with a line.
    """
    errors = error.errors(include_url=False)
    # An unknown key is reported first: the missing key beside it is usually the same one, misspelt.
    first = min(errors, key=lambda details: details["type"] != "extra_forbidden")
    # The members of a union each report the same value; they are one mistake.
    mistakes = len({_dotted(_locate(details["loc"], model)[0]) for details in errors})
    more = f" (and {mistakes - 1} more)" if mistakes > 1 else ""
    return f"{source}: {_sentence(first, model)}{more}"


def suggest(word: str, known: Sequence[str]) -> str:
    """``did you mean `close`?`` or, when nothing is close, the whole list."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known are " + ", ".join(f"`{name}`" for name in known)


def _sentence(details: ErrorDetails, model: type[BaseModel]) -> str:
    keys, owner = _locate(details["loc"], model)
    key, kind, value = _dotted(keys), details["type"], details["input"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key `{key}`; {suggest(str(keys[-1]), list(owner.model_fields) if owner else [])}"
    if kind == "missing":
        return f"the key `{key}` is missing; add it{_description(owner, keys)}"
    if kind == "value_error":
        where = f"`{key}`: " if key else ""
        return f"{where}{context['error']}"
    shown = f"`{key}` = {_show(value)}"
    if kind in _KINDS:
        return f"{shown} must be {_KINDS[kind]}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{shown} must be {words} {context[name]:g}"
    if kind == "literal_error":
        return f"{shown} must be one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"{shown} must match the pattern {context['pattern']}"
    if kind in ("too_short", "string_too_short"):
        return f"{shown} is too short; it needs at least {context.get('min_length')}"
    if kind in ("too_long", "string_too_long"):
        return f"{shown} is too long; it may have at most {context.get('max_length')}"
    return f"{shown}: {details['msg'][:1].lower()}{details['msg'][1:]}"


def _locate(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel] | None]:
    """The keys in `loc` without pydantic's labels of union members, and the model that owns the last key."""
    annotation: Any = model
    keys: list[int | str] = []
    owner: type[BaseModel] | None = model
    for part in loc:
        members = _members(annotation)
        member, inner = next(((m, step) for m in members if (step := _step(m, part)) is not None), (None, None))
        if member is None:
            member = next((m for m in members if _is_model(m)), None)  # which lacks the key
            if member is None or part == member.__name__:
                continue  # a label of pydantic's, not a key
        owner = member if _is_model(member) else owner
        annotation = inner
        keys.append(part)
    return keys, owner


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(inner for arg in typing.get_args(annotation) for inner in _members(arg))
    return (annotation,)


def _step(annotation: Any, part: int | str) -> Any:
    """What lies under `part` in a model, mapping or sequence; None when it has no such place."""
    if _is_model(annotation):
        for name, info in annotation.model_fields.items():
            if part in (name, info.alias):
                return info.annotation
        return None
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is None or not isinstance(origin, type):
        return None
    if issubclass(origin, Mapping):
        return args[1] if isinstance(part, str) else None
    if isinstance(part, int) and issubclass(origin, Sequence):
        if origin is tuple and Ellipsis not in args:
            return args[part] if part < len(args) else None
        return args[0]
    return None


def _is_model(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _dotted(keys: Sequence[int | str]) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _description(owner: type[BaseModel] | None, keys: Sequence[int | str]) -> str:
    info = owner.model_fields.get(str(keys[-1])) if owner and keys else None
    if info is None or not info.description:
        return ""
    first, _, _ = " ".join(info.description.split()).partition(". ")
    return f": {first.rstrip('.')}"
