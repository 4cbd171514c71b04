"""The gateway's Prometheus metrics, in a registry of its own (two gateways in one process do not mix)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LAG_INTERVAL_S = 0.05
"""Between two measurements of the event loop's lag, the first thing to grow when a gateway is overloaded."""


class Metrics:
    """Everything /metrics shows. Names follow Prometheus' conventions; no label has unbounded values."""

    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.calls = Counter("areal_calls", "Calls by how they ended", ["state"], registry=r)
        self.branches = Counter(
            "areal_call_roots", "Calls that extend no other, by cause", ["cause"], registry=r
        )
        self.tokens = Counter("areal_sampled_tokens", "Tokens the engines sampled", registry=r)
        self.refused = Counter(
            "areal_requests_refused", "Requests answered with an error", ["code"], registry=r
        )
        self.unauthorized = Counter("areal_unauthorized", "Requests with no valid key", ["plane"], registry=r)
        self.retries = Counter("areal_retries", "Retries recognised, by what they got", ["kind"], registry=r)
        self.running = Gauge("areal_calls_running", "Calls in progress", registry=r)
        self.sessions = Gauge("areal_sessions_open", "Sessions open", registry=r)
        self.leases = Counter("areal_leases", "Leases by how they ended", ["end"], registry=r)
        self.lag = Histogram(
            "areal_event_loop_lag_seconds",
            "How late the event loop ran a timer",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1),
            registry=r,
        )
        self.call_seconds = Histogram(
            "areal_call_seconds",
            "Whole calls, in seconds",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=r,
        )
        self.commit_seconds = Histogram(
            "areal_ledger_wait_seconds",
            "Waits for the ledger to be durable",
            buckets=(0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1),
            registry=r,
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)

    async def watch_lag(self) -> None:
        """Runs for ever; the gateway's watchdog owns it."""
        while True:
            due = time.perf_counter() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.lag.observe(max(0.0, time.perf_counter() - due))


class FleetCollector(Collector):
    """What the fleet counts itself, read when somebody looks."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        engines = GaugeMetricFamily("areal_engines", "Engines by state", labels=["state"])
        for state, n in Counts(engine["state"] for engine in status["engines"]).items():
            engines.add_metric([state], n)
        yield engines
        again = CounterMetricFamily(
            "areal_reprefilled_tokens", "Tokens computed a second time, by why", labels=["cause"]
        )
        for cause, n in status.get("reprefilled", {}).items():
            again.add_metric([cause], n)
        yield again
