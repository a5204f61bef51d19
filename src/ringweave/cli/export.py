"""`ringweave export`: reads the events of a run, while it goes on or afterwards, and feeds exporters with them."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from ringweave.cli import job_options
from ringweave.cli.echo import echo
from ringweave.errors import UsageError, printable
from ringweave.page.run_source import MAX_WAITING_LINES, JobReader
from ringweave.telemetry import Event, exporters
from ringweave.telemetry.exporters import Exporter
from ringweave.telemetry.run_metrics import RunMetrics

POLL_S = 1.0
"""Time between two looks at the events."""
MAX_BATCH = 1000
"""Events that are in memory at once, however many there are to catch up with. Files of several nodes are read together,
by the times of their events."""


class ExportedEvents:
    """Feeds exporters with the events of a job, in batches by their times; sums are of its newest attempt or round."""

    def __init__(self, metrics: RunMetrics, targets: Sequence[Exporter], max_batch: int = MAX_BATCH) -> None:
        self._metrics, self._targets, self._max_batch = metrics, targets, max_batch
        self._events: list[Event] = []

    def begin_attempt(self, round_: int | None = None) -> None:
        """Export what waits, and sum anew."""
        del round_
        self.export()
        self._metrics.clear()

    def add(self, event: Event) -> None:
        """Add an event to the next batch."""
        self._events.append(event)
        if len(self._events) >= self._max_batch:
            self.export()

    def export(self) -> bool:
        """Export the batch; return whether there were events in it."""
        events, self._events = sorted(self._events, key=lambda event: event["time"]), []
        for event in events:
            self._metrics.add(event)
        for target in self._targets:
            target.export(events)
        return bool(events)


def follow_run(
    reader: JobReader, metrics: RunMetrics, targets: Sequence[Exporter], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Feed the exporters until the run is over and all of its events are read."""
    # From elsewhere the events of one node come after those of another, and are put in order by the batch alone.
    exported = ExportedEvents(metrics, targets, MAX_BATCH if reader.has_files else MAX_WAITING_LINES)
    if not reader.has_files:
        reader.follow_logs(events_only=True)
    while True:
        was_over = reader.is_over()
        reader.feed(exported)
        if exported.export():
            continue
        if was_over:
            break
        sleep(POLL_S)
    metrics.finish()
    for text in (reader.unread.text(), reader.output.document()["trouble"]):
        if text:
            echo(printable(f"ringweave: {text}"), err=True)


@click.command
@job_options.ON_OPTION
@click.option("--prometheus", type=click.IntRange(0, 65535), metavar="PORT", help="Serve metrics at 127.0.0.1:PORT.")
@click.option("--otel", metavar="URL", help="Send traces there by OTLP, such as http://localhost:4318/v1/traces.")
@click.option("--tensorboard", type=click.Path(path_type=Path), metavar="FOLDER", help="Write curves for TensorBoard.")
@click.option("--wandb", metavar="PROJECT", help="Log curves to Weights & Biases; WANDB_MODE=offline keeps them here.")
@click.option("--mlflow", metavar="URI", help="Log curves to MLflow, such as sqlite:///mlflow.db.")
@click.option("--keep-serving", is_flag=True, help="With --prometheus: serve after the end of the run, until Ctrl-C.")
@job_options.JOB_ARGUMENT
def command(  # noqa: PLR0913, PLR0917 - one for each option
    place: str | None,
    prometheus: int | None,
    otel: str | None,
    tensorboard: Path | None,
    wandb: str | None,
    mlflow: str | None,
    keep_serving: bool,
    name: str,
) -> int:
    """Export JOB, a job or a run directory, to other programs, while it goes on or after its end.

    It reads the events of the run; training is not touched. Several exporters may be named at once.
    """
    reader = JobReader(job_options.open_user_platform(place or job_options.find_place(name)), name)
    folder, has_files = Path(reader.view.files if reader.has_files else name), reader.has_files
    metrics = RunMetrics()
    makers: dict[tuple[str, object], Callable[[], Exporter]] = {
        ("prometheus", prometheus): lambda: exporters.PrometheusExporter(metrics, prometheus or 0),
        ("otel", otel): lambda: exporters.TraceExporter(folder.name, otel),
        ("tensorboard", tensorboard): lambda: exporters.TensorBoardExporter(tensorboard or folder),
        ("wandb", wandb): lambda: exporters.WandbExporter(wandb or "", folder.name, folder if has_files else Path()),
        ("mlflow", mlflow): lambda: exporters.MlflowExporter(mlflow or "", folder.name),
    }
    made = [make for (_, value), make in makers.items() if value is not None]
    if not made:
        do = "Name one or more, such as --prometheus 9471"
        raise UsageError("exporters", got="none", expected="at least one", do=do, where="ringweave export")
    targets: list[Exporter] = []
    with _interrupts_between_exports() as interrupts:
        try:
            for make in made:
                with interrupts.held():
                    targets.append(_HeldExporter(make(), interrupts))
            follow_run(reader, metrics, targets)
            while keep_serving and prometheus is not None:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            pass
        finally:
            for target in targets:
                target.close()
    return 0


class _Interrupts:
    """Raises KeyboardInterrupt for a signal, but not inside of an exporter's library, whose locks could stay taken."""

    def __init__(self) -> None:
        self._is_held = self._is_due = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second one does not wait."""
        del number, frame
        if not self._is_held or self._is_due:
            raise KeyboardInterrupt
        self._is_due = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the exception for a signal to the end of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held, is_due, self._is_due = False, self._is_due, False
        if is_due:
            raise KeyboardInterrupt


class _HeldExporter(Exporter):
    """Exporter in whose calls a signal raises nothing."""

    def __init__(self, target: Exporter, interrupts: _Interrupts) -> None:
        self._target, self._interrupts = target, interrupts

    def export(self, events: Sequence[Mapping[str, Any]]) -> None:
        with self._interrupts.held():
            self._target.export(events)

    def close(self) -> None:
        self._target.close()


@contextmanager
def _interrupts_between_exports() -> Iterator[_Interrupts]:
    """Let Ctrl-C and SIGTERM end the export, not the run; an ignored SIGINT stays ignored."""
    interrupts = _Interrupts()
    wanted = {signal.SIGTERM} | ({signal.SIGINT} if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else set())
    before = {each: signal.signal(each, interrupts.interrupt) for each in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
