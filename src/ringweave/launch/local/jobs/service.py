"""Jobs on this machine as the commands see them; `--on local`, which is the default."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import platformdirs

from ringweave import topology
from ringweave.jobs.admission import admitting, policy
from ringweave.jobs.admission.permissions import PermissionCache
from ringweave.jobs.admission.policy import Policy
from ringweave.jobs.life import verbs
from ringweave.jobs.life.advancing import as_asked, is_over
from ringweave.jobs.life.records import Desired, Job
from ringweave.jobs.requests.request import Request
from ringweave.launch.groups import config as configs
from ringweave.launch.groups import layout
from ringweave.launch.local.jobs import logs, supervisor
from ringweave.launch.local.jobs.folders import REGISTRY, job_folder
from ringweave.launch.local.jobs.registry import Entry, Registry
from ringweave.launch.services import submitting, views
from ringweave.launch.services.farewells import Farewells
from ringweave.launch.services.service import LogLine, LogQuery, Rendered, Service, Submission
from ringweave.launch.services.submitting import Origin
from ringweave.launch.services.views import JobView


class LocalService(Service):
    """Jobs whose nodes are worker groups on this machine, all in one user's state folder."""

    def __init__(
        self,
        state: Path,
        *,
        requester: str,
        environ: Mapping[str, str],
        rules: Policy = policy.OPEN,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Jobs of a state folder.

        Args:
            state: Where the registry and the jobs' folders are; made if need be.
            requester: The OS user who asks.
            environ: What jobs that are submitted here inherit.
            rules: Who may do what.
            clock: Seconds since 1970.
            sleep: Waits between two looks at logs.
        """
        self._state, self._requester, self._environ = state, requester, dict(environ)
        self._registry = Registry(state / REGISTRY)
        self._permissions = PermissionCache(rules.permission)
        self._clock, self._sleep = clock, sleep
        self._farewells = Farewells()

    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Admit the request, register its job, and start its supervisor."""
        submitting.refuse_elsewhere(request, "local")
        self._admit(request, [each.job for each in self._registry.all()])  # before anything that it names is looked at
        origin = submitting.origin_of(request, base, self._environ, script_text)
        origin = replace(origin, cluster=submitting.lab_cluster(request))
        if dry_run:
            entry = self._admitted(request, origin, [each.job for each in self._registry.all()])
        else:
            entry = self._registry.submit(lambda there: self._admitted(request, origin, there))
            self._supervise(entry)
        return Submission(job=self._view(entry), objects=_objects(entry))

    def jobs(self) -> Sequence[JobView]:
        """All jobs that the requester may see."""
        now = self._clock()
        entries = self._registry.all()
        self._check("jobs", self._requester, now)
        may_see_all = self._permissions.permission(self._requester, "jobs", now).any_owner
        seen = [entry for entry in entries if may_see_all or entry.job.requester == self._requester]
        for entry in seen:
            if _needs_supervisor(entry.job):
                self._supervise(entry)
        return [self._view(entry) for entry in seen]

    def job(self, name: str) -> JobView:
        """One job, with its events."""
        found = self._registry.find(name)  # once: it may be forgotten at any moment
        if found is None and (gone := self._farewells.last(name)) is not None:
            return views.view(gone, place="local")
        entry = self._checked(found, name, "status")
        self._farewells.listen(job_folder(self._state, entry.id).root, entry.job)
        if _needs_supervisor(entry.job):
            self._supervise(entry)
        return self._view(entry, with_events=True)

    def act(self, name: str, verb: str) -> JobView:
        """Ask something of a job, and wake its supervisor."""
        entry = self._find(name, verb)
        self._registry.ask(entry.id, lambda job, there: self._asked(verb, job, there))
        self._supervise(entry)
        return self._view(self._registry.load(entry.id) or entry, with_events=True)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """What its workers printed."""
        entry = self._find(name, "logs")
        submitting.check_query(entry.job, which)
        return logs.read(
            job_folder(self._state, entry.id), which, is_over=lambda: self._is_over(entry.id), sleep=self._sleep
        )

    def _asked(self, verb: str, job: Job, there: Sequence[Job]) -> Desired:
        desired = verbs.ask(verb, job, self._clock())
        if verb == "retry":
            admitting.check_retry(job, there=there, permissions=self._permissions, now=self._clock())
        return desired

    def _admit(self, request: Request, there: Sequence[Job]) -> Job:
        return admitting.admit(
            request, requester=self._requester, there=there, permissions=self._permissions, now=self._clock()
        )

    def _admitted(self, request: Request, origin: Origin, there: Sequence[Job]) -> Entry:
        job = self._admit(request, there)
        layout.cluster_of(configs.of_job(job, directory=None, script_text=None, cluster=origin.cluster), {})
        return Entry(id=f"{request.name}-{secrets.token_hex(4)}", job=job, origin=origin)

    def _find(self, name: str, verb: str) -> Entry:
        return self._checked(self._registry.find(name), name, verb)

    def _checked(self, entry: Entry | None, name: str, verb: str) -> Entry:
        """What was found, if it is there and the requester may."""
        if entry is None:
            names = [each.job.request.name for each in self._registry.all()]
            look = "See ringweave jobs, or say with --on where else it is"
            raise admitting.unknown(name, names, look=look, where="local")
        self._check(verb, entry.job.requester, self._clock())
        return entry

    def _check(self, verb: str, owner: str, now: float) -> None:
        admitting.check_permission(verb, requester=self._requester, owner=owner, permissions=self._permissions, now=now)

    def _supervise(self, entry: Entry) -> None:
        supervisor.ensure(self._state, entry.id, entry.origin.environ)

    def _is_over(self, job_id: str) -> bool:
        entry = self._registry.load(job_id)
        if entry is None:
            return True
        if _needs_supervisor(entry.job):
            self._supervise(entry)
        return as_asked(entry.job, self._clock()).record.state.is_end

    def _view(self, entry: Entry, *, with_events: bool = False) -> JobView:
        events = self._registry.events(entry.id) if with_events else ()
        files = str(job_folder(self._state, entry.id).root / "runs")
        return views.view(as_asked(entry.job, self._clock()), place="local", events=events, files=files)


def open_service(environ: Mapping[str, str]) -> LocalService:
    """The service of the user who runs this process, with the policy of this machine, or else of the user.

    Raises:
        JobError: The policy file is wrong.
        LaunchError: The registry cannot be used.
    """
    return LocalService(
        platformdirs.user_state_path("ringweave"),
        requester=submitting.os_user(),
        environ=environ,
        rules=submitting.rules_here(),
    )


def _objects(entry: Entry) -> tuple[Rendered, ...]:
    job, origin = entry.job, entry.origin
    config = origin.config(job)
    cluster = topology.dumps(layout.cluster_of(config, {}))
    return (
        Rendered(name="config.json", text=configs.dumps(config)),
        Rendered(name="cluster.yaml", text=cluster),
    )


def _needs_supervisor(job: Job) -> bool:
    """Something may have to be done for it though nobody asks for anything."""
    return not is_over(job) or job.desired.delete or job.request.ttl_s is not None
