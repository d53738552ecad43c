"""The steps of the documentation work as they stand there."""

import re
from pathlib import Path

from orchestrator.validate import validate
from reward.domain import load_domain

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Fenced code of a page, with the list's indentation taken off."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


async def test_a_domain_in_five_minutes(tmp_path: Path) -> None:
    """Task, verifier and declaration from the page make a sound domain."""
    row = blocks("domains.md", "json")[0].strip()
    (tmp_path / "train.jsonl").write_text(row + "\n", encoding="utf-8")
    held_out = row.replace('"t1"', '"e1"').replace("cat", "dog").replace("CAT", "DOG")
    (tmp_path / "eval.jsonl").write_text(held_out + "\n", encoding="utf-8")
    (tmp_path / "grade.py").write_text(blocks("domains.md", "python")[0], encoding="utf-8")
    (tmp_path / "domain.toml").write_text(blocks("domains.md", "toml")[0], encoding="utf-8")
    assert load_domain(tmp_path).name == "upper"
    result = await validate(tmp_path)
    assert result.sound, result.problems
    assert (result.tasks, result.played, result.passed) == (2, 2, 2)


async def test_validation_finds_a_wrong_solution_and_a_task_that_silence_passes(tmp_path: Path) -> None:
    (tmp_path / "domain.toml").write_text(
        'name = "d"\nenvironment = "single_turn"\nverifier = "g.py:grade"\n[components.ok]\nrange = [0, 1]\n',
        encoding="utf-8",
    )
    (tmp_path / "g.py").write_text(
        "def grade(task, answer):\n    return {'ok': float(answer == task['data']['answer'])}\n", encoding="utf-8"
    )
    (tmp_path / "train.jsonl").write_text(
        '{"id": "wrong", "prompt": "a", "data": {"answer": "x"}, "solution": ["y"]}\n'
        '{"id": "empty", "prompt": "b", "data": {"answer": ""}, "solution": [""]}\n',
        encoding="utf-8",
    )
    (tmp_path / "eval.jsonl").write_text(
        '{"id": "good", "prompt": "c", "data": {"answer": "x"}, "solution": ["x"]}\n', encoding="utf-8"
    )
    result = await validate(tmp_path)
    assert not result.sound
    assert (result.played, result.passed, result.idle_passed) == (3, 2, 1)
    assert any(problem.startswith("wrong:") for problem in result.problems)
    assert any(problem.startswith("empty: an empty answer passes") for problem in result.problems)


def test_links_between_pages_lead_somewhere() -> None:
    root = DOCS.parent
    for page in [*root.glob("*.md"), *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
