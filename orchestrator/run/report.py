"""The report of a run: `report.json` for programs, `report.md` and `curves.png` for people."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.run.evaluation import Delta
from orchestrator.run.events import finite
from orchestrator.run.telemetry import Telemetry
from reward.score import Status
from trainer.atomic import atomic_file


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished run measured."""

    run: str
    """Run id."""
    deltas: Mapping[str, Delta]
    """Change of the held-out pass rate by domain."""
    macro: Delta
    """The mean over domains."""
    confidence: float
    """Level of the intervals."""
    leaked: int
    """Sandboxes that were still there after the clean-up."""


def build_report(outcome: Outcome, telemetry: Telemetry) -> dict[str, Any]:
    """The content of `report.json`; its keys are described in `docs/report.md`."""
    rl_s = telemetry.phase_s.get("rl", 0.0)
    episodes = {
        status.value: sum(domain.statuses[status] for domain in telemetry.domains.values()) for status in Status
    }
    syncs = telemetry.syncs
    return finite(
        {
            "run": outcome.run,
            "updates": telemetry.update,
            "domains": {name: _delta(delta) for name, delta in outcome.deltas.items()},
            "macro": _delta(outcome.macro),
            "confidence": outcome.confidence,
            "wall_s": {name: telemetry.phase_s.get(name, 0.0) for name in ("setup", "sft", "rl", "eval")},
            "weight_sync": {
                "count": len(syncs),
                "max_logprob_gap": max((sync.gap for sync in syncs), default=None),
                "p50_s": statistics.median(sync.sync_s for sync in syncs) if syncs else None,
                "probe_p50_s": statistics.median(sync.probe_s for sync in syncs) if syncs else None,
            },
            "staleness": {"max": telemetry.staleness_max},
            "episodes": episodes,
            "sandboxes": {
                "created": sum(pool.created for pool in telemetry.pools),
                "leaked": outcome.leaked,
                "exec_p50_ms": telemetry.exec_latencies.quantile_ms(0.5),
                "exec_p95_ms": telemetry.exec_latencies.quantile_ms(0.95),
            },
            "gradient_share": {
                name: statistics.fmean(domain.gradient_share)
                for name, domain in telemetry.domains.items()
                if domain.gradient_share
            },
            "tokens": {"generated": telemetry.generated_tokens, "trained": telemetry.trained_tokens},
            "throughput": {
                "episodes_per_s": sum(episodes.values()) / rl_s if rl_s else None,
                "generated_tokens_per_s": telemetry.generated_tokens / rl_s if rl_s else None,
            },
        }
    )


def write_report(folder: Path, report: Mapping[str, Any], telemetry: Telemetry) -> None:
    """Write the three files into the run's folder. Raises OSError."""
    with atomic_file(folder / "report.json") as file:
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    with atomic_file(folder / "curves.png") as file:
        draw_curves(file, report, telemetry)
    with atomic_file(folder / "report.md") as file:
        file.write_text(markdown(report), encoding="utf-8")


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    level = f"{report['confidence']:.0%}"
    domains = [
        f"| {name} | {_num(d['baseline'])} | {_num(d['final'])} | {_signed(d['delta'])} "
        f"| {_signed(d['delta_ci95'][0])} … {_signed(d['delta_ci95'][1])} | {d['n']} |"
        for name, d in [*report["domains"].items(), ("**macro**", report["macro"])]
    ]
    return "\n".join(
        [
            f"# {report['run']}",
            "",
            f"Pass rate on held-out tasks before and after {report['updates']} updates, paired by task.",
            "",
            f"| domain | before | after | change | {level} interval | tasks |",
            "|---|---|---|---|---|---|",
            *domains,
            "",
            "![Pass rate of training episodes by domain](curves.png)",
            "",
            "| figure | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in _figures(report).items()),
            "",
        ]
    )


def _figures(report: Mapping[str, Any]) -> dict[str, str]:
    """The lower table of the page."""
    wall, sync, boxes = report["wall_s"], report["weight_sync"], report["sandboxes"]
    tokens, rates = report["tokens"], report["throughput"]
    return {
        "wall time": f"set-up {wall['setup']:.0f} s, warm start {wall['sft']:.0f} s, RL {wall['rl']:.0f} s, "
        f"evaluation {wall['eval']:.0f} s",
        "episodes": ", ".join(f"{count} {name}" for name, count in report["episodes"].items()),
        "tokens": f"{tokens['generated']:,} generated, {tokens['trained']:,} trained",
        "throughput": f"{_num(rates['episodes_per_s'], 1)} episodes/s, "
        f"{_num(rates['generated_tokens_per_s'], 0)} generated tokens/s",
        "weight sync": f"{sync['count']} times, median {_ms(sync['p50_s'])}, "
        f"largest log-probability gap {_small(sync['max_logprob_gap'])}",
        "staleness": f"at most {report['staleness']['max']} versions",
        "sandboxes": f"{boxes['created']} made, {boxes['leaked']} leaked, "
        f"exec p50 {_num(boxes['exec_p50_ms'], 1)} ms, p95 {_num(boxes['exec_p95_ms'], 1)} ms",
        "share in the gradient norm": ", ".join(f"{name} {x:.2f}" for name, x in report["gradient_share"].items()),
    }


def draw_curves(path: Path, report: Mapping[str, Any], telemetry: Telemetry, window: int = 10) -> None:
    """A panel a domain: pass rate of training episodes, its running mean, and the held-out rates before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(telemetry.domains)
    columns = min(len(names), 2)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(5.5 * columns, 3.2 * lines + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(lines, columns, place)
        rates = telemetry.domains[name].pass_rate
        steps = range(1, len(rates) + 1)
        axes.plot(steps, rates, color="#9bb7d4", linewidth=0.8, label="training batch")
        axes.plot(steps, _running_mean(rates, window), color="#1f4e79", linewidth=1.8, label=f"mean of {window}")
        delta = report["domains"].get(name)
        if delta and delta["baseline"] is not None:
            ends = (0, max(len(rates), 1))
            axes.plot(ends, (delta["baseline"], delta["final"]), "o", color="#c0504d", label="held-out")
        axes.set_title(name)
        axes.set_xlabel("update")
        axes.set_ylabel("pass rate")
        axes.set_ylim(-0.02, 1.02)
        axes.grid(alpha=0.25)
    named = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _running_mean(values: list[float], window: int) -> list[float]:
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _delta(delta: Delta) -> dict[str, Any]:
    return {
        "baseline": delta.baseline,
        "final": delta.final,
        "delta": delta.delta,
        "delta_ci95": list(delta.interval),
        "n": delta.n,
    }


def _num(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
