"""Exporters of a run's events: Prometheus, OpenTelemetry, TensorBoard, Weights & Biases and MLflow.

Each gets the events that a reader has read; the first one also the sums of `run_metrics`. Libraries are imported when
an exporter is made, and each is an extra of the package.
"""

import abc
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringweave.errors import LaunchError, RingweaveError, UsageError, explain
from ringweave.http_servers import ThreadedHttpServer
from ringweave.telemetry.run_metrics import COUNTER, METRICS, RunMetrics

Event = Mapping[str, Any]


class Exporter(abc.ABC):
    """Gets the events of a run in the order of their times."""

    @abc.abstractmethod
    def export(self, events: Sequence[Event]) -> None:
        """Export new events."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write what is left."""


class _MetricsHandler(MetricsHandler):
    """Answers with the metrics, or says why there are none."""

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
        try:
            super().do_GET()
        except RingweaveError as error:
            self.send_error(503, explain=str(error))


class MetricsServer:
    """Serves the metrics of a registry, in a thread."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        """Listen at 127.0.0.1; port 0 takes a free one.

        Raises:
            OSError: The port is taken.
        """
        self._server = ThreadedHttpServer(("127.0.0.1", port), _MetricsHandler.factory(registry))
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrometheusExporter(Exporter):
    """Serves the metrics of a run at /metrics."""

    def __init__(self, metrics: RunMetrics, port: int) -> None:
        """Listen.

        Raises:
            LaunchError: The port is taken.
        """
        registry = CollectorRegistry()
        registry.register(RunCollector(metrics))
        try:
            self._server = MetricsServer(registry, port)
        except OSError as error:
            do = "Choose another one"
            text = explain(
                "port of the metrics", got=port, expected=f"a free one ({error})", do=do, where="--prometheus"
            )
            raise LaunchError(text) from error
        self.port = self._server.port

    def export(self, events: Sequence[Event]) -> None:
        """Do nothing: a scrape reads the sums."""

    def close(self) -> None:
        self._server.close()


class RunCollector(Collector):
    """Hands out the sums at every scrape."""

    def __init__(self, metrics: RunMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, kind in METRICS.items():
            family = CounterMetricFamily if kind.kind == COUNTER else GaugeMetricFamily
            families[name] = family(name, kind.meaning, labels=kind.labels)
        for name, labels, value in list(self._metrics.samples()):
            families[name].add_metric(labels, value)
        yield from families.values()


_STEP_SUMS = ("wall_s", "input_s", "compute_s", "exchange_s", "update_s", "throttled_s", "collections_s")


def scalars(event: Event) -> dict[str, float]:
    """Return the curves that an event adds a point to: seconds of a step of a rank, its memory, a reported loss."""
    rank = event.get("rank")
    if event["kind"] == "steps_measured" and event["steps"]:
        found = {f"rank {rank}/{name.removesuffix('_s')} s": event[name] / event["steps"] for name in _STEP_SUMS}
        return found | {f"rank {rank}/memory bytes": float(event["memory_bytes"])}
    if event["kind"] == "iterations_done" and event["loss"] is not None:
        return {f"rank {rank}/loss": event["loss"]}
    return {}


class CurveExporter(Exporter):
    """Exports points of curves; the train step of a rank is the number of its steps so far."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            if event["kind"] == "steps_measured":
                self._steps[event["rank"]] = self._steps.get(event["rank"], 0) + event["steps"]
            points = scalars(event)
            if points:
                is_reported = event["kind"] == "iterations_done"
                step = event["iterations"] if is_reported else self._steps[event["rank"]]
                self._add_points(points, step, event["time"])

    @abc.abstractmethod
    def _add_points(self, points: Mapping[str, float], step: int, time_s: float) -> None:
        """Add a point to each curve."""


class TensorBoardExporter(CurveExporter):
    """Writes event files for TensorBoard, without torch."""

    def __init__(self, folder: Path) -> None:
        """Open a file in the folder.

        Raises:
            UsageError: tensorboard is not installed.
        """
        super().__init__()
        writer = import_library("tensorboard.summary.writer.event_file_writer", option="--tensorboard", extra="train")
        self._protos = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = writer.EventFileWriter(str(folder))

    def _add_points(self, points: Mapping[str, float], step: int, time_s: float) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._protos.Event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


class WandbExporter(CurveExporter):
    """Logs to Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, project: str, name: str, folder: Path) -> None:
        """Begin a run of that name in the project, with its files in the folder.

        Raises:
            UsageError: wandb is not installed.
        """
        super().__init__()
        library = import_library("wandb", option="--wandb", extra="wandb")
        self._run = library.init(project=project, name=name, dir=str(folder))

    def _add_points(self, points: Mapping[str, float], step: int, time_s: float) -> None:
        # Its own step must not fall, and ranks are at different ones.
        self._run.log({**points, "train step": step, "time": time_s})

    def close(self) -> None:
        self._run.finish()


_MLFLOW_BATCH = 1000
"""Most metrics of a request that MLflow takes."""


class MlflowExporter(CurveExporter):
    """Logs to an MLflow server, or a local store such as sqlite:///mlflow.db."""

    def __init__(self, uri: str, name: str) -> None:
        """Begin a run in the experiment `ringweave`.

        Raises:
            UsageError: mlflow is not installed.
        """
        super().__init__()
        library = import_library("mlflow", option="--mlflow", extra="mlflow")
        self._client = library.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("ringweave")
        experiment = found.experiment_id if found else self._client.create_experiment("ringweave")
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        self._metric, self._points = importlib.import_module("mlflow.entities").Metric, []

    def export(self, events: Sequence[Event]) -> None:
        super().export(events)
        points, self._points = self._points, []
        for first in range(0, len(points), _MLFLOW_BATCH):
            self._client.log_batch(self._run, metrics=points[first : first + _MLFLOW_BATCH])

    def _add_points(self, points: Mapping[str, float], step: int, time_s: float) -> None:
        self._points += [self._metric(name, value, int(time_s * 1e3), step) for name, value in points.items()]

    def close(self) -> None:
        self._client.set_terminated(self._run)


_SPANS = {"steps_measured": ("train steps", "wall_s"), "traffic_measured": ("collectives", "wall_s")}
_RECOVERY_END = "generation_begun"


class TraceExporter(Exporter):
    """Exports spans by OpenTelemetry's SDK: train steps and collectives of each rank by windows, and recoveries.

    A recovery lasts from the loss of a member to the next generation. All spans of a run have one parent.
    """

    def __init__(self, name: str, endpoint: str | None = None, span_exporter: Any = None) -> None:
        """Export to an OTLP endpoint such as http://localhost:4318/v1/traces, or by an exporter of spans.

        Raises:
            UsageError: The SDK is not installed.
        """
        sdk = import_library("opentelemetry.sdk.trace", option="--otel", extra="otel")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        if span_exporter is None:
            path = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
            span_exporter = import_library(path, option="--otel", extra="otel").OTLPSpanExporter(endpoint=endpoint)
        resource = resources.Resource.create({"service.name": "ringweave", "ringweave.run": name})
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(export.BatchSpanProcessor(span_exporter))
        self._tracer, self._trace = (
            self._provider.get_tracer("ringweave"),
            importlib.import_module("opentelemetry.trace"),
        )
        self._name, self._root, self._end_ns = name, None, 0
        self._lost: Event | None = None

    def export(self, events: Sequence[Event]) -> None:
        for event in events:
            end_ns = _nanoseconds(event["time"])
            if self._root is None:
                self._root = self._tracer.start_span(f"run {self._name}", start_time=end_ns)
            self._end_ns = max(self._end_ns, end_ns)
            if event["kind"] in _SPANS:
                name, seconds = _SPANS[event["kind"]]
                self._add_span(name, end_ns - _nanoseconds(event[seconds]), end_ns, event)
            elif event["kind"] == "member_lost":
                self._lost = self._lost or event
            elif event["kind"] == _RECOVERY_END and self._lost is not None:
                attributes = {"member": self._lost["member"], "reason": self._lost["reason"], **event}
                self._add_span("recovery", _nanoseconds(self._lost["time"]), end_ns, attributes)
                self._lost = None

    def _add_span(self, name: str, begin_ns: int, end_ns: int, event: Event) -> None:
        attributes = {
            f"ringweave.{key}": value
            for key, value in event.items()
            if isinstance(value, str | int | float) and key not in ("time", "kind")
        }
        context = self._trace.set_span_in_context(self._root)
        self._tracer.start_span(name, context=context, start_time=begin_ns, attributes=attributes).end(end_time=end_ns)

    def close(self) -> None:
        if self._root is not None:
            self._root.end(end_time=self._end_ns)
        self._provider.shutdown()


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def import_library(module: str, *, option: str, extra: str) -> Any:
    """Import a module of an optional library.

    Raises:
        UsageError: It is not installed; the text names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        do = f"pip install 'ringweave[{extra}]'"
        name = module.partition(".")[0]
        raise UsageError(f"library of {option}", got="none", expected=name, do=do, where=option) from error
