"""`ringweave stop`, `delete`, `retry`, `suspend` and `resume`."""

import click

from ringweave.cli.jobs import asking
from ringweave.cli.jobs.following import wait_gone
from ringweave.launch.services import views


def _make(verb: str, text: str, said: str) -> click.Command:
    @click.command(name=verb, help=text)
    @asking.answering()
    @asking.NAME
    def command(place: str, output: str, name: str) -> int:
        job = asking.service(place).act(name, verb)
        asking.show(output, views.document(job), lambda: [f"{name}: {said}"])
        return 0

    return command


stop = _make(
    "stop",
    "End JOB. Its nodes are deleted or kept as each one's policy says; logs are kept, and retry starts it again.",
    "it will stop",
)
retry = _make(
    "retry",
    "Start JOB again after it failed or was stopped, with all its retries, from its last checkpoint.",
    "it will be tried again",
)
suspend = _make(
    "suspend",
    "End what runs of JOB and keep it from running until it is resumed; no retry is charged.",
    "it will be suspended",
)
resume = _make("resume", "Let a suspended JOB run.", "it may run")


@click.command
@asking.answering()
@click.option("--wait/--no-wait", "waits", default=True, help="Wait until nothing is left of it.  [default: wait]")
@asking.NAME
def delete(place: str, output: str, waits: bool, name: str) -> int:
    """Remove JOB with all it left: processes, logs, run directories, name. What its script wrote elsewhere stays."""
    service = asking.service(place)
    job = service.act(name, "delete")
    if waits:
        wait_gone(service, job)
    asking.show(
        output, views.document(job), lambda: [f"{name}: {'nothing is left of it' if waits else 'it will be removed'}"]
    )
    return 0
