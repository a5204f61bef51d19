"""Exporters of events: a real Prometheus, OpenTelemetry's SDK, TensorBoard, Weights & Biases and MLflow."""

import importlib.util
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave import telemetry
from ringweave.cli import export, main
from ringweave.cli.export import ExportedEvents, follow_run
from ringweave.errors import LaunchError, UsageError
from ringweave.jobs.states import JobState
from ringweave.launcher.node_context import free_port
from ringweave.page import run_source
from ringweave.page.run_source import JobReader
from ringweave.platforms.api import LogLine
from ringweave.telemetry import exporters
from ringweave.telemetry.run_metrics import COUNTER, METRICS, RunMetrics
from tests.ending import ended
from tests.page import synthetic
from tests.page.test_run_model import OtherPlatform, event_lines
from tests.polling import wait_until
from tests.telemetry.examples import example
from tests.telemetry.test_verdict import traffic, window

NUM_RANKS = 8
MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"


def needs(module: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(module.partition(".")[0]) is None
    return pytest.mark.skipif(is_missing, reason=f"{module} is not installed")


def run_events() -> list[dict[str, Any]]:
    """A run of eight ranks in a ring, with everything that has a metric."""
    events: list[dict[str, Any]] = [
        example("training_prepared", time=0.0, shares=list(range(1, NUM_RANKS + 1))),
        example("generation_begun", time=0.1, members=["0.0"], term=1, number=1),
    ]
    for number in range(3):
        events += [window(rank, number, exchange_s=1.5 + 0.1 * rank) for rank in range(NUM_RANKS)]
        events += [traffic(rank, number, {str((rank + 1) % NUM_RANKS): 10.0 + rank}) for rank in range(NUM_RANKS)]
    row = {"collectives": 5, "bytes": 640, "messages": 1}
    events += [
        {"time": 31.0, "kind": "collectives", "rank": 1, "group": "0", "by_schedule": {"ring": row}},
        example("iterations_done", time=31.0, rank=0, iterations=300, loss=0.25),
        {"time": 32.0, "kind": "member_lost", "member": "3.0", "reason": "it is gone", "term": 1},
        example("generation_begun", time=33.5, members=["0.0"], term=1, number=2),
        example("params_counted", time=33.6, staleness={"0": 7, "2": 1}),
        example("worker_exited", time=33.7, rank=3, stopped=False, signal="SIGKILL", exit_code=None),
    ]
    return sorted(events, key=lambda event: event["time"])


def write_events(folder: Path, events: list[dict[str, Any]]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


class KeptEvents(exporters.Exporter):
    """Keeps the events that it gets."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.most_at_once = 0

    def export(self, events: Any) -> None:
        self.seen.extend(events)
        self.most_at_once = max(self.most_at_once, len(events))

    def close(self) -> None: ...


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path) -> None:
    events = run_events()
    write_events(tmp_path, events[:10])
    metrics, target, sleeps, service = RunMetrics(), KeptEvents(), [], OtherPlatform("local", str(tmp_path))

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        write_events(tmp_path, events)
        if len(sleeps) > 1:
            service.view = replace(service.view, state=JobState.SUCCEEDED)

    reader = JobReader(service, "job", clock=map(float, itertools.count(0, 60)).__next__)
    follow_run(reader, metrics, [target], sleep)
    assert target.seen == events
    assert metrics.by_rank()["7"]["steps"] == 300


def test_however_much_there_is_to_catch_up_with_few_events_are_in_memory(tmp_path: Path) -> None:
    """Also those of several nodes come by their times: waits are told from communication by those of all ranks."""
    for rank in range(2):
        folder = tmp_path / f"n{rank}" / "1" / "round-1"
        folder.mkdir(parents=True)
        windows = [window(rank, number, exchange_s=1.0 + rank) for number in range(3 * export.MAX_BATCH)]
        write_events(folder, [{**each, "time": 10.0 * number + rank} for number, each in enumerate(windows)])
    metrics, target = RunMetrics(), KeptEvents()
    reader = JobReader(OtherPlatform("local", str(tmp_path), JobState.SUCCEEDED), "job")
    follow_run(reader, metrics, [target])
    times = [event["time"] for event in target.seen]
    assert len(times) == 6 * export.MAX_BATCH
    assert times == sorted(times)
    assert target.most_at_once <= export.MAX_BATCH
    waits = {rank: row["wait_s"] for rank, row in metrics.by_rank().items()}
    assert waits == {"0": 0.0, "1": 3.0 * export.MAX_BATCH}


def test_a_log_that_cannot_be_read_keeps_nothing_of_the_others_back(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"n{rank}" / "1" / "round-1"
        folder.mkdir(parents=True)
        write_events(folder, [window(rank, number) for number in range(3)])
    broken = tmp_path / "n1" / "1" / "round-1" / "events.jsonl"
    broken.unlink()
    broken.mkdir()
    metrics, target = RunMetrics(), KeptEvents()
    exported = ExportedEvents(metrics, [target])
    reader = JobReader(OtherPlatform("local", str(tmp_path), JobState.RUNNING), "job")
    with pytest.raises(IsADirectoryError):
        reader.feed(exported)
    exported.export()
    assert [event["rank"] for event in target.seen] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.e2e
def test_sigterm_ends_an_export_also_where_sigint_is_ignored(tmp_path: Path) -> None:
    run, curves = synthetic.write_run(tmp_path / "run", 2, 100, outcome="done"), tmp_path / "curves"
    words = ["export", str(run), "--prometheus", "0", "--tensorboard", str(curves), "--keep-serving"]
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-m", "ringweave", *words]
    with ended(subprocess.Popen(command, text=True)) as process:
        wait_until(lambda: any(curves.glob("*")) or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        process.terminate()
        assert process.wait(300) == 0


class InterruptedExporter(exporters.Exporter):
    """A signal comes while it works."""

    num_whole = num_closed = 0
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)

    def export(self, events: Sequence[dict[str, Any]]) -> None:
        for each in self.signals:
            signal.raise_signal(each)
        self.num_whole += 1

    def close(self) -> None:
        self.num_closed += 1


def test_a_signal_interrupts_no_exporter_at_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in the midst of it could leave one of its locks held, and its end would wait for ever."""
    target = InterruptedExporter()
    monkeypatch.setattr(exporters, "TensorBoardExporter", lambda folder: target)
    run = synthetic.write_run(tmp_path / "run", 2, 2 * export.MAX_BATCH, outcome="done")
    assert main.run_command_line(["export", str(run), "--tensorboard", str(tmp_path / "curves")]) == 0
    assert (target.num_whole, target.num_closed) == (1, 1)


def test_a_second_ctrl_c_does_not_wait_for_an_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = InterruptedExporter()
    target.signals = (signal.SIGINT, signal.SIGINT)
    monkeypatch.setattr(exporters, "TensorBoardExporter", lambda folder: target)
    run, before = synthetic.write_run(tmp_path / "run", 2, 100, outcome="done"), signal.getsignal(signal.SIGINT)
    assert main.run_command_line(["export", str(run), "--tensorboard", str(tmp_path / "curves")]) == 1
    assert (target.num_whole, target.num_closed) == (0, 1)
    assert signal.getsignal(signal.SIGINT) is before


def last_round(lines: list[LogLine]) -> list[dict[str, Any]]:
    found = [telemetry.parse_event(line.text.encode()) for line in lines if line.round == 2]
    return sorted((event for event in found if event), key=lambda event: (event["time"], str(event)))


@pytest.mark.parametrize("platform", ["hosts", "kubernetes"])
def test_a_job_whose_events_are_elsewhere_is_exported_once_whatever_connections_break(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_source, "RETRY_S", 0.01)
    service, metrics, target = OtherPlatform(platform, ""), RunMetrics(), KeptEvents()
    service.event_lines, service.num_failures = event_lines(), 3
    follow_run(JobReader(service, "job"), metrics, [target], lambda _: time.sleep(0.01))
    assert sorted(target.seen[1:], key=lambda event: (event["time"], str(event))) == last_round(service.event_lines)
    assert {rank: row["steps"] for rank, row in metrics.by_rank().items()} == dict.fromkeys("0123", 200)


def test_what_a_stream_lacks_of_a_run_on_hosts_comes_from_its_files(tmp_path: Path) -> None:
    lines, folder = [line for line in event_lines() if line.round == 2], tmp_path / "out"
    lines.insert(5, replace(lines[0], text="{"))
    synthetic.write_run(folder, 4, 100, outcome="done", per_node=2)
    (folder / "events.jsonl").unlink()
    for node in ("n0", "n1"):
        log = folder / "hosts" / "a" / node / "1" / "round-2" / "events.jsonl"
        log.parent.mkdir(parents=True)
        log.write_text("".join(f"{line.text}\n" for line in lines if line.node == node))
    service, metrics, target = OtherPlatform("hosts", str(folder)), RunMetrics(), KeptEvents()
    of_n1 = [line for line in lines if line.node == "n1"]
    service.event_lines, reader = [*lines[:12], *of_n1[:6]], JobReader(service, "job")
    exported = ExportedEvents(metrics, [target])
    reader.follow_logs(events_only=True)
    wait_until(lambda: (reader.feed(exported), exported.export(), len(target.seen) == 17)[-1], limit_s=20.0)
    service.view, service.event_lines = replace(service.view, state=JobState.SUCCEEDED), []  # removed from its hosts
    follow_run(reader, metrics, [target], lambda _: time.sleep(0.01))
    assert sorted(target.seen, key=lambda event: (event["time"], str(event))) == last_round(lines)
    assert {rank: row["steps"] for rank, row in metrics.by_rank().items()} == dict.fromkeys("0123", 200)
    assert reader.unread.count == 1


def test_sums_are_of_the_newest_round(tmp_path: Path) -> None:
    for round_ in (1, 2):
        folder = tmp_path / "n0" / "1" / f"round-{round_}"
        folder.mkdir(parents=True)
        write_events(folder, run_events())
    metrics, target = RunMetrics(), KeptEvents()
    follow_run(JobReader(OtherPlatform("local", str(tmp_path), JobState.SUCCEEDED), "job"), metrics, [target])
    assert target.seen == run_events() * 2
    assert metrics.by_rank()["7"]["steps"] == 300


@pytest.fixture
def served() -> Iterator[tuple[RunMetrics, exporters.PrometheusExporter]]:
    metrics = RunMetrics()
    for event in run_events():
        metrics.add(event)
    metrics.finish()
    exporter = exporters.PrometheusExporter(metrics, 0)
    yield metrics, exporter
    exporter.close()


def test_every_metric_is_served(served: tuple[RunMetrics, exporters.PrometheusExporter]) -> None:
    metrics, exporter = served
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    assert 'ringweave_rank_steps_total{node="n7",rank="7"} 300.0' in lines
    assert {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")} == set(METRICS)
    assert len([line for line in lines if not line.startswith("#")]) == len(list(metrics.samples()))


def test_a_taken_port_is_refused(served: tuple[RunMetrics, exporters.PrometheusExporter]) -> None:
    with pytest.raises(LaunchError, match=r"port of the metrics: .*, expected a free one .* \[--prometheus\]"):
        exporters.PrometheusExporter(RunMetrics(), served[1].port)


@contextmanager
def prometheus(folder: Path, target_port: int) -> Iterator[str]:
    """A real Prometheus with our rules; yields its address."""
    port = free_port(random.SystemRandom())
    rules = (MONITORING / "prometheus.yml").read_text().replace("9471", str(target_port)).replace("5s", "1s")
    (folder / "prometheus.yml").write_text(rules)
    shutil.copy(MONITORING / "rules.yml", folder)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, text: str) -> list[dict[str, Any]]:
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus, Debian's package, is not installed")
def test_a_real_prometheus_scrapes_the_values_of_run_json(
    tmp_path: Path, served: tuple[RunMetrics, exporters.PrometheusExporter]
) -> None:
    metrics, exporter = served
    with prometheus(tmp_path, exporter.port) as address:
        wait_until(lambda: query(address, '{__name__=~"ringweave_.+"}'))
        scraped = query(address, '{__name__=~"ringweave_.+"}')
        alerts = query(address, "ALERTS") + query(address, "1")
    found = {
        (
            row["metric"]["__name__"],
            tuple(row["metric"][label] for label in METRICS[row["metric"]["__name__"]].labels),
        ): (float(row["value"][1]))
        for row in scraped
    }
    assert found == {(name, labels): pytest.approx(value) for name, labels, value in metrics.samples()}
    assert {name for name, _ in found} == set(METRICS)
    assert alerts, "the rules are loaded, and Prometheus answers"
    for rank, row in metrics.by_rank().items():
        for name, metric in (("wall_s", "step"), ("wait_s", "wait"), ("communication_s", "communication")):
            full = f"ringweave_rank_{metric}_seconds_total"
            assert found[full, (rank, row["node"])] == pytest.approx(row[name], abs=1e-6), "as in run.json"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's prometheus, is not installed")
@pytest.mark.parametrize(("kind", "name"), [("config", "prometheus.yml"), ("rules", "rules.yml")])
def test_promtool_accepts_the_files(kind: str, name: str) -> None:
    done = subprocess.run(
        ["promtool", "check", kind, "--lint-fatal", str(MONITORING / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's prometheus, is not installed")
def test_promtool_finds_the_metrics_clean(served: tuple[RunMetrics, exporters.PrometheusExporter]) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served[1].port}/metrics") as answer:
        text = answer.read()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    assert all(kind.kind == COUNTER for name, kind in METRICS.items() if name.endswith("_total"))


@needs("opentelemetry.sdk")
def test_steps_collectives_and_recoveries_are_spans_of_one_trace() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    exporter = exporters.TraceExporter("tr", span_exporter=kept)
    exporter.export(run_events())
    exporter.close()
    spans = kept.get_finished_spans()
    names = [span.name for span in spans]
    assert {name: names.count(name) for name in names} == {
        "train steps": 24, "collectives": 24, "recovery": 1, "run tr": 1
    }  # fmt: skip
    assert len({span.context.trace_id for span in spans}) == 1
    (recovery,) = (span for span in spans if span.name == "recovery")
    assert recovery.end_time - recovery.start_time == 1_500_000_000
    assert recovery.attributes["ringweave.member"] == "3.0"
    first = next(span for span in spans if span.name == "train steps")
    assert (first.attributes["ringweave.steps"], first.end_time - first.start_time) == (100, 10_000_000_000)


@needs("tensorboard")
def test_curves_are_read_by_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    exporter = exporters.TensorBoardExporter(tmp_path)
    exporter.export(run_events())
    exporter.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    points = read.Scalars("rank 3/exchange s")
    assert [(point.step, point.value) for point in points] == [
        (number, pytest.approx(0.018)) for number in (100, 200, 300)
    ]
    assert [(point.step, point.value) for point in read.Scalars("rank 0/loss")] == [(300, 0.25)]


@needs("wandb")
@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_curves_are_logged_offline_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    exporter = exporters.WandbExporter("ringweave-test", tmp_path.name, tmp_path)
    exporter.export(run_events())
    exporter.close()
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: b"rank 0/loss" in log.read_bytes())  # its own process writes the rest of the log
    assert b"rank 3/exchange s" in log.read_bytes()


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_curves_are_logged_to_a_local_store_of_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    exporter = exporters.MlflowExporter(uri, "tr")
    exporter.export(run_events())
    exporter.close()
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("ringweave")
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "rank 3/exchange s")
    assert [(point.step, point.value) for point in points] == [
        (number, pytest.approx(0.018)) for number in (100, 200, 300)
    ]
    assert run.info.status == "FINISHED"


def test_a_missing_library_is_named_with_its_extra() -> None:
    with pytest.raises(
        UsageError, match=r"library of --wandb: 'none', expected no_such_library\. pip install 'ringweave\[wandb\]'"
    ):
        exporters.import_library("no_such_library.part", option="--wandb", extra="wandb")
