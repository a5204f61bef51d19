"""Verbs on jobs: `ringweave jobs`, `status`, `why`, `events`, `logs`, `stop`, `delete`, `retry`, `suspend` and more."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import click

from ringweave import units
from ringweave.cli import job_options
from ringweave.cli.echo import align_columns, echo
from ringweave.cli.job_options import format_log_line, wait_until_gone, watch_job
from ringweave.errors import UsageError, printable
from ringweave.platforms import api
from ringweave.platforms.api import EventView, JobView, LogQuery, NodeView
from ringweave.telemetry import verdict


def _verb_command(verb: str, text: str, confirmation: str) -> click.Command:
    @click.command(name=verb, help=text)
    @job_options.answer_options()
    @job_options.JOB_ARGUMENT
    def command(place: str, output: str, name: str) -> int:
        job = job_options.open_user_platform(place).act(name, verb)
        job_options.print_answer(output, api.job_view_document(job), lambda: [f"{name}: {confirmation}"])
        return 0

    return command


stop = _verb_command(
    "stop",
    "End JOB. The deletion policy of each node decides whether it is kept; logs are kept, and retry starts it again.",
    "it will stop",
)
retry = _verb_command(
    "retry",
    "Start JOB again after it failed or was stopped, with all its retries, from its last checkpoint.",
    "it will be retried",
)
suspend = _verb_command(
    "suspend",
    "End the processes of JOB and keep it from running until it is resumed; no retry is charged.",
    "it will be suspended",
)
resume = _verb_command("resume", "Let a suspended JOB run.", "it may run")


@click.command
@job_options.answer_options()
@click.option("--wait/--no-wait", "waits", default=True, help="Wait until it is removed.  [default: wait]")
@job_options.JOB_ARGUMENT
def delete(place: str, output: str, waits: bool, name: str) -> int:
    """Remove JOB with its processes, logs, run directories and name.

    Files that its script wrote elsewhere stay.
    """
    platform = job_options.open_user_platform(place)
    job = platform.act(name, "delete")
    if waits:
        wait_until_gone(platform, job)
    job_options.print_answer(
        output,
        api.job_view_document(job),
        lambda: [f"{name}: {'removed' if waits else 'it will be removed'}"],
    )
    return 0


_DEVICE_NAMES = {"cuda": "GPUs", "cpu": "CPU workers"}


def job_table(jobs: Sequence[JobView], now: float, *, wide: bool) -> list[str]:
    """Return a table with a row for each job."""
    if not jobs:
        return ["no jobs"]
    head = ("name", "state", "workers", "nodes", "requester", "age")
    rows = [(*head, "mode", "reason") if wide else head]
    for job in jobs:
        row = (
            job.name,
            str(job.state),
            str(job.workers),
            str(len(job.used_nodes)),
            job.requester,
            units.show_duration(now - job.created_s),
        )
        rows.append((*row, job.mode, job.reason.text if job.reason else "") if wide else row)
    return align_columns(rows)


def status_lines(job: JobView, now: float, *, wide: bool) -> list[str]:
    """Return lines about a job and its nodes; a wide table has each node's reason."""
    workers = (
        f"{job.workers} {_DEVICE_NAMES.get(job.device, job.device)} on {units.count_noun(len(job.used_nodes), 'node')}"
    )
    lines = [
        f"{job.name}: {job.state} for {units.show_duration(now - job.since_s)}",
        f"{workers} of {job.platform}, requested by {job.requester} {units.show_duration(now - job.created_s)} ago",
    ]
    if job.reason:
        lines += [f"reason {job.reason.text}", f"hint   {job.reason.hint}"]
    head = ("node", "workers", "state", "attempt", "retries", "iterations", "last loss")
    rows: list[tuple[str, ...]] = [(*head, "reason") if wide else head]
    for node in job.nodes:
        rows.append((*_node_cells(node), node.reason.text if node.reason else "") if wide else _node_cells(node))
    files = [f"files  {job.files}"] if job.files else []
    return [*lines, "", *align_columns(rows), *([""] if files else []), *files]


def reason_lines(job: JobView) -> list[str]:
    """Return lines with the reasons and hints of the job and of each node."""
    if job.reason is None:
        return [f"{job.name} is {job.state}: no reason to wait."]
    lines = [f"{job.name} is {job.state}: {job.reason.text}.", f"  {job.reason.hint}."]
    for node in job.nodes:
        if node.reason is not None:
            lines += [f"node {node.name} is {node.state}: {node.reason.text}.", f"  {node.reason.hint}."]
        for attempt in node.attempts:
            if attempt.text:
                charged = ", one retry" if attempt.charged else ""
                lines.append(f"  attempt {attempt.attempt} ended: {attempt.text} ({attempt.cause}{charged})")
    return lines


def event_table(job: JobView) -> list[str]:
    """Return a table of events, oldest first."""
    if not job.events:
        return ["no events"]
    return align_columns(
        [("time", "kind", "text"), *((format_utc(each.time_s), each.kind, each.text) for each in job.events)]
    )


def format_utc(time_s: float) -> str:
    """Format a time as `2026-11-21 13:05:07Z`."""
    return f"{datetime.fromtimestamp(time_s, tz=UTC):%Y-%m-%d %H:%M:%S}Z"


def _node_cells(node: NodeView) -> tuple[str, ...]:
    if not node.workers:
        return (node.name, f"0 of {node.capacity}", str(node.state), "", "", "", "")
    return (
        node.name,
        f"{node.workers} of {node.capacity}",
        str(node.state),
        str(node.attempts[-1].attempt),
        f"{node.retries} of {node.max_retries}",
        "-" if node.iterations is None else str(node.iterations),
        "-" if node.last_loss is None else f"{node.last_loss:.4f}",
    )


@click.command
@job_options.answer_options(wide=True)
@click.option("--metrics", is_flag=True, help="Print metrics in Prometheus' text format instead.")
@click.option(
    "--serve-metrics", "port", type=click.IntRange(1, 65535), metavar="PORT", help="Serve /metrics at this port."
)
def jobs(place: str, output: str, metrics: bool, port: int | None) -> int:
    """List the jobs of a platform, oldest first: your own, and those of others that a policy lets you see.

    Metrics are served at 127.0.0.1 until the command is interrupted; requests of one second share a list of the jobs.
    """
    platform = job_options.open_user_platform(place)
    if metrics or port is not None:
        from ringweave.platforms.metrics import metrics_text, serve_metrics

        return serve_metrics(platform, port) if port is not None else _echo_text(metrics_text(platform.jobs()))
    found = platform.jobs()
    documents = {"jobs": [api.job_view_document(job) for job in found]}
    job_options.print_answer(output, documents, lambda: job_table(found, time.time(), wide=output == "wide"))
    return 0


@click.command
@job_options.answer_options(wide=True)
@click.option("-w", "--watch", "watches", is_flag=True, help="Continue until the job has ended.")
@job_options.JOB_ARGUMENT
def status(place: str, output: str, watches: bool, name: str) -> int:
    """Show the state of JOB with its reason, and workers, attempt, retries, iterations and last loss of each node.

    With --watch the exit code is the job's: 0 if it succeeded, else 1; -o json prints one document per line, -o yaml
    starts each with ---. A wide table also has the reason of each node.
    """
    platform, wide = job_options.open_user_platform(place), output == "wide"
    if not watches:
        job = platform.job(name)
        job_options.print_answer(output, api.job_view_document(job), lambda: status_lines(job, time.time(), wide=wide))
        return 0
    clears = sys.stdout.isatty() and output in ("table", "wide")
    for job in watch_job(platform, name):
        if clears:
            click.clear()
        elif output == "yaml":
            echo("---")
        job_options.print_answer(
            output, api.job_view_document(job), lambda job=job: status_lines(job, time.time(), wide=wide)
        )
    return 0 if job.state == "Succeeded" else 1


@click.command
@job_options.answer_options()
@job_options.JOB_ARGUMENT
def why(place: str, output: str, name: str) -> int:
    """Show why JOB does not run or how it ended, with a hint, and what it loses time to.

    Losses are measured: the rank that others wait for, its cause, and a remedy. In scripts without ringweave.prepare
    the cause is less exact.
    """
    from ringweave.page.run_source import AttemptEvents, JobReader  # numpy; other verbs do without

    reader, events = JobReader(job_options.open_user_platform(place), name), AttemptEvents()
    job, keys = reader.view, ("name", "state", "reason")
    content = api.job_view_document(job)
    nodes = [{key: node[key] for key in (*keys, "attempts")} for node in content["nodes"]]
    reader.read_all(events, events_only=True)
    trouble = reader.output.document()["trouble"]
    losses = [] if trouble else verdict.find_losses(events.in_order())
    notes = [each for each in (f"Its losses are not known: {trouble}" if trouble else "", reader.unread.text()) if each]
    document = {key: content[key] for key in keys} | {"nodes": nodes, "losses": [asdict(each) for each in losses]}
    lines = [*reason_lines(job), *(each.text() for each in losses), *notes]
    job_options.print_answer(output, document | {"notes": notes}, lambda: lines)
    return 0


@click.command
@job_options.answer_options()
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@job_options.JOB_ARGUMENT
def events(place: str, output: str, follow: bool, name: str) -> int:
    """List the events of JOB: changes of state, and starts and ends of attempts. The newest 1,000."""
    _refuse_format(output, is_endless=follow)
    platform = job_options.open_user_platform(place)
    if follow:
        for each in new_events(watch_job(platform, name)):
            echo(printable(f"{format_utc(each.time_s)}  {each.kind}  {each.text}"))
        return 0
    job = platform.job(name)
    job_options.print_answer(
        output, {"name": name, "events": api.job_view_document(job)["events"]}, lambda: event_table(job)
    )
    return 0


def new_events(views: Iterable[JobView]) -> Iterator[EventView]:
    """Yield each event once that is in one of these views, which come one after the other."""
    last = None
    for job in views:
        first = next((index for index in range(len(job.events), 0, -1) if job.events[index - 1] == last), 0)
        yield from job.events[first:]
        last = job.events[-1] if job.events else last


def _refuse_format(output: str, *, is_endless: bool) -> None:
    if is_endless and output != "table":
        do = "Leave out one of the two"
        raise UsageError("-o", got=output, expected="table with --follow, which never ends", do=do)


def _echo_text(text: str) -> int:
    echo(text, nl=False)
    return 0


@click.command
@job_options.answer_options()
@click.option("-f", "--follow", is_flag=True, help="Continue until the job has ended.")
@click.option("--node", metavar="NODE", help="Only workers of this node.")
@click.option("--rank", type=int, metavar="N", help="Only the worker of this global rank.")
@click.option("--attempt", type=click.IntRange(1), metavar="N", help="Only this attempt of the nodes. Default: all.")
@job_options.JOB_ARGUMENT
def logs(
    place: str, output: str, follow: bool, node: str | None, rank: int | None, attempt: int | None, name: str
) -> int:
    """Print the output of the workers of JOB, of all attempts, with the rank in front of each line.

    Lines of later attempts and rounds are marked NODE.ATTEMPT/ROUND.
    """
    _refuse_format(output, is_endless=follow)
    lines = job_options.open_user_platform(place).logs(
        name, LogQuery(node=node, rank=rank, attempt=attempt, follow=follow)
    )
    if output == "table":
        for line in lines:
            echo(format_log_line(line, many=line.attempt > 1 or line.round > 1))
        return 0
    job_options.print_answer(output, {"name": name, "lines": [asdict(line) for line in lines]}, list)
    return 0
