"""`ringweave jobs`, `status`, `why` and `events`: what there is, how it is, and why."""

import sys
import time

import click

from ringweave.cli.jobs import asking, tables
from ringweave.cli.jobs.following import watch
from ringweave.launch.services import views


@click.command
@asking.answering(wide=True)
@click.option("--metrics", is_flag=True, help="Print them as metrics in Prometheus' text format instead.")
@click.option("--serve-metrics", "port", type=click.IntRange(1, 65535), metavar="PORT", help="Serve /metrics there.")
def jobs(place: str, output: str, metrics: bool, port: int | None) -> int:
    """List the jobs of a place, oldest first: your own, and those of others that a policy lets you see.

    Metrics are served at 127.0.0.1 until the command is interrupted; every request looks anew.
    """
    service = asking.service(place)
    if metrics or port is not None:
        from ringweave.launch.services.metrics import serve, text_of  # brings an HTTP server

        return serve(service, port) if port is not None else _printed(text_of(service.jobs()))
    found = service.jobs()
    documents = {"jobs": [views.document(job) for job in found]}
    asking.show(output, documents, lambda: tables.jobs(found, time.time(), wide=output == "wide"))
    return 0


@click.command
@asking.answering(wide=True)
@click.option("-w", "--watch", "watches", is_flag=True, help="Go on until the job has ended.")
@asking.NAME
def status(place: str, output: str, watches: bool, name: str) -> int:
    """Say how JOB is: its state and why, and of each node workers, attempt, retries, iterations and last loss.

    With --watch the exit code is the job's: 0 if it succeeded, else 1; -o json prints a document a line, -o yaml begins
    each with ---. A wide table says of each node why, too.
    """
    service, wide = asking.service(place), output == "wide"
    if not watches:
        job = service.job(name)
        asking.show(output, views.document(job), lambda: tables.status(job, time.time(), wide=wide))
        return 0
    clears = sys.stdout.isatty() and output in ("table", "wide")
    for job in watch(service, name):
        if clears:
            click.clear()
        elif output == "yaml":
            click.echo("---")
        asking.show(output, views.document(job), lambda job=job: tables.status(job, time.time(), wide=wide))
    return 0 if job.state == "Succeeded" else 1


@click.command
@asking.answering()
@asking.NAME
def why(place: str, output: str, name: str) -> int:
    """Say why JOB does not run, or how it ended, node by node, and what helps."""
    job = asking.service(place).job(name)
    keys = ("name", "state", "reason")
    content = views.document(job)
    nodes = [{key: node[key] for key in (*keys, "attempts")} for node in content["nodes"]]
    asking.show(output, {key: content[key] for key in keys} | {"nodes": nodes}, lambda: tables.why(job))
    return 0


@click.command
@asking.answering()
@asking.NAME
def events(place: str, output: str, name: str) -> int:
    """List what happened to JOB: its states, the beginnings and ends of attempts."""
    job = asking.service(place).job(name)
    asking.show(output, {"name": name, "events": views.document(job)["events"]}, lambda: tables.events(job))
    return 0


def _printed(text: str) -> int:
    click.echo(text, nl=False)
    return 0
