"""The protocol of a place where jobs run: what the commands ask of it. An adapter for another place implements this."""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringweave.jobs.requests.request import Request
from ringweave.launch.services.views import JobView


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """An object that a job becomes in its place, as text: a file, a batch script, a manifest."""

    name: str
    """What it is there: `config.json`, `ConfigMap/text`."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """An admitted request."""

    job: JobView
    """The job as it begins."""
    objects: tuple[Rendered, ...] = ()
    """What is made of it in its place, in order; for `--dry-run=full`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogQuery:
    """Which lines of a job's logs."""

    node: str | None = None
    """Those of this node; None: of all."""
    rank: int | None = None
    """Those of this worker, by global rank; None: of all."""
    attempt: int | None = None
    """Those of this attempt of the nodes; None: of all attempts, oldest first."""
    follow: bool = False
    """Wait for more until the job has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line that a worker printed, or that the place says of what it printed."""

    node: str
    attempt: int
    round: int
    """Of the gate: an attempt whose node was called back has one log for each round."""
    rank: int | None
    """Global rank of the worker; None: it is of the group itself, or says what became of its log."""
    text: str
    """Without the end of the line."""


class Service(abc.ABC):
    """Jobs of one place. It knows by itself who asks (OS user, Kubernetes user); nobody tells it.

    Every method raises JobError for what is refused (no permission, a verb that means nothing now), with what to do in
    its text, UnknownJobError where there is no such job, and LaunchError where the place cannot be reached or does not
    do its work.
    """

    @abc.abstractmethod
    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Admit the request and let its job run; returns when the job is recorded, before anything of it runs.

        The name is taken in one step: of any number at once one gets it, the others are refused by `name_taken`.

        Args:
            request: What is asked for, well-formed.
            base: Folder that relative paths of the request start from; it lasts as long as the job may.
            script_text: The script of a request without a directory, where it was handed over with the request; no file
                is looked at then. None: it is read where its path says.
            dry_run: Check all there is to check, and change nothing.
        """

    @abc.abstractmethod
    def jobs(self) -> Sequence[JobView]:
        """All jobs that the requester may see, oldest first, without events."""

    @abc.abstractmethod
    def job(self, name: str) -> JobView:
        """One job, with its events."""

    @abc.abstractmethod
    def act(self, name: str, verb: str) -> JobView:
        """Ask something of a job: one of `jobs.life.verbs.NAMES`; returns once that is recorded, not once it is done.

        Twice is as once.
        """

    @abc.abstractmethod
    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """What its workers printed, of all attempts until the job is deleted."""
