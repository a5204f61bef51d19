"""Lookup of the platform that `--on NAME` names, and `--on` in the commands that its texts contain.

A platform is one of ours, an entry point of the group `ringweave.services`, or the address of a remote adapter
(protocol: docs/how-to/write-a-platform.md). An entry point names a function that takes the environment and returns a
`Platform`:

    [project.entry-points."ringweave.services"]
    ours = "our_package.service:open_service
"""

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ringweave.errors import JobError, LaunchError, UnknownJobError, UsageError, explain
from ringweave.files.problems import suggest_closest
from ringweave.jobs import admission
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import Reason
from ringweave.platforms.api import JobView, LogLine, LogQuery, Platform, Submission

ENTRY_POINT_GROUP = "ringweave.services"
BUILT_IN_PLATFORMS = {
    "local": "ringweave.platforms.local.platform:open_service",
    "hosts": "ringweave.platforms.hosts.platform:open_service",
    "runs": "ringweave.platforms.run_directory:open_service",
    "slurm": "ringweave.platforms.slurm.platform:open_service",
    "kubernetes": "ringweave.platforms.kubernetes.platform:open_service",
}
"""Built-in platforms are not entry points: they are found without a search of all installed packages."""

BUILT_IN_EXTRAS = ("kubernetes",)
"""Built-in platforms that need an extra of the same name."""

PlatformFactory = Callable[[Mapping[str, str]], Platform]


def open_platform(name: str, environ: Mapping[str, str]) -> Platform:
    """Open the platform of that name.

    `name`: `local`, `slurm`, `kubernetes`, the name of an entry point, or an address.

    Raises:
        UsageError: There is no platform of that name.
        LaunchError: The platform cannot be loaded.
    """
    if "://" in name:
        from ringweave.platforms import remote  # brings an HTTP client

        return remote.open_remote_platform(name, environ)
    if name in BUILT_IN_PLATFORMS:
        return _load_factory(BUILT_IN_PLATFORMS[name], name)(environ)
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name in found:
        return _load_factory(found[name].value, name)(environ)
    names = sorted({*BUILT_IN_PLATFORMS, *found})
    do = (
        suggest_closest(name, names) or f"Install a package with an entry point {name} in the group {ENTRY_POINT_GROUP}"
    )
    raise UsageError("service", got=name, expected=f"one of {', '.join(names)}", do=do, where="--on")


def _load_factory(path: str, name: str) -> PlatformFactory:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        needed = f"it with pip install 'ringweave[{name}]'" if name in BUILT_IN_EXTRAS else "what it needs"
        do = f"Install {needed}, or choose another with --on"
        text = explain(f"service {name}", got=str(error), expected="a module that can be loaded", do=do, where=path)
        raise LaunchError(text) from error


LOCAL = "local"
"""Platform of this machine."""
HOSTS = "hosts"
RUNS = "runs"
"""Runs on this machine, by their run directories."""
FOUND_PLATFORMS = (LOCAL, HOSTS, RUNS)
"""Platforms that commands on a job need not name."""
_JOB_VERBS = "|".join((*admission.VERB_NAMES, "status", "why", "logs", "events"))


def with_platform_option(text: str, name: str, platform: str) -> str:
    """Return the text with `--on PLATFORM` added to each command on the job that lacks it.

    `platform`: value of `--on`.
    """
    if platform in FOUND_PLATFORMS:
        return text
    command = rf"\bringweave (?:{_JOB_VERBS})(?: -\w)* {re.escape(name)}(?![\w-])(?! --on )"
    return re.sub(command, lambda found: f"{found[0]} --on {platform}", text)


def reason_with_platform_option(reason: Reason | None, name: str, platform: str) -> Reason | None:
    """Return the reason with `--on PLATFORM` added to its commands."""
    if reason is None:
        return None
    return replace(
        reason,
        text=with_platform_option(reason.text, name, platform),
        hint=with_platform_option(reason.hint, name, platform),
    )


class QualifiedPlatform(Platform):
    """Platform wrapper that adds `--on PLATFORM` to commands in texts, so that users can type them as they stand."""

    def __init__(self, inner: Platform, platform: str) -> None:
        self._inner, self._place = inner, platform

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        with self._qualified_errors(request.name):
            made = self._inner.submit(request, base=base, script_text=script_text, dry_run=dry_run)
        return replace(made, job=self._qualify_view(made.job))

    def jobs(self) -> Sequence[JobView]:
        return [self._qualify_view(job) for job in self._inner.jobs()]

    def job(self, name: str) -> JobView:
        with self._qualified_errors(name):
            return self._qualify_view(self._inner.job(name))

    def act(self, name: str, verb: str) -> JobView:
        with self._qualified_errors(name):
            return self._qualify_view(self._inner.act(name, verb))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """Yield the platform's log lines unchanged."""
        with self._qualified_errors(name):
            yield from self._inner.logs(name, which)

    @contextmanager
    def _qualified_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except JobError as error:
            kind = UnknownJobError if isinstance(error, UnknownJobError) else JobError
            raise kind(with_platform_option(str(error), name, self._place)) from error

    def _qualify_view(self, job: JobView) -> JobView:
        name, platform = job.name, self._place
        nodes = tuple(
            replace(node, reason=reason_with_platform_option(node.reason, name, platform)) for node in job.nodes
        )
        events = tuple(replace(each, text=with_platform_option(each.text, name, platform)) for each in job.events)
        return replace(job, reason=reason_with_platform_option(job.reason, name, platform), nodes=nodes, events=events)
