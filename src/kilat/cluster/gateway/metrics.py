"""The gateway's metrics, and the workers' as their last Status told them, in Prometheus' text form."""

import asyncio
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kilat.base import metrics as names
from kilat.cluster.gateway.fleet import Fleet

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOTAL = "_total"


class GatewayMetrics:
    """Counters that request handlers write. ``worker_restarts`` is written by the supervisor, ``workers_wished`` (0: nobody knows) by
    whoever moves shares, ``requests_open`` is asked."""

    def __init__(self, fleet: Fleet, requests_open: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.worker_restarts = 0
        self.workers_wished = 0
        self._fleet = fleet
        self._requests_open = requests_open
        self._requests = Counter(
            names.REQUESTS,
            "HTTP requests by route and status",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._ttft = Histogram(
            names.TTFT,
            "From the arrival of a request to its first token",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self._tpot = Histogram(
            names.TPOT, "Mean time per token after the first", registry=self.registry, buckets=_TOKEN_SECONDS
        )
        self._seconds = Histogram(
            names.REQUEST_SECONDS,
            "From the arrival of a request to its end",
            registry=self.registry,
            buckets=_SECONDS,
        )
        ProcessCollector(registry=self.registry)
        self.registry.register(_Asked(self))

    def answered(self, route: str, method: str, status: int) -> None:
        """One HTTP request got its status."""
        self._requests.labels(route, method, str(status)).inc()

    def generated(self, *, total_s: float, ttft_s: float | None, tpot_s: float | None) -> None:
        """One generation has ended, well or not; None for what did not happen."""
        self._seconds.observe(total_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)

    def text(self) -> bytes:
        """The exposition, of now."""
        return generate_latest(self.registry)

    def asked(self) -> Iterator[tuple[str, float]]:
        """(name, value) of what is looked up when somebody asks."""
        fleet = self._fleet
        yield names.REQUESTS_OPEN, self._requests_open()
        yield names.SESSIONS_OPEN, len(fleet.table)
        yield names.STALE_EVENTS, fleet.table.stale_events
        yield names.SLOW_READERS, fleet.table.slow_readers
        yield names.BAD_FRAMES, fleet.links.bad_frames
        yield names.WORKER_UP, float(sum(w.hello is not None for w in fleet.workers))
        yield names.WORKER_RESTARTS, self.worker_restarts
        yield names.WORKERS_WISHED, self.workers_wished
        yield names.GATEWAY_TASKS, len(asyncio.all_tasks())
        yield names.MOVES_OPEN, len(fleet.dispatcher.moves)
        yield from fleet.dispatcher.counts.items()
        yield from fleet.workers.counters().items()
        yield from fleet.workers.gauges().items()

    def by_worker(self) -> Iterator[tuple[str, str, float]]:
        """(name, worker, value) of what each worker says of itself: the name of the sum, with ``worker`` in it."""
        for w in self._fleet.workers:
            yield names.WORKER_PREFILL_WEIGHT, w.name, w.prefill_weight
            yield names.WORKER_DECODE_WEIGHT, w.name, w.decode_weight
            if w.status is not None:
                for name, value in (*w.status.counters.items(), *w.status.gauges.items()):
                    yield name.replace("kilat_", "kilat_worker_", 1), w.name, value


class _Asked(Collector):
    """Adapter: values that live elsewhere, as Prometheus' families."""

    def __init__(self, source: GatewayMetrics) -> None:
        self._source = source

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in self._source.asked():
            if name.endswith(_TOTAL):
                yield CounterMetricFamily(name.removesuffix(_TOTAL), name, value=value)
            else:
                yield GaugeMetricFamily(name, name, value=value)
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, worker, value in self._source.by_worker():
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith(_TOTAL) else GaugeMetricFamily
                family = families[name] = kind(name.removesuffix(_TOTAL), name, labels=["worker"])
            family.add_metric([worker], value)
        yield from families.values()
