"""Prometheus metrics of the jobs of a platform, as they were a second ago at most where a list of them is cheap."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringweave.errors import LaunchError, RingweaveError
from ringweave.jobs.states import JobState
from ringweave.platforms.api import JobView, Platform
from ringweave.telemetry.exporters import MetricsServer

_JOB_LABELS = ("platform", "job", "requester")
_FRESH_S = 1.0
_FRESH_PER_COST = 9.0
"""A list of the jobs is fresh for that many times the time that it took: lists take a tenth of the time at most."""
_Answer = TypeVar("_Answer")


class SharedAnswer(Generic[_Answer]):
    """Answer to a costly question that anybody may ask: all share it while it is fresh, also if it is an error.

    Its owner has the lock, of threads or of asyncio, under which it is read and renewed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._fresh_until_s = clock, -math.inf
        self._answers: list[_Answer] = []
        self._error: RingweaveError | None = None

    @property
    def is_fresh(self) -> bool:
        return self._clock() < self._fresh_until_s

    @contextmanager
    def renewing(self) -> Iterator[Callable[[_Answer], None]]:
        """Yield a function that takes the answer; an error of the block is the answer else."""
        begun_s, answers = self._clock(), list[_Answer]()
        try:
            yield answers.append
        except RingweaveError as error:
            self._answers, self._error = [], error
        else:
            self._answers, self._error = answers, None
        now_s = self._clock()
        self._fresh_until_s = now_s + max(_FRESH_S, _FRESH_PER_COST * (now_s - begun_s))

    def get(self) -> _Answer:
        """Return the last answer.

        Raises:
            RingweaveError: There was no other answer.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answers[0]


class JobsCollector(Collector):
    """Lists the jobs for scrapes; those that come soon after another one, or at the same time, share its list."""

    def __init__(self, list_jobs: Callable[[], Sequence[JobView]], clock: Callable[[], float] = time.monotonic) -> None:
        self._list_jobs, self._lock = list_jobs, threading.Lock()
        self._found: SharedAnswer[Sequence[Metric]] = SharedAnswer(clock)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if not self._found.is_fresh:
                with self._found.renewing() as answer:
                    answer(tuple(job_metrics(self._list_jobs())))
            found = self._found.get()
        yield from found


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
