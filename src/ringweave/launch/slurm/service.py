"""Jobs on Slurm as the commands see them; `--on slurm`."""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import platformdirs

from ringweave.errors import LaunchError, UnknownJobError
from ringweave.jobs.admission import admitting, policy
from ringweave.jobs.admission.permissions import PermissionCache
from ringweave.jobs.admission.policy import Policy
from ringweave.jobs.life import verbs
from ringweave.jobs.life.records import Job
from ringweave.jobs.requests.request import Request
from ringweave.launch.groups import config as configs
from ringweave.launch.groups import layout
from ringweave.launch.local.jobs import logs
from ringweave.launch.services import submitting, views
from ringweave.launch.services.farewells import Farewells
from ringweave.launch.services.service import LogLine, LogQuery, Rendered, Service, Submission
from ringweave.launch.services.views import JobView
from ringweave.launch.slurm import tending
from ringweave.launch.slurm.asking import requesting
from ringweave.launch.slurm.asking.commands import Slurm, SlurmSilentError
from ringweave.launch.slurm.leases import Patience
from ringweave.launch.slurm.registry import Entry, Registry
from ringweave.launch.slurm.tending import Tended, Tending


class SlurmService(Service):
    """Jobs of one Slurm cluster, in a folder that its machines share."""

    def __init__(
        self,
        root: Path,
        slurm: Slurm,
        *,
        requester: str,
        environ: Mapping[str, str],
        rules: Policy = policy.OPEN,
        patience: Patience | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Jobs of a folder.

        Args:
            root: Where the jobs' folders are; made if need be.
            slurm: The cluster.
            requester: The OS user who asks.
            environ: What jobs that are submitted here inherit; sbatch finds its own settings there too.
            rules: Who may do what.
            patience: How long things may be silent.
            clock: Seconds since 1970.
        """
        self._registry, self._slurm = Registry(root), slurm
        self._requester, self._environ, self._clock = requester, dict(environ), clock
        self._permissions = PermissionCache(rules.permission)
        self._farewells = Farewells()
        self._tending = Tending(
            self._registry, slurm, environ=environ, patience=patience or Patience(), clock=clock, sleep=time.sleep
        )

    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Admit the request, record its job, and ask Slurm for its allocation."""
        submitting.refuse_elsewhere(request, "slurm")
        self._admit(request, [each.job for each in self._registry.all()])  # before anything that it names is looked at
        origin = submitting.origin_of(request, base, self._environ, script_text)
        hosts = self._slurm.hosts(self._environ)

        def make(there: Sequence[Job]) -> Entry:
            job = self._admit(request, there)
            requesting.check(job, hosts)
            layout.cluster_of(configs.of_job(job, directory=None, script_text=None), {})
            components = requesting.components(job, {host.name for host in hosts})
            job_id = f"{request.name}-{secrets.token_hex(4)}"
            return Entry(id=job_id, job=job, origin=origin, components=components)

        if dry_run:
            entry = make([each.job for each in self._registry.all()])
            return Submission(job=views.view(entry.job, place="slurm"), objects=self._objects(entry))
        entry = self._registry.submit(make)
        try:
            tended = self._tending.tend(request.name, may_ask=True)
        except SlurmSilentError:
            raise  # it may have taken the job: what is recorded finds that out
        except Exception as error:
            self._check_refused(entry, error)
            raise
        return Submission(job=self._view(tended or Tended(entry=entry, allocation=None)), objects=self._objects(entry))

    def jobs(self) -> Sequence[JobView]:
        """All jobs that the requester may see."""
        now = self._clock()
        self._check("jobs", self._requester, now)
        may_see_all = self._permissions.permission(self._requester, "jobs", now).any_owner
        entries = [each for each in self._registry.all() if may_see_all or each.job.requester == self._requester]
        found = [self._tending.tend(entry.job.request.name) for entry in entries]
        return [self._view(tended) for tended in found if tended is not None]

    def job(self, name: str) -> JobView:
        """One job, with its events."""
        entry = self._registry.find(name)  # once: it may be forgotten at any moment, also by the look at it
        tended = None
        if entry is not None:
            self._check("status", entry.job.requester, self._clock())
            self._farewells.listen(self._registry.folder(name).root, entry.job)
            tended = self._tending.tend(name)
        if tended is not None:
            return self._view(tended, with_events=True)
        gone = self._farewells.last(name)
        if gone is None:
            raise self._unknown(name)
        return views.view(gone, place="slurm")

    def act(self, name: str, verb: str) -> JobView:
        """Ask something of a job; what needs its controller is seen by it in a moment."""
        entry = self._find(name, verb)
        self._tended(entry)
        with self._registry.admitting() as there, self._registry.changing(name) as latest:
            if latest is not None:
                if verb == "retry":
                    self._check_retry(latest.job, there)
                self._registry.ask(name, verbs.ask(verb, latest.job, self._clock()))
                entry = latest
        tended = self._tending.tend(name, may_ask=True)
        return self._view(tended or Tended(entry=entry, allocation=None), with_events=tended is not None)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """What its workers printed."""
        entry = self._find(name, "logs")
        submitting.check_query(entry.job, which)
        return logs.read(self._registry.folder(name), which, is_over=lambda: self._is_over(name), sleep=time.sleep)

    def _check_refused(self, entry: Entry, error: Exception) -> None:
        """Forget a job that Slurm refused: nothing of it is there, and its name is free again.

        Raises:
            LaunchError: Slurm has taken it, and what went wrong came after that.
        """
        name = entry.job.request.name
        with self._registry.changing(name) as latest:
            if latest is None or latest.id != entry.id:
                return
            job_id = latest.hold.allocation
            if job_id is None:
                self._registry.forget(entry)
                return
        look = f"Look again with ringweave status {name} --on slurm"
        raise LaunchError(f"{error} Slurm has taken job {name}: it is Slurm job {job_id}. {look}.") from error

    def _admit(self, request: Request, there: Sequence[Job]) -> Job:
        return admitting.admit(
            request, requester=self._requester, there=there, permissions=self._permissions, now=self._clock()
        )

    def _check_retry(self, job: Job, there: Sequence[Job]) -> None:
        admitting.check_retry(job, there=there, permissions=self._permissions, now=self._clock())

    def _find(self, name: str, verb: str) -> Entry:
        entry = self._registry.find(name)
        if entry is None:
            raise self._unknown(name)
        self._check(verb, entry.job.requester, self._clock())
        return entry

    def _unknown(self, name: str) -> UnknownJobError:
        names = [each.job.request.name for each in self._registry.all()]
        return admitting.unknown(name, names, look="See ringweave jobs --on slurm", where="slurm")

    def _tended(self, entry: Entry) -> Tended:
        tended = self._tending.tend(entry.job.request.name)
        if tended is None:
            raise self._unknown(entry.job.request.name)
        return tended

    def _check(self, verb: str, owner: str, now: float) -> None:
        admitting.check_permission(verb, requester=self._requester, owner=owner, permissions=self._permissions, now=now)

    def _is_over(self, name: str) -> bool:
        tended = self._tending.tend(name)
        return tended is None or tending.told(tended, self._clock()).record.state.is_end

    def _objects(self, entry: Entry) -> tuple[Rendered, ...]:
        config = entry.origin.config(entry.job)
        return (
            Rendered(name="batch script", text=self._tending.script(entry)),
            Rendered(name="config.json", text=configs.dumps(config)),
        )

    def _view(self, tended: Tended, *, with_events: bool = False) -> JobView:
        name = tended.entry.job.request.name
        events = self._registry.events(name) if with_events else ()
        files = str(self._registry.folder(name).root / "runs")
        return views.view(tending.told(tended, self._clock()), place="slurm", events=events, files=files)


def open_service(environ: Mapping[str, str]) -> SlurmService:
    """The service of the user who runs this process, on the cluster that Slurm's commands reach.

    Raises:
        JobError: The policy file is wrong.
        LaunchError: Slurm does not answer, or the folder cannot be used.
    """
    slurm = Slurm()
    root = platformdirs.user_state_path("ringweave") / "slurm" / slurm.cluster_name()
    return SlurmService(root, slurm, requester=submitting.os_user(), environ=environ, rules=submitting.rules_here())
