"""Hosts platform as the commands see it: `--on hosts`, for runs started here and for runs that have this host."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ringweave.errors import JobError, LaunchError, UnknownJobError
from ringweave.files.problems import suggest_closest
from ringweave.jobs import admission
from ringweave.jobs.admission import AccessPolicy, PermissionCache
from ringweave.jobs.advance import is_finished
from ringweave.jobs.request import JobRequest
from ringweave.jobs.states import Reason
from ringweave.launcher.scale_requests import ScaleAnswer
from ringweave.platforms import api, submission
from ringweave.platforms.api import EventLines, EventView, JobView, LogLine, LogQuery, Platform, Submission
from ringweave.platforms.hosts import controller, host_runtime, join_protocol, run_entry, start
from ringweave.platforms.hosts.host_list import HostList, HostSpec
from ringweave.platforms.hosts.messages import SCALE, RunStatus, RunStatusRequest, RunVerb
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, HostFolder, HostsOptions, KnownRun, RunEntry
from ringweave.platforms.hosts.ssh import HostConnections, SshConnection

_VERB_RETRY_S = 0.3
VERB_TIMEOUT_S = 10.0
LogPiecesOfHost = tuple[Sequence[Sequence[Any]], bytes]


class RunAccess(Protocol):
    """Way to a run: over ssh from the machine that started it, or on one of its hosts."""

    def read_entry(self) -> RunEntry:
        """Return the newest entry.

        Raises:
            UnknownJobError: The run has been removed.
            LaunchError: No host answers.
        """
        ...

    def apply_verb(self, verb: str, workers: int | None = None) -> int | None:
        """Apply a verb to the run; return the number of workers before, for SCALE.

        `workers`: the number of workers, for SCALE.

        Raises:
            JobError: It is refused.
            LaunchError: No host answers, or there is no leader.
        """
        ...

    def read_logs(self, positions: dict[str, str], events: EventLines) -> list[LogPiecesOfHost]:
        """Return the new text of the logs, and of event logs if wanted, of each host that answers."""
        ...


class StartedRunAccess:
    """Access over ssh, from the machine that started the run."""

    def __init__(self, known: KnownRun) -> None:
        self._known = known
        self._connections = HostConnections(known.hosts, known.options, connects=False)
        self._open: list[SshConnection | None] = [None] * len(known.hosts)

    def read_entry(self) -> RunEntry:
        answers = self._ask_all("status", stops_at_first=True)
        return max((ENTRY_JSON.parse(answer["entry"]) for answer in answers), key=lambda entry: entry.version)

    def apply_verb(self, verb: str, workers: int | None = None) -> int | None:
        entry = self.read_entry()
        if verb == "delete" and is_finished(entry.job):
            if len(self._ask_all("abort")) == len(self._open):
                run_entry.forget_known_run(self._known)
            return None
        self._ask_all("ensure")
        deadline_s = time.monotonic() + VERB_TIMEOUT_S
        words = {"verb_name": verb, "workers": workers, "request_id": secrets.token_hex(8)}
        while True:
            try:
                return self._ask_all("verb", stops_at_first=True, **words)[0]["before"]
            except LaunchError:
                if time.monotonic() >= deadline_s:
                    raise
                time.sleep(_VERB_RETRY_S)

    def read_logs(self, positions: dict[str, str], events: EventLines) -> list[LogPiecesOfHost]:
        wanted = {"run_id": self._known.run_id, "positions": positions, "events": events}
        found = [self._read_logs(index, wanted) for index in range(len(self._open))]
        joined = [self._read_logs(0, wanted, host=host) for host, _ in self._known.joining]
        return [*found, *joined]

    def _read_logs(self, index: int, wanted: Mapping[str, Any], host: int | None = None) -> LogPiecesOfHost:
        """Return the new text of a host, or of one that has joined, over this one."""
        with contextlib.suppress(LaunchError):
            answer, content = self._connection(index).call_for_bytes("logs", host=host, **wanted)
            return answer["pieces"], content
        return (), b""

    def _ask_all(self, verb: str, *, stops_at_first: bool = False, **fields: Any) -> list[dict[str, Any]]:
        """Return the answers of the hosts that answer."""
        answers: list[dict[str, Any]] = []
        errors: list[LaunchError | JobError] = []
        for index in range(len(self._open)):
            try:
                answers.append(self._connection(index).call(verb, run_id=self._known.run_id, **fields))
            except (LaunchError, UnknownJobError) as error:
                errors.append(error)
            if answers and stops_at_first:
                break
        if answers:
            return answers
        if all(isinstance(error, UnknownJobError) for error in errors):
            run_entry.forget_known_run(self._known)
        raise errors[0]

    def _connection(self, index: int) -> SshConnection:
        connection = self._open[index]
        if connection is None or not connection.is_open:
            connection = self._open[index] = self._connections.connect(index)
        return connection


class HostRunAccess:
    """Access on one of the hosts of the run, by its host service."""

    def __init__(self, folder: HostFolder) -> None:
        self._folder = folder
        self._others = host_runtime.HostLogReader(folder)

    def read_entry(self) -> RunEntry:
        try:
            status = host_runtime.call_service(self._folder, RunStatusRequest())
            return self._folder.load_entry() if status is None else ENTRY_JSON.parse(status.entry)
        except FileNotFoundError as error:
            raise UnknownJobError(f"run {self._folder.run_id}: removed, expected one of this host.") from error

    def apply_verb(self, verb: str, workers: int | None = None) -> int | None:
        status: RunStatus | None = host_runtime.call_service(self._folder, RunVerb(verb=verb, workers=workers))
        if status is None:
            do = "Repeat it where the run was started: only there all hosts are reached"
            what = f"{verb} of run {self.read_entry().name}"
            raise LaunchError(what, got="no host service here", expected="a run that goes on", do=do)
        return status.before

    def read_logs(self, positions: dict[str, str], events: EventLines) -> list[LogPiecesOfHost]:
        own = self._folder.load_config().index
        return [
            host_runtime.read_new_logs(self._folder, positions, events)
            if host == own
            else self._read_other(host, positions, events)
            for host in range(len(self._folder.load_entry().hosts))
        ]

    def _read_other(self, host: int, positions: dict[str, str], events: EventLines) -> LogPiecesOfHost:
        answer, content = self._others.read(host, positions, events)
        return answer.pieces, content


class HostsPlatform(Platform):
    """Platform of runs on hosts that ssh reaches."""

    def __init__(
        self,
        *,
        requester: str,
        policy_rules: AccessPolicy = admission.OPEN_POLICY,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._requester, self._clock, self._sleep = requester, clock, sleep
        self._permissions = PermissionCache(policy_rules.find_permission)
        self._accesses: dict[str, RunAccess] = {}

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Start the job on the hosts that its nodes name; ssh has to reach them by these names."""
        submission.check_platform_keys(request, "hosts")
        directory = (base / (request.directory or "")).absolute()
        if request.script is not None and request.directory is None:
            path = (base / request.script).absolute()
            directory, request = path.parent, replace(request, script=path.name)
        existing = [self._access(name).read_entry().job for name in self._names() if name == request.name]
        job = admission.admit_job(
            request,
            requester=self._requester,
            existing=existing,
            permissions=self._permissions,
            now=self._clock(),
        )
        submission.check_program(request, directory)
        if not dry_run:
            hosts = tuple(
                HostSpec(node=job.node_name(node), destination=job.node_name(node), workers=job.counts[node])
                for node in job.used_nodes
            )
            start.start_job(job, HostList(hosts=hosts), directory, HostsOptions())
        return Submission(job=api.job_view(job, platform="hosts"))

    def jobs(self) -> Sequence[JobView]:
        found = []
        for name in self._names():
            with contextlib.suppress(LaunchError, UnknownJobError):
                found.append(self._view(self._access(name).read_entry()))
        found += [self._unreadable_view(*each) for each in run_entry.unreadable_runs()]
        return sorted(found, key=lambda job: job.created_s)

    def job(self, name: str) -> JobView:
        return self._view(self._access(name).read_entry(), with_events=True)

    def act(self, name: str, verb: str) -> JobView:
        access = self._access(name)
        entry = access.read_entry()
        access.apply_verb(verb)
        with contextlib.suppress(UnknownJobError):
            entry = access.read_entry()
        return self._view(entry, with_events=True)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        entry = self._access(name).read_entry()
        submission.check_log_query(entry.job, which, num_ranks=entry.most_wanted)
        access = self._access(name)
        return api.follow_logs(
            lambda positions: itertools.chain.from_iterable(
                itertools.starmap(host_runtime.split_pieces, access.read_logs(positions, which.events))
            ),
            which,
            is_over=lambda: _is_over(access),
            sleep=self._sleep,
        )

    def _names(self) -> list[str]:
        here = [folder.find_name() for folder in run_entry.find_run_folders(run_entry.hosts_state_folder())]
        known = [run.name for run in run_entry.list_known_runs()]
        return list(dict.fromkeys(name for name in (*known, *here) if name))

    def _unreadable_view(self, name: str, path: Path, changed_s: float) -> JobView:
        text, hint = f"its file cannot be read: {path}", run_entry.UNREADABLE_HINT
        reason = Reason(code="Unreadable", text=text, hint=hint)
        return api.job_view(api.unreadable_job(name, self._requester, changed_s, reason), platform="hosts")

    def _access(self, name: str) -> RunAccess:
        if name not in self._accesses:
            self._accesses[name] = find_access(name)
        return self._accesses[name]

    def _view(self, entry: RunEntry, *, with_events: bool = False) -> JobView:
        events = [EventView(time_s=each.time_s, kind=each.kind, text=each.text) for each in entry.events]
        view = _as_scaled(api.job_view(entry.job, platform="hosts", events=events if with_events else ()), entry)
        known = next((run for run in run_entry.list_known_runs() if run.run_id == entry.run_id), None)
        view = replace(view, reason=join_protocol.waiting_reason(view.state, entry.unjoined, view.reason))
        if known is None:
            return view
        if view.reason is not None and (hint := join_protocol.join_hint(entry.unjoined, known.join_lines)):
            view = replace(view, reason=replace(view.reason, hint=f"Type {hint}"))
        return replace(view, files=known.run_dir) if known.run_dir else view


def _as_scaled(view: JobView, entry: RunEntry) -> JobView:
    """Return the view of a run with the workers that it shall have now."""
    if entry.scaled is None:
        return view
    counts = {node: len(entry.wanted_ranks(node)) for node in entry.job.used_nodes}
    nodes = [
        replace(each, workers=counts.get(node, 0), capacity=max(each.capacity, counts.get(node, 0)))
        for node, each in enumerate(view.nodes)
    ]
    return replace(view, workers=entry.num_wanted, nodes=tuple(nodes))


def scale_run(name: str, workers: int) -> ScaleAnswer:
    """Ask a run for another number of workers; return what follows once a quorum of its hosts knows it.

    Raises:
        JobError: There is no such run, or it cannot have so many workers now.
        LaunchError: No host answers, or there is no leader.
    """
    before = find_access(name).apply_verb(SCALE, workers)
    assert before is not None, "the leader answers with it"
    return controller.scale_answer(before, workers)


def find_access(name: str) -> RunAccess:
    """Return the way to a run: its name, or the folder of its output where it was started.

    Raises:
        UnknownJobError: There is no such run.
    """
    folders = run_entry.find_run_folders(run_entry.hosts_state_folder())
    here = next((folder for folder in folders if name in (folder.run_id, folder.find_name())), None)
    known = next((run for run in run_entry.list_known_runs() if run.is_named(name)), None)
    if known is not None:
        return StartedRunAccess(known)
    run_entry.refuse_unreadable(name)
    if here is not None:
        return HostRunAccess(here)
    names = [run.name for run in run_entry.list_known_runs()] + list(filter(None, map(HostFolder.find_name, folders)))
    do = suggest_closest(name, names) or "See ringweave jobs --on hosts"
    expected = f"one of {', '.join(names)}" if names else "a run that was started here, or has this host"
    raise UnknownJobError("run", got=name, expected=expected, do=do, where="hosts")


def open_service(environ: Mapping[str, str]) -> HostsPlatform:
    """Open the platform for the user of this process.

    Raises:
        JobError: The policy file is wrong.
    """
    return HostsPlatform(requester=submission.os_user(), policy_rules=submission.load_policy())


def _is_over(access: RunAccess) -> bool:
    try:
        return access.read_entry().job.record.state.is_end
    except UnknownJobError:
        return True
