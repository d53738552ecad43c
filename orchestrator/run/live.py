"""What the terminal shows while a run goes on: a live table, or plain lines where there is no terminal."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.run.telemetry import Telemetry
from reward.score import Status

REFRESH_S = 0.5
PLAIN_EVERY_S = 10.0
"""Seconds between lines where the output is no terminal."""
PHASES = {
    "starting": "starting",
    "setup": "setting up: Ray, trainer, sandboxes",
    "sft": "warm start",
    "eval": "measuring held-out tasks",
    "rl": "reinforcement learning",
    "done": "finishing",
}


class LiveView:
    """Renders the telemetry. `async with view.running():` keeps it on the screen."""

    def __init__(self, console: Console, telemetry: Telemetry) -> None:
        self._console = console
        self._telemetry = telemetry

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Refresh until the block ends."""
        painter = asyncio.create_task(self._paint() if self._console.is_terminal else self._print())
        try:
            yield
        finally:
            painter.cancel()
            await asyncio.gather(painter, return_exceptions=True)

    async def _paint(self) -> None:
        with Live(self.render(), console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                live.update(self.render(), refresh=True)

    async def _print(self) -> None:
        shown = ""
        while True:
            await asyncio.sleep(REFRESH_S if not shown else PLAIN_EVERY_S)
            line = self.line()
            if line != shown:
                self.say(line)
                shown = line

    def line(self) -> str:
        """The state in one line."""
        t = self._telemetry
        if t.phase == "sft":
            return f"{PHASES['sft']}: step {t.sft_done}/{t.sft_total}"
        if t.phase != "rl" or t.last is None:
            return PHASES[t.phase]
        rates = "  ".join(
            f"{name} {domain.pass_rate[-1]:.2f}" for name, domain in t.domains.items() if domain.pass_rate
        )
        return f"update {t.update}/{t.total_updates}  pass rate: {rates}  {_left(t)}"

    def render(self) -> RenderableType:
        """The table with its head and foot."""
        t = self._telemetry
        parts: list[RenderableType] = [Text(PHASES[t.phase], style="bold")]
        if t.phase == "sft" and t.sft_total:
            parts.append(_bar(t.sft_done, t.sft_total, f"step {t.sft_done}/{t.sft_total}"))
        if t.phase == "rl":
            done, total = t.update - t.first_update, t.total_updates - t.first_update
            parts += [
                _bar(done, total, f"update {t.update}/{t.total_updates}, {_left(t)}"),
                self._domains(),
                self._figures(),
            ]
        return Group(*parts)

    def _domains(self) -> Table:
        t = self._telemetry
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("domain")
        for title in ("reward", "pass rate", "tokens", "staleness", "quota", "signal", "gradient", "errors"):
            table.add_column(title, justify="right")
        for name, domain in t.domains.items():
            part = t.last.built.domains.get(name) if t.last else None
            if part is None or t.last is None:
                table.add_row(name, *["–"] * 8)
                continue
            table.add_row(
                name,
                f"{part.reward:.2f}",
                f"{part.pass_rate:.2f}",
                f"{part.mean_tokens:.0f}",
                f"{part.mean_staleness:.1f} ≤ {part.staleness}",
                f"{part.groups}/{t.last.quota[name]}",
                f"{part.groups_with_signal}",
                f"{domain.gradient_share[-1]:.2f}",
                f"{domain.statuses[Status.INFRA_ERROR]}",
            )
        return table

    def _figures(self) -> Text:
        t = self._telemetry
        figures = [f"engine {t.generated_tokens_per_s():,.0f} tokens/s"]
        if t.syncs:
            figures.append(f"sync {t.syncs[-1].sync_s * 1e3:.0f} ms, gap {t.syncs[-1].gap:.1e}")
        if t.exec_latencies.count:
            p50, p95 = t.exec_latencies.quantile_ms(0.5), t.exec_latencies.quantile_ms(0.95)
            figures.append(f"sandbox exec p50 {p50:.1f} ms, p95 {p95:.1f} ms")
        return Text("  ·  ".join(figures))


def _bar(done: int, total: int, text: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=40), text)
    return row


def _left(telemetry: Telemetry) -> str:
    seconds = telemetry.time_left_s()
    if seconds is None:
        return "time left unknown"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"
