"""Prometheus metrics of the jobs of a platform, looked up anew for every request."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringweave.errors import LaunchError
from ringweave.jobs.states import JobState
from ringweave.platforms.api import JobView, Platform
from ringweave.telemetry.exporters import MetricsServer

_JOB_LABELS = ("platform", "job", "requester")


class JobsCollector(Collector):
    """Lists the jobs at every scrape, so that metrics are as fresh as `ringweave jobs`."""

    def __init__(self, list_jobs: Callable[[], Sequence[JobView]]) -> None:
        self._list_jobs = list_jobs

    def collect(self) -> Iterator[Metric]:
        yield from job_metrics(self._list_jobs())


def job_metrics(found: Sequence[JobView]) -> Iterator[Metric]:
    """Yield the metrics of these jobs. Pure."""
    state = GaugeMetricFamily(
        "ringweave_job_state", "1 for the current state of the job.", labels=(*_JOB_LABELS, "state")
    )
    rows = {
        "ringweave_job_workers": ("Total number of workers of the job.", lambda job: job.workers),
        "ringweave_job_rounds": (
            "Number of rounds: 1, and one more for each restart of all nodes.",
            lambda job: job.round,
        ),
        "ringweave_job_created_timestamp_seconds": ("Time of submission.", lambda job: job.created_s),
        "ringweave_job_state_timestamp_seconds": ("Time of the last change of state.", lambda job: job.since_s),
    }
    of_jobs = {name: GaugeMetricFamily(name, text, labels=_JOB_LABELS) for name, (text, _) in rows.items()}
    for job in found:
        labels = (job.platform, job.name, job.requester)
        for each in JobState:
            state.add_metric((*labels, str(each)), float(job.state is each))
        for name, (_, value) in rows.items():
            of_jobs[name].add_metric(labels, float(value(job)))
    yield state
    yield from of_jobs.values()
    yield from _node_metrics(found)


def metrics_text(found: Sequence[JobView]) -> str:
    """Return the metrics of these jobs in Prometheus' text format."""
    return generate_latest(_collector_registry(lambda: found)).decode()


def serve_metrics(platform: Platform, port: int) -> int:
    """Serve /metrics at 127.0.0.1 until SIGINT or SIGTERM; return the exit code.

    Raises:
        LaunchError: The port cannot be used.
    """
    ended = threading.Event()
    for how in (signal.SIGINT, signal.SIGTERM):
        signal.signal(how, lambda *_: ended.set())
    try:
        server = MetricsServer(_collector_registry(platform.jobs), port)
    except OSError as error:
        raise LaunchError(
            f"metrics: port {port} is not available ({error}). Choose another one. [--serve-metrics]"
        ) from error
    try:
        ended.wait()
    finally:
        server.close()
    return 0


def _collector_registry(list_jobs: Callable[[], Sequence[JobView]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JobsCollector(list_jobs))
    return registry


def _node_metrics(found: Sequence[JobView]) -> Iterator[Metric]:
    rows = {
        "ringweave_node_workers": ("Workers of the node.", lambda node: node.workers),
        "ringweave_node_retries": ("Replacements in this run after failures of this node.", lambda node: node.retries),
        "ringweave_node_iterations": ("Train steps done, as last reported.", lambda node: node.iterations),
        "ringweave_node_last_loss": ("Last reported loss.", lambda node: node.last_loss),
    }
    for name, (text, value) in rows.items():
        family = GaugeMetricFamily(name, text, labels=(*_JOB_LABELS, "node"))
        for job in found:
            for node in job.used_nodes:
                measured = value(node)
                if measured is not None:
                    family.add_metric((job.platform, job.name, job.requester, node.name), float(measured))
        yield family
