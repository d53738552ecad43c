"""The rules of the architecture: who imports whom, where heavy packages are loaded, how long files are, what is frozen.

A longer file or function says `Longer than` and why in its docstring. After a deliberate change of a job's keys:

    CROSSTRAIN_UPDATE_KEYS=1 scripts/test tests/unit/test_architecture.py
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.doctor import read_pins
from orchestrator.spec import JobSpec

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "sandboxes": set(),
    "trainer": set(),
    "reward": {"sandboxes"},
    "rollout_workers": {"reward", "sandboxes"},
    "orchestrator": {"reward", "rollout_workers", "sandboxes", "trainer"},
}
ENGINES = ("rollout_workers/engines/vllm.py", "rollout_workers/weight_receiver.py")
HEAVY = {
    "docker": ("sandboxes/docker.py", "sandboxes/image.py"),
    "matplotlib": ("orchestrator/run/report.py",),
    "ray": ("orchestrator/cluster.py",),
    "sqlalchemy": ("orchestrator/store/",),
    "torch": ("trainer/", "rollout_workers/weight_receiver.py", "rollout_workers/weight_channel.py"),
    "transformers": ("trainer/", "rollout_workers/chat.py"),
    "vllm": ENGINES,
}
"""Package to the files and folders that may import it."""
SLOW = {*HEAVY, "fastapi", "numpy", "scipy", "uvicorn"}
"""What configuration and `--help` must not load."""
MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_KEYS = 400, 60, 120
REASON = "Longer than"
KEYS = Path(__file__).with_name("config_keys.txt")
UPDATE = "CROSSTRAIN_UPDATE_KEYS"
Function = ast.FunctionDef | ast.AsyncFunctionDef

SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def trees(paths: list[Path]) -> Iterator[tuple[str, ast.Module, list[str]]]:
    for path in paths:
        text = path.read_text(encoding="utf-8")
        yield name_of(path), ast.parse(text), text.splitlines()


def imports(name: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, anywhere in the file."""
    folders = name.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = folders[: len(folders) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def tracked(*patterns: str) -> list[Path]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip(f"not a git checkout: {listing.stderr.strip()}")
    return [path for entry in listing.stdout.split("\0") if entry and (path := ROOT / entry).is_file()]


def test_packages_import_one_way() -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree, _ in trees(SOURCES)
        for line, module in imports(name, tree)
        if (other := module.partition(".")[0]) in MAY_IMPORT
        and other != (package := name.partition("/")[0])
        and other not in MAY_IMPORT[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    modules = {
        name: name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in map(name_of, SOURCES)
    }
    graph: dict[str, set[str]] = {}
    for name, tree, _ in trees(SOURCES):
        imported = {part for _, full in imports(name, tree) for part in (full, full.rpartition(".")[0])}
        graph[modules[name]] = imported & set(modules.values())
    assert not find_circle(graph), " -> ".join(find_circle(graph))


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle in a directed graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph[node] - {node}):
            if circle := visit(other, [*way, node]):
                return circle
        done.add(node)
        return []

    return next((circle for node in sorted(graph) if (circle := visit(node, []))), [])


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_heavy_packages_stay_in_their_files() -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree, _ in trees(SOURCES)
        for line, module in imports(name, tree)
        if not name.startswith(HEAVY.get(module.partition(".")[0], ("",)))
    ]
    assert not wrong, "\n".join(wrong)


def loaded(code: str) -> set[str]:
    """Which slow packages a fresh interpreter has loaded after running `code`."""
    report = f"import sys; sys.stderr.write('loaded:' + ','.join(set({sorted(SLOW)}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.rpartition("loaded:")[2].split(",")) - {""}


def test_configuration_loads_nothing_heavy() -> None:
    modules = ["orchestrator.spec", "orchestrator.doctor", *(f"{package}.config" for package in MAY_IMPORT)]
    assert loaded(f"import {', '.join(modules)}") == set()


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom orchestrator.cli import main\nsys.argv = ['crosstrain', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert loaded(code) == set()


def test_a_loaded_package_is_noticed() -> None:
    assert loaded("import numpy") == {"numpy"}


def test_files_are_short() -> None:
    wrong = [
        f"{name}: {len(lines)} lines"
        for name, tree, lines in trees(tracked("*.py"))
        if len(lines) >= MOST_FILE_LINES and REASON not in (ast.get_docstring(tree) or "")
    ]
    assert not wrong, "\n".join(wrong)


def test_functions_are_short() -> None:
    wrong = [
        f"{name}:{node.lineno} {node.name}: {lines} lines"
        for name, tree, _ in trees(tracked("*.py"))
        for node in ast.walk(tree)
        if isinstance(node, Function)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) >= MOST_FUNCTION_LINES
        and REASON not in (ast.get_docstring(node) or "")
    ]
    assert not wrong, "\n".join(wrong)


BROAD = {"Exception", "BaseException"}


def broad_catches(tree: ast.AST) -> Iterator[int]:
    """Lines of handlers that catch everything and do not end by raising, and of `suppress(Exception)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else BROAD
            if caught & BROAD and not isinstance(node.body[-1], ast.Raise):
                yield node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            yield from [node.lineno for part in node.args if isinstance(part, ast.Name) and part.id in BROAD]


def test_broad_catches_say_why() -> None:
    wrong = [
        f"{name}:{line}"
        for name, tree, lines in trees(SOURCES)
        for line in broad_catches(tree)
        if not re.search(r"# (noqa: BLE001 - )?(?!noqa)\w.{10,}", lines[line - 1])
    ]
    assert not wrong, "a broad catch needs a comment with its reason: " + ", ".join(wrong)


def undocumented(name: str, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree) and tree.body:
        yield f"{name}: module"
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    for scope in scopes:
        for node in scope.body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            declared_only = ast.unparse(node.body[-1]) == "..."  # a protocol's method: its class says what it is
            if not ast.get_docstring(node) and not declared_only:
                yield f"{name}:{node.lineno} {node.name}"
            if isinstance(node, ast.ClassDef):
                scopes.append(node)


def test_what_is_public_is_documented() -> None:
    wrong = [entry for name, tree, _ in trees(SOURCES) for entry in undocumented(name, tree)]
    assert not wrong, "\n".join(wrong)


def test_no_file_names_a_machine_or_a_registry() -> None:
    """What is only true of one machine, and hosts that packages come from: those are for the user's own settings."""
    own_places = re.compile(rf"{re.escape(str(ROOT))}/|/(root|home/\w+|Users/\w+)/")
    hosts = re.compile(
        r"\b(pypi\.org|pythonhosted\.org|npmjs\.org|deb\.debian\.org|download\.pytorch\.org|ghcr\.io|registry-1\.docker\.io)"
    )
    wrong = [
        f"{name_of(path)}:{number} {found.group()}"
        for path in tracked()
        if path.suffix not in {".png", ".gif", ".lock"}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for pattern in (own_places, hosts)
        if (found := pattern.search(line)) and path != Path(__file__)
    ]
    assert not wrong, "\n".join(wrong)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that a table of this model may hold, dotted; `[]` marks a list of tables."""
    for name, field in model.model_fields.items():
        models = [part for part in parts_of(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        many = "[]" if models and models[0] is not field.annotation and "tuple" in str(field.annotation) else ""
        for nested in models:
            yield from keys_of(nested, f"{prefix}{name}{many}.")
        if not models:
            yield f"{prefix}{name}", field


def parts_of(annotation: object) -> Iterator[object]:
    arguments = getattr(annotation, "__args__", None)
    if not arguments:
        yield annotation
    for part in arguments or ():
        yield from parts_of(part)


def test_keys_of_a_job_are_few_and_deliberate() -> None:
    keys = sorted({key for key, _ in keys_of(JobSpec)})
    if os.environ.get(UPDATE):
        KEYS.write_text("\n".join(keys) + "\n", encoding="utf-8")
    frozen = KEYS.read_text(encoding="utf-8").split()
    assert keys == frozen, (
        f"added {sorted(set(keys) - set(frozen))}, removed {sorted(set(frozen) - set(keys))}: see {UPDATE} above"
    )
    assert len(keys) < MOST_KEYS


def test_every_key_says_what_it_is() -> None:
    assert not [key for key, field in keys_of(JobSpec) if not (field.description or "").strip()]


def test_dependencies_are_explained_with_their_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = {re.split(r"[^\w.-]", line)[0] for line in project["dependencies"] + extras["cpu"] + extras["dev"]}
    pins = {**read_pins(ROOT / "requirements/torch.txt"), **read_pins(ROOT / "requirements/cpu.lock")}
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| (\d[\w.]*) \| [^|]{3,} \| [^|]{3,} \|$", page, flags=re.MULTILINE))
    assert rows == {name: pins[name] for name in names}
