"""`/metrics` of a run, read off the telemetry at each scrape, so that no figure is kept twice.

Label values come from closed sets (domains of the job, statuses), so cardinality is bounded by the job file.
"""

from collections.abc import Iterable
from threading import Thread
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orchestrator.config import MetricsConfig
from orchestrator.errors import SpecError
from orchestrator.run.telemetry import Telemetry
from reward.score import Status


class TelemetryCollector(Collector):
    """Turns the telemetry into metric families."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        """All families; called by the registry at each scrape, in the server's thread."""
        telemetry = self._telemetry
        yield _gauge("updates", "Policy version of the trainer.", telemetry.update)
        yield _gauge("updates_total_planned", "Policy version at which the run ends.", telemetry.total_updates)
        yield _gauge("staleness_max", "Largest age of a trained token in versions.", telemetry.staleness_max)
        yield from self._domains()
        yield from self._syncs()
        yield from self._processes()

    def _domains(self) -> Iterable[Metric]:
        episodes = CounterMetricFamily(
            "crosstrain_episodes", "Episodes by domain and status.", labels=["domain", "status"]
        )
        generated = CounterMetricFamily("crosstrain_generated_tokens", "Policy tokens generated.", labels=["domain"])
        trained = CounterMetricFamily("crosstrain_trained_tokens", "Policy tokens in the loss.", labels=["domain"])
        series = {
            name: GaugeMetricFamily(f"crosstrain_{name}", text, labels=["domain"])
            for name, text in (
                ("pass_rate", "Share of passed episodes in the last batch."),
                ("reward", "Mean total reward in the last batch, on [0, 1]."),
                ("gradient_share", "Share in the sum of the domains' gradient norms of the last update."),
            )
        }
        quota = GaugeMetricFamily("crosstrain_quota_groups", "Groups in the last batch.", labels=["domain"])
        for name, domain in self._telemetry.domains.items():
            for status in Status:
                episodes.add_metric([name, status.value], domain.statuses[status])
            generated.add_metric([name], domain.generated_tokens)
            trained.add_metric([name], domain.trained_tokens)
            for key, family in series.items():
                values = getattr(domain, key)
                if values:
                    family.add_metric([name], values[-1])
        last = self._telemetry.last
        for name, groups in (last.quota if last else {}).items():
            quota.add_metric([name], groups)
        yield from (episodes, generated, trained, quota, *series.values())

    def _syncs(self) -> Iterable[Metric]:
        syncs = list(self._telemetry.syncs)
        yield _counter("weight_syncs", "Weight updates of engines.", len(syncs))
        if syncs:
            yield _gauge("weight_sync_seconds", "Seconds of the last weight update.", syncs[-1].sync_s)
            yield _gauge("parity_gap_nats", "Largest log-probability difference at the last probe.", syncs[-1].gap)
            yield _gauge("parity_gap_max_nats", "Largest of the run.", max(sync.gap for sync in syncs))

    def _processes(self) -> Iterable[Metric]:
        pools, engines = self._telemetry.pools, self._telemetry.engines
        yield _gauge("sandboxes_leased", "Sandboxes in use.", sum(pool.leased for pool in pools))
        yield _gauge("sandboxes_idle", "Sandboxes ready for a lease.", sum(pool.idle for pool in pools))
        yield _counter("sandboxes_created", "Sandboxes made.", sum(pool.created for pool in pools))
        yield _gauge("engine_running_requests", "Requests that engines advance now.", sum(e.running for e in engines))
        yield _gauge("engine_waiting_requests", "Requests queued in engines.", sum(e.waiting for e in engines))
        yield _counter("engine_prompt_tokens", "Tokens read by engines.", sum(e.prompt_tokens for e in engines))
        yield _counter(
            "engine_cached_prompt_tokens",
            "Of them, found in a prefix cache.",
            sum(e.cached_prompt_tokens for e in engines),
        )
        for quantile in (0.5, 0.95):
            if self._telemetry.exec_latencies.count:
                seconds = self._telemetry.exec_latencies.quantile_ms(quantile) / 1e3
                yield _gauge(
                    f"sandbox_exec_p{quantile * 100:.0f}_seconds", "Duration of commands in sandboxes.", seconds
                )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"crosstrain_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"crosstrain_{name}", text, value=value)


class MetricsServer:
    """Serves `/metrics` from a thread while it is entered."""

    def __init__(self, config: MetricsConfig, telemetry: Telemetry) -> None:
        self._config = config
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(TelemetryCollector(telemetry))
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        assert self._server is not None
        return f"http://{self._config.host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        """Start. Raises `SpecError` when the address cannot be had."""
        try:
            self._server, self._thread = start_http_server(self._config.port, self._config.host, self._registry)
        except OSError as error:
            raise SpecError(
                f"metrics.port = {self._config.port} on metrics.host = {self._config.host!r} cannot be had "
                f"({error.strerror}); choose another, or 0 for any free port"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None and self._thread is not None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
