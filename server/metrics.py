"""Prometheus metrics: requests of every worker, and what the database holds, read when /metrics is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector

from dash_kernels import __version__
from dashboard.snapshot import Snapshots
from tuner.results.rows import StoreError
from tuner.results.store import Store

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Where workers of one server put their counts together; ``dash-serve --workers`` sets it."""
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class Metrics:
    """Counts and times requests by route (the path's template, so that labels stay few) and status."""

    def __init__(self, store: Store, snapshots: Snapshots) -> None:
        own = CollectorRegistry()
        self.requests = Counter(
            "dash_requests", "Requests answered.", ["method", "route", "status"], registry=own
        )
        self.seconds = Histogram(
            "dash_request_seconds", "Time to answer.", ["route"], buckets=BUCKETS, registry=own
        )
        self._children: dict[tuple[str, str, int], tuple[Any, Any]] = {}
        self.registry = own
        if os.environ.get(SHARED_FOLDER):
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
        self.registry.register(Database(store, snapshots))

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        key = (method, route, status)
        held = self._children.get(key)
        if held is None:
            counter = self.requests.labels(method, route, str(status))
            held = self._children[key] = (counter, self.seconds.labels(route))
        held[0].inc()
        held[1].observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class Database:
    """Rows, releases and whether the database answers; what it does not answer is left out."""

    def __init__(self, store: Store, snapshots: Snapshots) -> None:
        self._store, self._snapshots = store, snapshots

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: the database is not asked when the collector is registered."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        build = GaugeMetricFamily("dash_build_info", "Version of the server.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        up = GaugeMetricFamily("dash_database_up", "1 while the database answers.")
        rows = GaugeMetricFamily("dash_rows", "Rows stored.", labels=["gpu", "source", "status"])
        last = GaugeMetricFamily("dash_last_result_id", "Id of the newest row.")
        releases = GaugeMetricFamily(
            "dash_release_info",
            "The newest release of a GPU; its value is its number.",
            labels=["gpu", "release", "digest"],
        )
        try:
            for key, number in sorted(self._snapshots.counts().items()):
                rows.add_metric(list(key), number)
            last.add_metric([], self._store.last_result_id())
            newest = {release.gpu: release for release in reversed(self._store.releases())}
            for gpu, release in sorted(newest.items()):
                labels = [gpu, release.name, release.digest[:12]]
                releases.add_metric(labels, release.id or 0)
            up.add_metric([], 1)
        except StoreError:
            up.add_metric([], 0)
        yield from (up, rows, last, releases)
