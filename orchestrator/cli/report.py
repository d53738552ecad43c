"""How results look in the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from orchestrator.doctor import Check
    from orchestrator.validate import Validation

MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def print_report(console: Console, report: Mapping[str, Any], folder: Path) -> None:
    """The outcome of a run and where its files are."""
    table = Table("domain", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("before", "after", "change", f"{report['confidence']:.0%} interval", "tasks"):
        table.add_column(title, justify="right")
    for name, delta in [*report["domains"].items(), ("macro", report["macro"])]:
        low, high = delta["delta_ci95"]
        table.add_row(
            name,
            *(_number(delta[key], sign) for key, sign in (("baseline", ""), ("final", ""), ("delta", "+"))),
            f"{_number(low, '+')} … {_number(high, '+')}",
            str(delta["n"]),
        )
    console.print(table)
    sync, boxes = report["weight_sync"], report["sandboxes"]
    console.print(
        f"{report['updates']} updates in {report['wall_s']['rl']:.0f} s; "
        f"weight sync {_number(sync['p50_s'], '', 3)} s, gap at most {sync['max_logprob_gap']:.1e}; "
        f"{boxes['leaked']} of {boxes['created']} sandboxes leaked",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report {folder / 'report.md'}\npolicy {folder / 'policy'}", highlight=False, soft_wrap=True)


def print_checks(checks: "Sequence[Check]") -> None:
    """The doctor's findings."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for check in checks:
        table.add_row(MARKS[check.status], check.name, check.found, check.remedy)
    Console().print(table)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], nothing: str) -> None:
    """A plain table, or the sentence for an empty one."""
    if not rows:
        Console().print(nothing)
        return
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)


def print_validation(result: "Validation") -> None:
    """What a domain's validation found."""
    console = Console()
    console.print(
        f"domain {result.name}, version {result.digest[:12]}: {result.tasks} tasks, "
        f"{result.passed} of {result.played} reference solutions pass, {result.idle_passed} empty answers pass",
        highlight=False,
    )
    for problem in result.problems:
        console.print(f"  {problem}", highlight=False, soft_wrap=True)


def _number(value: float | None, sign: str, digits: int = 2) -> str:
    return "–" if value is None else f"{value:{sign}.{digits}f}"
