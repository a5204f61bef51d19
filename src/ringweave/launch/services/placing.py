"""Commands in what places say, as they have to be typed: a job that is not on this machine is named with `--on PLACE`.

Decisions about jobs know no place, so reasons and errors name commands without one. `placed` is applied where a text
leaves for people: by the commands to all that a service says, by the operator to the status of a TrainingJob.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ringweave.errors import JobError, UnknownJobError
from ringweave.jobs.life import verbs
from ringweave.jobs.life.states import Reason
from ringweave.jobs.requests.request import Request
from ringweave.launch.services.service import LogLine, LogQuery, Service, Submission
from ringweave.launch.services.views import JobView

HERE = "local"
"""The place that need not be said."""
_VERBS = "|".join((*verbs.NAMES, "status", "why", "logs", "events"))


def placed(text: str, name: str, place: str) -> str:
    """The text with the place behind each command on the job that does not say one.

    Args:
        text: For people.
        name: Of the job.
        place: What `--on` has to say.
    """
    if place == HERE:
        return text
    command = rf"\bringweave (?:{_VERBS})(?: -\w)* {re.escape(name)}(?![\w-])(?! --on )"
    return re.sub(command, lambda found: f"{found[0]} --on {place}", text)


def placed_reason(reason: Reason | None, name: str, place: str) -> Reason | None:
    """The reason with its texts so."""
    if reason is None:
        return None
    return replace(reason, text=placed(reason.text, name, place), helps=placed(reason.helps, name, place))


class PlacedService(Service):
    """A service in whose words every command can be typed as it stands."""

    def __init__(self, inner: Service, place: str) -> None:
        """`place` is what `--on` said."""
        self._inner, self._place = inner, place

    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """As the service does."""
        with self._errors(request.name):
            made = self._inner.submit(request, base=base, script_text=script_text, dry_run=dry_run)
        return replace(made, job=self._view(made.job))

    def jobs(self) -> Sequence[JobView]:
        """As the service does."""
        return [self._view(job) for job in self._inner.jobs()]

    def job(self, name: str) -> JobView:
        """As the service does."""
        with self._errors(name):
            return self._view(self._inner.job(name))

    def act(self, name: str, verb: str) -> JobView:
        """As the service does."""
        with self._errors(name):
            return self._view(self._inner.act(name, verb))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """As the service does: what workers printed is left as it is."""
        with self._errors(name):
            yield from self._inner.logs(name, which)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except JobError as error:
            kind = UnknownJobError if isinstance(error, UnknownJobError) else JobError
            raise kind(placed(str(error), name, self._place)) from error

    def _view(self, job: JobView) -> JobView:
        name, place = job.name, self._place
        nodes = tuple(replace(node, reason=placed_reason(node.reason, name, place)) for node in job.nodes)
        events = tuple(replace(each, text=placed(each.text, name, place)) for each in job.events)
        return replace(job, reason=placed_reason(job.reason, name, place), nodes=nodes, events=events)
