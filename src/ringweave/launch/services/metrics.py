"""Jobs of a place as Prometheus metrics, looked up anew for every request."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringweave.errors import LaunchError
from ringweave.jobs.life.states import JobState
from ringweave.launch.services.service import Service
from ringweave.launch.services.views import JobView, NodeView

_OF_A_JOB = ("place", "job", "requester")


class JobsCollector(Collector):
    """Looks at every scrape, so that metrics are never older than what `ringweave jobs` says."""

    def __init__(self, look: Callable[[], Sequence[JobView]]) -> None:
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """All metrics of all jobs that are seen."""
        yield from metrics_of(self._look())


def metrics_of(found: Sequence[JobView]) -> Iterator[Metric]:
    """The metrics of these jobs. Pure."""
    state = GaugeMetricFamily(
        "ringweave_job_state", "1 for the state that the job is in.", labels=(*_OF_A_JOB, "state")
    )
    rows = {
        "ringweave_job_workers": ("Workers that the job asks for in all.", lambda job: job.workers),
        "ringweave_job_rounds": ("How often all nodes were gathered at the gate.", lambda job: job.round),
        "ringweave_job_created_timestamp_seconds": ("When it was submitted.", lambda job: job.created_s),
        "ringweave_job_state_timestamp_seconds": ("When it came into its state.", lambda job: job.since_s),
    }
    of_jobs = {name: GaugeMetricFamily(name, text, labels=_OF_A_JOB) for name, (text, _) in rows.items()}
    for job in found:
        labels = (job.place, job.name, job.requester)
        for each in JobState:
            state.add_metric((*labels, str(each)), float(job.state is each))
        for name, (_, value) in rows.items():
            of_jobs[name].add_metric(labels, float(value(job)))
    yield state
    yield from of_jobs.values()
    yield from _of_nodes(found)


def text_of(found: Sequence[JobView]) -> str:
    """The metrics of these jobs in Prometheus' text format."""
    return generate_latest(_registry(lambda: found)).decode()


def serve(service: Service, port: int) -> int:
    """Serve /metrics at 127.0.0.1 until SIGINT or SIGTERM; the exit code.

    Raises:
        LaunchError: The port cannot be had.
    """
    ended = threading.Event()
    for how in (signal.SIGINT, signal.SIGTERM):
        signal.signal(how, lambda *_: ended.set())
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=_registry(service.jobs))
    except OSError as error:
        raise LaunchError(f"metrics: port {port} cannot be had ({error}). Give another. [--serve-metrics]") from error
    try:
        ended.wait()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


def _registry(look: Callable[[], Sequence[JobView]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JobsCollector(look))
    return registry


def _of_nodes(found: Sequence[JobView]) -> Iterator[Metric]:
    rows = {
        "ringweave_node_workers": ("Workers of the node.", _workers),
        "ringweave_node_retries": ("Replacements after failures of its own in this run.", _retries),
        "ringweave_node_iterations": ("Training steps done, as last reported.", _iterations),
        "ringweave_node_last_loss": ("The last loss reported.", _last_loss),
    }
    for name, (text, value) in rows.items():
        family = GaugeMetricFamily(name, text, labels=(*_OF_A_JOB, "node"))
        for job in found:
            for node in job.used_nodes:
                measured = value(node)
                if measured is not None:
                    family.add_metric((job.place, job.name, job.requester, node.name), float(measured))
        yield family


def _workers(node: NodeView) -> float:
    return node.workers


def _retries(node: NodeView) -> float:
    return node.retries


def _iterations(node: NodeView) -> float | None:
    return node.iterations


def _last_loss(node: NodeView) -> float | None:
    return node.last_loss
