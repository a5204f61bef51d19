"""Jobs on Kubernetes as the commands see them; `--on kubernetes`. Users act as themselves: their own roles count."""

import asyncio
import contextlib
import io
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML

from ringweave.errors import JobError, LaunchError, explain
from ringweave.jobs.admission import admitting
from ringweave.jobs.life import verbs
from ringweave.jobs.requests.request import Request
from ringweave.launch.kubernetes import showing
from ringweave.launch.kubernetes.api import kinds, permitting
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.api.connecting import connection
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.logs import Logs
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.resource import reading
from ringweave.launch.kubernetes.resource.definition import REFUSED
from ringweave.launch.services import submitting
from ringweave.launch.services.service import LogLine, LogQuery, Rendered, Service, Submission
from ringweave.launch.services.views import JobView

ADMITTED_S = 10.0
"""How long a submit waits for the operator's word; after that the job is there and waits for the operator."""
_LOOK_S = 0.1
_Result = TypeVar("_Result")


class KubernetesService(Service):
    """TrainingJobs of one namespace, asked for as the user of the kubeconfig."""

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        namespace: str | None = None,
        clock: Callable[[], float] = time.time,
        admitted_s: float = ADMITTED_S,
    ) -> None:
        """Jobs of a namespace.

        Args:
            connect: Says where the API server is, and as whom.
            namespace: Whose jobs; None: the kubeconfig's.
            clock: Seconds since 1970.
            admitted_s: How long a submit waits for the operator's word.
        """
        self._connect, self._namespace = connect, namespace
        self._clock, self._admitted_s = clock, admitted_s

    def submit(
        self, request: Request, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        """Make the TrainingJob, and wait for the operator to admit it; a refused one is removed again."""
        _check_directory(request)
        submitting.refuse_elsewhere(request, "kubernetes")
        source = None if request.directory is not None else submitting.script_of(request, base, script_text)
        return self._run(lambda client: self._submit(client, request, source, dry_run=dry_run))

    def jobs(self) -> Sequence[JobView]:
        """All jobs of the namespace, oldest first."""
        found = self._run(lambda client: client.list(kinds.TRAINING_JOBS, self._where(client)))
        ordered = sorted(found, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        return [showing.view(each, self._clock()) for each in ordered]

    def job(self, name: str) -> JobView:
        """One job, with its events."""
        return showing.view(self._run(lambda client: self._find(client, name)), self._clock(), with_events=True)

    def act(self, name: str, verb: str) -> JobView:
        """Set what is asked of the job in its spec, or delete it."""
        return self._run(lambda client: self._act(client, name, verb))

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        """What its workers printed: kept logs of attempts that are gone, and those of Pods that are there."""
        resource = self._run(lambda client: self._find(client, name))
        submitting.check_query(showing.job_of(resource, self._clock()), which)
        return Logs(self._connect, Owner.of(resource), showing.job_of(resource, self._clock()), which).read()

    async def _submit(self, client: Client, request: Request, source: str | None, *, dry_run: bool) -> Submission:
        namespace = self._where(client)
        user = (await client.create(kinds.SELF_REVIEWS, None, {}))["status"]["userInfo"]
        body = reading.resource_of(
            request, namespace=namespace, source=source, username=user["username"], groups=user.get("groups") or ()
        )
        await self._check(client, request, user["username"])
        params = {"fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        try:
            made = await client.create(kinds.TRAINING_JOBS, namespace, body, **params)
        except ApiError as error:
            if error.is_taken:
                taken_by = showing.job_of(await self._find(client, request.name), self._clock())
                raise admitting.name_taken(taken_by, self._clock()) from error
            raise _refused(error, f"job {request.name}") from error
        told = made if dry_run else await self._admitted(client, made)
        objects = (Rendered(name=f"TrainingJob/{request.name}", text=_yaml(body)),)
        return Submission(job=showing.view(told, self._clock()), objects=objects)

    async def _check(self, client: Client, request: Request, username: str) -> None:
        """Name, permission, split, in the order of every place; the API server and the operator have the last word."""
        namespace = self._where(client)
        with contextlib.suppress(ApiError):  # there is none, or they may not look
            taken_by = await client.get(kinds.TRAINING_JOBS, namespace, request.name)
            raise admitting.name_taken(showing.job_of(taken_by, self._clock()), self._clock())
        permission = await permitting.permission(client, namespace, permitting.SUBMIT)
        if not permission.allowed:
            raise admitting.not_allowed(permitting.SUBMIT, username, permission)
        if request.split.counts is None:
            raise JobError(request.split.refusal(f"job {request.name}"))

    async def _admitted(self, client: Client, made: Object) -> Object:
        """The job once the operator has spoken, or has not for too long."""
        metadata = made["metadata"]
        deadline_s = self._clock() + self._admitted_s
        while self._clock() < deadline_s:
            status = made.get("status", {})
            if "record" in status:
                return made
            if status.get("state") == REFUSED:
                preconditions = {"uid": metadata["uid"]}
                await client.delete(
                    kinds.TRAINING_JOBS, metadata["namespace"], metadata["name"], preconditions=preconditions
                )
                raise JobError(status["message"])
            await asyncio.sleep(_LOOK_S)
            made = await self._find(client, metadata["name"])
        return made

    async def _act(self, client: Client, name: str, verb: str) -> JobView:
        resource = await self._find(client, name)
        job = showing.job_of(resource, self._clock())
        asked = verbs.ask(verb, job, self._clock())
        namespace, metadata = self._where(client), resource["metadata"]
        try:
            if asked.delete:
                await client.delete(kinds.TRAINING_JOBS, namespace, name, preconditions={"uid": metadata["uid"]})
            else:
                spec = reading.changes_of(job.desired, asked)
                body = {"metadata": {"uid": metadata["uid"]}, "spec": spec}
                resource = await client.patch(kinds.TRAINING_JOBS, namespace, name, body)
        except ApiError as error:
            raise _refused(error, f"{verb} of job {name}") from error
        return showing.view(resource, self._clock(), with_events=True)

    async def _find(self, client: Client, name: str) -> Object:
        namespace = self._where(client)
        try:
            return await client.get(kinds.TRAINING_JOBS, namespace, name)
        except ApiError as error:
            if not error.is_gone:
                raise _refused(error, f"job {name}") from error
            there = await client.list(kinds.TRAINING_JOBS, namespace)
            names = [each["metadata"]["name"] for each in there]
            where = f"kubernetes, namespace {namespace}"
            raise admitting.unknown(name, names, look="See ringweave jobs --on kubernetes", where=where) from error

    def _where(self, client: Client) -> str:
        return self._namespace or client.namespace

    def _run(self, work: Callable[[Client], Coroutine[Any, Any, _Result]]) -> _Result:
        async def run() -> _Result:
            async with Client(self._connect) as client:
                return await work(client)

        return asyncio.run(run())


def open_service(environ: Mapping[str, str]) -> KubernetesService:
    """The service of the cluster and the namespace that the kubeconfig's current context names.

    Raises:
        UsageError: The kubeconfig is wrong.
        LaunchError: There is none.
    """
    connection(environ)  # what is wrong with it is said now
    return KubernetesService(lambda: connection(environ))


def _check_directory(request: Request) -> None:
    """A folder on Kubernetes is one in the image; one beside the job file does not travel."""
    if request.directory is not None and not Path(request.directory).is_absolute():
        do = (
            "Put the folder into the image, and write where it is there; or leave directory out, and the script travels"
        )
        expected = "an absolute path in the container image"
        raise JobError(explain("directory", got=request.directory, expected=expected, do=do, where=request.name))


def _refused(error: ApiError, what: str) -> LaunchError | JobError:
    """A refusal of the API server as one of the request; what else went wrong stays what it is."""
    if error.status not in (403, 422):
        return error
    do = "Correct it" if error.status == 422 else "Ask whoever runs the cluster for the role ringweave-user"
    return JobError(f"{what}: {error.message} {do}. [kubernetes]")


def _yaml(body: Object) -> str:
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    yaml.dump(body, stream)
    return stream.getvalue()
