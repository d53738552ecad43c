"""A domain: the declaration in a `domain.toml` together with its tasks, read from a folder and checked as a whole.

Every mistake in the folder raises `DomainError` with one sentence that names file, key or line, and remedy, before
anything runs. What only running can show (does the reference solution score full marks?) is
`rollout_workers/demonstration.py`'s.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reward.builtin import ENVIRONMENTS, VERIFIERS, Builtin, TaskData
from reward.config import DomainConfig
from reward.errors import DomainError
from reward.scoring import bounds
from reward.task import Split, Task
from reward.user_code import check_reference, is_reference
from reward.validation import explain, suggest

CONFIG_FILE = "domain.toml"


@dataclass(frozen=True)
class Domain:
    """A kind of task, as its folder declares it."""

    config: DomainConfig
    """The keys of its `domain.toml`."""
    folder: Path
    """Absolute path of the folder."""
    digest: str
    """Version of the domain: hexadecimal SHA-256 over names and contents of all its files, hidden ones left out."""
    train: tuple[Task, ...]
    """Tasks to train on."""
    eval: tuple[Task, ...]
    """Held-out tasks, none of which is among `train`."""

    @property
    def name(self) -> str:
        """Name in reports, metrics and job files."""
        return self.config.name


class _Row(BaseModel):
    """One line of a task file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    id: str = Field(min_length=1)
    """A name unique within the domain."""
    prompt: str
    """The first user message."""
    data: dict[str, Any] = Field(default_factory=dict)
    """What environment and verifier need."""
    solution: list[str] | None = Field(default=None, min_length=1)
    """The reference solution, a list with the policy's message of each turn."""


def load_domain(folder: Path) -> Domain:
    """Read and check a domain's folder. Raises `DomainError`."""
    folder = folder.resolve()
    config = _read_config(folder / CONFIG_FILE)
    builtin = _check_parts(folder, config)
    train = _read_tasks(folder, config, "train", builtin)
    held_out = _read_tasks(folder, config, "eval", builtin)
    _check_disjoint(folder, config, train, held_out)
    return Domain(config, folder, _digest(folder), tuple(train.values()), tuple(held_out.values()))


def _read_config(path: Path) -> DomainConfig:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DomainError(f"{path}: no such file; a domain is a folder with a {CONFIG_FILE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{path}: cannot be read as UTF-8 text ({error}); correct the file") from None
    except tomllib.TOMLDecodeError as error:
        raise DomainError(f"{path}: is not valid TOML: {error}; correct that line") from None
    try:
        return DomainConfig.model_validate(raw)
    except ValidationError as error:
        raise DomainError(explain(error, path, DomainConfig)) from None


def _check_parts(folder: Path, config: DomainConfig) -> Builtin:
    """See that environment, verifier and components exist and fit; returns what the tasks' data must hold."""
    path = folder / CONFIG_FILE
    found = None
    for key, value, known in (
        ("environment", config.environment, {**ENVIRONMENTS, "single_turn": None}),
        ("verifier", config.verifier, VERIFIERS),
    ):
        if is_reference(value):
            check_reference(folder, value, f"{path}: `{key}`")
        elif value and value not in known:
            hint = suggest(value, sorted(known))
            raise DomainError(f"{path}: `{key}` = {value!r} is neither built in nor of the form FILE.py:NAME; {hint}")
        elif value:
            found = found or known[value]
    if found is None:
        return Builtin(TaskData, frozenset(config.components))
    for name in config.components:
        if name not in found.components:
            hint = suggest(name, sorted(found.components))
            raise DomainError(
                f"{path}: `components.{name}` is nothing that {config.verifier or config.environment!r} returns; {hint}"
            )
    return found


def _read_tasks(folder: Path, config: DomainConfig, split: Split, builtin: Builtin) -> dict[str, Task]:
    """Tasks of one split by id, in the file's order."""
    path = folder / (config.train if split == "train" else config.eval)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise DomainError(
            f"{path}: no such file; {CONFIG_FILE} names it as `{split}`, and a domain needs a train and an eval split"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DomainError(f"{path}: cannot be read as UTF-8 text ({error}); correct the file") from None
    tasks: dict[str, Task] = {}
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        task = _read_row(line, where, config, split, builtin)
        if task.id in tasks:
            raise DomainError(
                f"{where}: the id {task.id!r} is taken by line {first_seen[task.id]}; give each task its own"
            )
        tasks[task.id] = task
        first_seen[task.id] = number
    if not tasks:
        raise DomainError(f"{path}: holds no task; the {split} split needs at least one line")
    return tasks


def _read_row(line: str, where: str, config: DomainConfig, split: Split, builtin: Builtin) -> Task:
    try:
        raw = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DomainError(f"{where}: is not valid JSON ({error}); write one JSON object a line") from None
    if not isinstance(raw, dict):
        raise DomainError(f"{where}: is no JSON object; write one object a line, with `id` and `prompt`")
    try:
        row = _Row.model_validate(raw)
    except ValidationError as error:
        raise DomainError(explain(error, where, _Row)) from None
    try:
        builtin.data.model_validate(row.data)
    except ValidationError as error:
        raise DomainError(explain(error, f"{where}: in `data`", builtin.data)) from None
    task = Task(row.id, config.name, split, row.prompt, row.data, tuple(row.solution or ()))
    for name, component in config.components.items():
        try:
            bounds(name, component, task)
        except DomainError as error:
            raise DomainError(f"{where}: {error}") from None
    return task


def _check_disjoint(
    folder: Path, config: DomainConfig, train: Mapping[str, Task], held_out: Mapping[str, Task]
) -> None:
    """No task may be in both splits, under its own id or another one."""
    contents = {_content(task): task.id for task in train.values()}
    path = folder / config.eval
    for task in held_out.values():
        if task.id in train:
            raise DomainError(
                f"{path}: the task {task.id!r} is in {config.train} too; the splits must be disjoint, remove one"
            )
        twin = contents.get(_content(task))
        if twin is not None:
            raise DomainError(
                f"{path}: the task {task.id!r} has the prompt and data of {twin!r} in {config.train}; "
                "the splits must be disjoint, remove one"
            )


def _content(task: Task) -> str:
    return json.dumps([task.prompt, task.data], sort_keys=True)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    for name in sorted(files):
        if any(part.startswith((".", "__pycache__")) for part in name.split("/")):
            continue
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
