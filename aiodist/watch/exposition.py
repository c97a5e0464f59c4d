"""Publishes the numbers of ranks: Prometheus text over HTTP or in a file, and OTLP. Imports no torch.

docs/metrics.md has the rules for users. `metrics` reads the numbers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Final, NamedTuple

from aiodist.control.thread import forget, guard
from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.threads import OwnThread

_END_SECONDS = 2.0  # longest wait at the end for a scrape or an export

METRICS: Final = {
    "aiodist_rank_up": "1 if the rank has answered, else 0.",
    "aiodist_operations_total": "Operations that the rank has issued.",
    "aiodist_bytes_total": "Bytes of the rank's tensors in operations; of receives, bytes that have arrived.",
    "aiodist_wait_seconds_total": "Seconds that tasks and threads have waited for operations.",
    "aiodist_in_flight_operations": "Operations that are issued and not finished.",
    "aiodist_last_operation_timestamp_seconds": "Unix time of the last issue, to within a second.",
    "aiodist_event_loop_lag_seconds": "Longest delay of a callback of the event loop in the last 15 s.",
    "aiodist_steps_total": "Backwards of a net whose gradients were reduced.",
    "aiodist_step_seconds_total": "Seconds in net.step and net.backward.",
    "aiodist_exposed_reduction_seconds_total": "Seconds of reductions after the end of backward.",
    "aiodist_ps_pushes_total": "Tensors that the rank has pushed.",
    "aiodist_ps_pulls_total": "Tensors that the rank has pulled.",
    "aiodist_ps_push_bytes_total": "Bytes of pushed tensors.",
    "aiodist_ps_pull_bytes_total": "Bytes of pulled tensors.",
    "aiodist_ps_push_seconds_total": "Seconds from the issue of pushes to their end, summed.",
    "aiodist_ps_pull_seconds_total": "Seconds from the issue of pulls to the arrival of the values, summed.",
    "aiodist_ps_applied_pushes_total": "Pushes in the steps of tensors that this server leads.",
    "aiodist_ps_dropped_pushes_total": "Pushes that were dropped as stale.",
    "aiodist_ps_served_reads_total": "Reads of the shards of this server.",
    "aiodist_ps_staleness_versions_total": "Staleness of the applied pushes, in versions, summed.",
}
"""Help by name, in the order of the text. Names with `_total` are counters, and the others gauges."""


class Sample(NamedTuple):
    """One number of one rank."""

    name: str
    value: float
    communicator: str = ""
    kind: str = ""
    """Kind of operation, such as "allreduce"."""

    def labels(self, rank: int) -> dict[str, str]:
        """Return the labels, without empty ones."""
        every = {"rank": str(rank), "communicator": self.communicator, "kind": self.kind}
        return {name: value for name, value in every.items() if value}


class Target(NamedTuple):
    """The place of the metrics, by `aiodist run --metrics` or AIODIST_METRICS. Without port and folder, OTLP alone."""

    host: str = ""
    """Address of the endpoint on rank 0's host, or "" for all addresses."""
    port: int | None = None
    """Port of the endpoint, or 0 for a free one."""
    folder: Path | None = None
    """Folder of a file for each rank."""

    @classmethod
    def parse(cls, text: str, *, otlp: bool) -> Target:
        """Return the target of [HOST:]PORT, "otlp" or a folder. True for `otlp` means that a variable has a receiver.

        Raises `ConfigError` for a wrong target, `BackendUnavailable` if a package is missing.
        """
        host, _, port = text.rpartition(":")
        if text == "otlp":
            if not otlp:
                raise ConfigError("--metrics otlp: expected the receiver in OTEL_EXPORTER_OTLP_ENDPOINT")
            _imported(_EXPORTER, "otlp")
            return cls()
        _imported("prometheus_client", "metrics")
        if not port.isdecimal() or "/" in host:
            return cls(folder=Path(text))
        if int(port) > 65535:
            raise ConfigError(f"--metrics {text}: expected a port up to 65535, a folder, or otlp")
        return cls(host, int(port))


_EXPORTER = "opentelemetry.exporter.otlp.proto.http.metric_exporter"


def _imported(module: str, extra: str) -> Any:  # noqa: ANN401
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise BackendUnavailable(f"--metrics needs {package}: pip install 'aiodist[{extra}]'") from error


class Collector:
    """Makes the metrics of prometheus-client from the numbers of the ranks, at each scrape."""

    def __init__(self, read: Callable[[], Mapping[int, Iterable[Sample]]]) -> None:
        self._read = read
        self.registry = import_module("prometheus_client").CollectorRegistry()
        """The registry with this collector alone."""
        self.registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that have samples."""
        make = import_module("prometheus_client").Metric
        found = {name: make(name.removesuffix("_total"), text, _type_of(name)) for name, text in METRICS.items()}
        for rank, samples in self._read().items():
            for sample in samples:
                found[sample.name].add_sample(sample.name, sample.labels(rank), sample.value)
        yield from (metric for metric in found.values() if metric.samples)

    def write(self, path: Path) -> None:
        """Replace the text in a file in one step, unless the disk refuses."""
        with suppress(OSError):
            import_module("prometheus_client").write_to_textfile(str(path), self.registry)


def _type_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


class MetricsServer(TCPServer):
    """Serves a registry over HTTP in a thread of its own, so that a busy loop delays no scrape."""

    allow_reuse_address = True

    def __init__(self, target: Target, registry: Any) -> None:  # noqa: ANN401
        """Raises `ConfigError` if the port is in use."""
        handler = import_module("prometheus_client").exposition.MetricsHandler.factory(registry)
        handler.timeout = _END_SECONDS  # for a client that sends or reads nothing
        try:
            super().__init__((target.host, target.port or 0), handler)
        except OSError as error:
            why = f"port {target.port} cannot be opened ({error.strerror})"
            raise ConfigError(f"--metrics: {why}: expected a free port, or 0 for any") from error
        guard(self.fileno())
        self._closing = False
        self._thread = OwnThread("aiodist-metrics", self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            self.handle_request()

    def handle_error(self, *_: object) -> None:
        """Ignore a client that has left."""

    def close(self) -> None:
        """End the thread and release the port."""
        self._closing = True
        forget(self.fileno())
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        self._thread.join(_END_SECONDS)
        self.server_close()


class Otlp:
    """Sends the numbers of one rank to the receiver that the standard variables of OpenTelemetry name.

    The thread is our own, and the SDK's reader has none: to the check for stalled ranks, a thread of a library is code
    of the program.
    """

    def __init__(self, rank: int, read: Callable[[], list[Sample]], interval: float) -> None:
        """`interval` is the time between two exports, in seconds. Raises `BackendUnavailable` without the package."""
        exporter = _imported(_EXPORTER, "otlp").OTLPMetricExporter()
        sdk = import_module("opentelemetry.sdk.metrics")
        self._reader = sdk.export.PeriodicExportingMetricReader(exporter, export_interval_millis=inf)
        self._provider = sdk.MeterProvider([self._reader], shutdown_on_exit=False)
        self._rank, self._read, self._interval = rank, read, interval
        self._samples: list[Sample] = []
        meter = self._provider.get_meter("aiodist")
        create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for name, text in METRICS.items():
            plain = name.removesuffix("_total")
            create[_type_of(name)](plain, [partial(self._observe, name)], "s" if "_seconds" in name else "", text)
        self._ended = threading.Event()
        self._thread = OwnThread("aiodist-otlp", self._run)
        self._thread.start()

    def _observe(self, name: str, _: object) -> Iterator[Any]:
        make = import_module("opentelemetry.metrics").Observation
        return (make(one.value, one.labels(self._rank)) for one in self._samples if one.name == name)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(self._interval)
            self._samples = self._read()
            self._reader.collect()

    def close(self) -> None:
        """Send the last numbers, for two seconds at most."""
        self._ended.set()
        self._thread.join(_END_SECONDS)
        self._provider.shutdown()
