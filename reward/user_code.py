"""Python that a user brings in a domain's folder, named as `FILE.py:NAME`."""

import ast
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from reward.errors import DomainError


def is_reference(text: str) -> bool:
    """Whether `text` has the form `FILE.py:NAME`."""
    file, colon, name = text.partition(":")
    return bool(colon) and file.endswith(".py") and name.isidentifier()


def check_reference(folder: Path, reference: str, where: str) -> None:
    """Raise `DomainError` unless the file lies in `folder`, is Python and defines the name. Runs none of it.

    `where` names what refers to it, for example ``domain.toml: `verifier` ``.
    """
    file, _, name = reference.partition(":")
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DomainError(f"{where} = {reference!r} lies outside the domain's folder; move the file into it")
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError:
        raise DomainError(f"{where} = {reference!r} names a file that cannot be read; create {path}") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise DomainError(f"{path}:{line}: is not valid Python ({error}); correct it") from None
    defined = _defined(tree)
    if name not in defined:
        raise DomainError(
            f"{where} = {reference!r} names nothing in {path}; define `{name}` there, it has {sorted(defined)}"
        )


def load_reference(folder: Path, reference: str) -> Any:
    """The object that `reference` names; its file is run once a process. Whatever that raises comes out unchanged."""
    file, _, name = reference.partition(":")
    return getattr(_module((folder / file).resolve()), name)


@lru_cache(maxsize=64)
def _module(path: Path) -> Any:
    module_name = f"crosstrain_user_{path.stem}_{abs(hash(path)):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return names
