"""What is known of a run: counters, the report, the live table, the metrics endpoint, and their restoration."""

import asyncio
import contextlib
import io
import json
import math
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.config import MetricsConfig
from orchestrator.errors import SpecError
from orchestrator.run.batch import BatchBuilder
from orchestrator.run.evaluation import DomainScores, macro_delta, paired_delta
from orchestrator.run.events import EventLog
from orchestrator.run.live import LiveView
from orchestrator.run.prometheus import MetricsServer
from orchestrator.run.report import Outcome, build_report, write_report
from orchestrator.run.telemetry import SyncRecord, Telemetry, UpdateRecord
from reward.score import Score, Status
from rollout_workers.engines.base import EngineStats
from rollout_workers.types import Episode
from sandboxes.latency import Latencies
from sandboxes.pool import PoolStats
from trainer.metrics import StepMetrics


def episode(domain: str, reward: float, error: str = "") -> Episode:
    score = Score.infra_error(error) if error else Score({}, reward, reward == 1.0, Status.OK)
    return Episode("e", domain, "t", (9, 1, 1), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (), score, 0.1)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with contextlib.closing(EventLog(tmp_path)) as log:
        yield log


def filled(log: EventLog, updates: int = 3) -> Telemetry:
    telemetry = Telemetry(["math", "code"], log)
    telemetry.enter("setup")
    telemetry.enter("rl")
    telemetry.begin_rl(0, 10)
    builder = BatchBuilder({"math": 1.0, "code": 1.0}, deviation_memory=4)
    for index in range(updates):
        groups = {name: [[episode(name, 0.0), episode(name, 1.0)]] for name in ("math", "code")}
        telemetry.played([e for rows in groups.values() for group in rows for e in group])
        metrics = StepMetrics(0.5, 1.0, 1e-3, 1, {}, {"math": 0.4, "code": 0.6}, {}, [0.1], 0.1)
        telemetry.updated(UpdateRecord(index, {"math": 1, "code": 1}, builder.build(index, groups), metrics, 0.2, 0.1))
        telemetry.synced(SyncRecord(index + 1, 0.05, 0.02, 1e-6 * (index + 1)))
    telemetry.played([episode("code", 0.0, "the verifier hung")])
    latencies = Latencies()
    for milliseconds in range(1, 101):
        latencies.observe(milliseconds / 1e3)
    telemetry.observe([EngineStats(10, 20, 5, 1, 0)], [PoolStats(created=4, idle=3, leased=1)], [latencies])
    return telemetry


def outcome() -> Outcome:
    before, after = DomainScores({"a": False, "b": False}, {}), DomainScores({"a": True, "b": False}, {})
    deltas = {name: paired_delta(before, after, 0.95) for name in ("math", "code")}
    return Outcome("job-1", deltas, macro_delta(list(deltas.values()), 0.95), 0.95, leaked=0)


def test_the_report_has_every_promised_key(log: EventLog) -> None:
    report = build_report(outcome(), filled(log))
    assert report["episodes"] == {"ok": 12, "policy_failure": 0, "truncated": 0, "infra_error": 1}
    assert report["domains"]["math"]["baseline"] == 0.0 and report["domains"]["math"]["final"] == 0.5
    assert set(report["macro"]) >= {"baseline", "final", "delta_ci95"}
    assert report["updates"] == 3
    assert set(report["wall_s"]) == {"setup", "sft", "rl", "eval"}
    assert report["weight_sync"]["count"] == 3 and report["weight_sync"]["max_logprob_gap"] == pytest.approx(3e-6)
    assert report["staleness"]["max"] == 2  # the tokens above are of version 0
    assert report["sandboxes"]["created"] == 4 and report["sandboxes"]["leaked"] == 0
    assert report["sandboxes"]["exec_p50_ms"] == pytest.approx(50, rel=0.03)
    assert report["gradient_share"] == pytest.approx({"math": 0.4, "code": 0.6})
    assert report["tokens"] == {"generated": 26, "trained": 24}
    assert set(report["throughput"]) == {"episodes_per_s", "generated_tokens_per_s"}
    json.dumps(report, allow_nan=False)


def test_the_files_are_written_and_the_page_names_every_domain(tmp_path: Path, log: EventLog) -> None:
    telemetry = filled(log)
    write_report(tmp_path, build_report(outcome(), telemetry), telemetry)
    page = (tmp_path / "report.md").read_text()
    assert "| math | 0.00 | 0.50 | +0.50 |" in page and "curves.png" in page
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "report.json").read_text())["run"] == "job-1"


def test_history_is_kept_line_by_line(tmp_path: Path, log: EventLog) -> None:
    filled(log)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3]
    assert lines[0]["domains"]["math"]["quota"] == lines[0]["domains"]["math"]["groups"] == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {"kind": "infra_error", "episode": "e", "detail": "the verifier hung"}.items() <= events[-1].items()


def test_a_restored_telemetry_goes_on_where_the_run_was(log: EventLog) -> None:
    first = filled(log)
    state = json.loads(json.dumps(first.state_dict()))
    second = Telemetry(["math", "code"], log)
    second.load_state_dict(state)
    assert second.update == 3
    assert second.generated_tokens == first.generated_tokens
    assert second.domains["code"].statuses == first.domains["code"].statuses
    assert second.syncs == first.syncs
    assert second.phase_seconds()["rl"] >= state["phase_s"]["rl"]


@pytest.mark.parametrize("phase", ["setup", "sft", "eval", "rl", "done"])
def test_the_live_table_shows_each_phase(phase: str, log: EventLog) -> None:
    telemetry = filled(log)
    telemetry.supervised(3, 10)
    telemetry.enter(phase)
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    view = LiveView(console, telemetry)
    console.print(view.render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    if phase == "rl":
        titles = ("reward", "pass rate", "tokens", "staleness", "quota")
        for word in ("math", "code", *titles, "update 3/10", "left", "tokens/s", "sync", "p95"):
            assert word in text
        assert "math 0.50" in view.line()


async def test_without_a_terminal_lines_are_printed(log: EventLog) -> None:
    console = Console(file=io.StringIO(), width=200)
    view = LiveView(console, filled(log))
    async with view.running():
        await asyncio.sleep(0.7)
    assert "update 3/10" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_endpoint_serves_the_telemetry(log: EventLog) -> None:
    with MetricsServer(MetricsConfig(), filled(log)) as server, urllib.request.urlopen(server.url) as answer:  # noqa: S310 (our own address)
        text = answer.read().decode()
    assert 'crosstrain_episodes_total{domain="code",status="infra_error"} 1.0' in text
    assert 'crosstrain_pass_rate{domain="math"} 0.5' in text
    assert "crosstrain_parity_gap_max_nats 3e-06" in text
    assert "crosstrain_sandboxes_created_total 4.0" in text


def test_a_port_in_use_is_named_with_the_remedy(log: EventLog) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(SpecError, match=rf"metrics\.port = {port} .*choose another"),
            MetricsServer(MetricsConfig(port=port), filled(log)),
        ):
            pass


def test_time_left_is_unknown_before_the_first_update(log: EventLog) -> None:
    telemetry = Telemetry(["math"], log)
    telemetry.enter("rl")
    telemetry.begin_rl(5, 10)
    assert telemetry.time_left_s() is None
    assert telemetry.update == 5


def test_nothing_measured_is_null_and_not_zero(tmp_path: Path, log: EventLog) -> None:
    telemetry = Telemetry(["math"], log)
    nothing = paired_delta(DomainScores({}, {}), DomainScores({}, {}), 0.95)
    report = build_report(Outcome("r", {"math": nothing}, macro_delta([nothing], 0.95), 0.95, 0), telemetry)
    assert report["macro"]["delta"] is None and report["sandboxes"]["exec_p50_ms"] is None
    assert math.isnan(nothing.delta)
    write_report(tmp_path, report, telemetry)
