"""The commands of `crosstrain`."""

import asyncio
import json
import signal
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrator.cli.failures import CANCELLED, FAILED

if TYPE_CHECKING:
    from sandboxes.docker import ContainerInfo

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False, rich_markup_mode=None)
models = typer.Typer(no_args_is_help=True, help="Make policies.")
sandboxes = typer.Typer(no_args_is_help=True, help="Look after the sandboxes of this machine.")
domains = typer.Typer(no_args_is_help=True, help="Check task domains.")
app.add_typer(models, name="models")
app.add_typer(sandboxes, name="sandboxes")
app.add_typer(domains, name="domains")


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("-o", "--output", help="How results are printed.")]


@app.callback()
def _root() -> None:
    """Cross-domain reinforcement learning of mixture-of-experts language models."""


@app.command()
def run(
    job: Annotated[Path, typer.Argument(help="A job.toml.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of this job.")] = False,
    run_id: Annotated[str, typer.Option("--run", help="Which run to resume; the latest by default.")] = "",
    runs: Annotated[Path, typer.Option("--runs", help="Folder of all runs.", envvar="CROSSTRAIN_RUNS")] = Path("runs"),
    output: OutputOption = Output.TABLE,
) -> None:
    """Run a job in the foreground. Ctrl+C stops it cleanly after a checkpoint."""
    from rich.console import Console

    from orchestrator.spec import load_spec

    spec = load_spec(job)
    console = Console(stderr=output is Output.JSON)
    console.print(
        f"crosstrain: job {spec.name}, {len(spec.domains)} domains, {spec.rl.updates} updates", highlight=False
    )
    from orchestrator.cli.report import print_report
    from orchestrator.run.job import JobRun

    wanted = (run_id or "latest") if resume or run_id else ""
    job_run = JobRun(spec, job, runs=runs, console=console, resume=wanted)
    report = _run_until_signal(job_run.execute())
    if report is None:
        console.print(f"stopped; the run is in {job_run.folder}", highlight=False, soft_wrap=True)
        raise typer.Exit(CANCELLED)
    if output is Output.JSON:
        typer.echo(json.dumps(report, indent=2))
    else:
        print_report(console, report, job_run.folder)


def _run_until_signal(work: Coroutine[Any, Any, T]) -> T | None:
    """Run to the end; None when SIGINT or SIGTERM ended it, after the work's own clean-up.

    A second signal changes nothing.
    """

    async def guarded() -> T | None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _cancel_once, task)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    return asyncio.run(guarded())


def _cancel_once(task: "asyncio.Future[Any]") -> None:
    """Cancel a task the first time only: a second Ctrl+C must not interrupt the clean-up."""
    if not getattr(task, "_crosstrain_cancelled", False):
        task._crosstrain_cancelled = True  # type: ignore[attr-defined]
        task.cancel()


@app.command()
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Import torch and vLLM as well (slow).")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check this machine and say what to do about what fails."""
    from orchestrator.cli.report import print_checks
    from orchestrator.doctor import run_checks

    checks = run_checks(deep=deep)
    if output is Output.JSON:
        typer.echo(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        print_checks(checks)
    if any(check.failed for check in checks):
        raise typer.Exit(FAILED)


@models.command("init")
def models_init(
    path: Annotated[Path, typer.Argument(help="Directory to make.")],
    preset: Annotated[str, typer.Option("--preset", help="Which policy.")] = "tiny-moe",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the weights.")] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Make a freshly initialised policy: a Hugging Face directory with weights, tokenizer and chat template."""
    from typing import cast

    from trainer.policy import Preset, init_policy

    init_policy(cast(Preset, preset), path, seed)
    typer.echo(
        json.dumps({"path": str(path), "preset": preset}) if output is Output.JSON else f"made {preset} in {path}"
    )


@sandboxes.command("build")
def sandboxes_build(output: OutputOption = Output.TABLE) -> None:
    """Make the base image of sandboxes, if it is not there as this version needs it."""
    from sandboxes.docker import DockerEngine
    from sandboxes.image import BASE_IMAGE, ensure_base_image

    async def build() -> None:
        engine = await DockerEngine.connect()
        try:
            await ensure_base_image(engine, progress=lambda line: typer.echo(line, err=True))
        finally:
            await engine.aclose()

    asyncio.run(build())
    typer.echo(json.dumps({"image": BASE_IMAGE}) if output is Output.JSON else f"{BASE_IMAGE} is ready")


@sandboxes.command("ps")
def sandboxes_ps(output: OutputOption = Output.TABLE) -> None:
    """List the sandboxes of all runs on this machine."""
    from sandboxes.reaper import containers

    _print_containers(asyncio.run(containers()), output, "no sandboxes")


@sandboxes.command("prune")
def sandboxes_prune(
    run: Annotated[str, typer.Option("--run", help="Remove this run's, whether it still runs or not.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Remove sandboxes whose deadline has passed, or those of one run."""
    from sandboxes.reaper import reap

    _print_containers(asyncio.run(reap(run or None)), output, "nothing to remove")


def _print_containers(found: "list[ContainerInfo]", output: Output, nothing: str) -> None:
    from dataclasses import asdict

    from orchestrator.cli.report import print_rows

    rows = [asdict(container) for container in found]
    if output is Output.JSON:
        typer.echo(json.dumps(rows, indent=2))
    else:
        print_rows(rows, ("name", "run", "host", "state"), nothing)


@domains.command("validate")
def domains_validate(
    folder: Annotated[Path, typer.Argument(help="Folder with a domain.toml.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Play reference solutions and empty answers of a domain in its real environment and compare their scores."""
    from orchestrator.cli.report import print_validation
    from orchestrator.validate import validate

    result = asyncio.run(validate(folder))
    if output is Output.JSON:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        print_validation(result)
    if not result.sound:
        raise typer.Exit(FAILED)
