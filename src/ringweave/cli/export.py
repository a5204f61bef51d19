"""`ringweave export`: reads the events of a run, while it goes on or afterwards, and feeds exporters with them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from ringweave.cli import job_options
from ringweave.cli.echo import echo
from ringweave.errors import UsageError, explain
from ringweave.platforms.api import JobView, Platform
from ringweave.telemetry import RunTail, exporters
from ringweave.telemetry.exporters import Exporter
from ringweave.telemetry.run_metrics import RunMetrics

POLL_S = 1.0
"""Time between two looks at the events."""


def follow_run(
    tail: RunTail,
    metrics: RunMetrics,
    targets: Sequence[Exporter],
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Feed the exporters until the run is over and all of its events are read."""
    while True:
        was_over = is_over()
        events = tail.read_new()
        for event in events:
            metrics.add(event)
        for target in targets:
            target.export(events)
        if was_over and not events:
            metrics.finish()
            if tail.unread.count:
                echo(f"ringweave: {tail.unread.text()}", err=True)
            return
        if not events:
            sleep(POLL_S)


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
    platform = job_options.open_user_platform(place or job_options.find_place(name))
    job = platform.job(name)
    folder = _run_folder(job)
    metrics = RunMetrics()
    makers: dict[tuple[str, object], Callable[[], Exporter]] = {
        ("prometheus", prometheus): lambda: exporters.PrometheusExporter(metrics, prometheus or 0),
        ("otel", otel): lambda: exporters.TraceExporter(folder.name, otel),
        ("tensorboard", tensorboard): lambda: exporters.TensorBoardExporter(tensorboard or folder),
        ("wandb", wandb): lambda: exporters.WandbExporter(wandb or "", folder),
        ("mlflow", mlflow): lambda: exporters.MlflowExporter(mlflow or "", folder.name),
    }
    made = [make for (_, value), make in makers.items() if value is not None]
    if not made:
        do = "Name one or more, such as --prometheus 9471"
        raise UsageError(explain("exporters", got="none", expected="at least one", do=do, where="ringweave export"))
    with _opened(made) as targets:
        follow_run(RunTail(folder), metrics, targets, lambda: _is_over(platform, name))
        while keep_serving and prometheus is not None:
            time.sleep(POLL_S)
    return 0


def _run_folder(job: JobView) -> Path:
    if not job.files:
        do = "Export on the machine that has them"
        raise UsageError(explain(f"files of {job.name}", got="none", expected="a folder with events", do=do))
    return Path(job.files)


def _is_over(platform: Platform, name: str) -> bool:
    return platform.job(name).state.is_end


@contextmanager
def _opened(made: Sequence[Callable[[], Exporter]]) -> Iterator[list[Exporter]]:
    """Make the exporters, and close them all; Ctrl-C ends the export, not the run."""
    targets: list[Exporter] = []
    try:
        targets += (make() for make in made)
        yield targets
    except KeyboardInterrupt:
        return
    finally:
        for target in targets:
            target.close()
