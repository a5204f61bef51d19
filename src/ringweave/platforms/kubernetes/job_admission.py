"""Admission of TrainingJobs: known requester, SubjectAccessReview, worker split and size of the ConfigMap."""

import asyncio
from collections.abc import Callable

from ringweave.errors import JobError, RingweaveError, explain
from ringweave.jobs import admission
from ringweave.jobs import request as jobs_request
from ringweave.jobs.admission import Permission, PermissionCache
from ringweave.jobs.records import Job
from ringweave.platforms.kubernetes import api_client, job_resource, objects
from ringweave.platforms.kubernetes.api_client import KubernetesClient, Object
from ringweave.platforms.kubernetes.objects import JobOwner, PodSettings


class AdmissionRefusedError(RingweaveError):
    """Job that is not admitted; `code` is the condition's reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class JobAdmission:
    """Admission of jobs, with cached permissions for each namespace and set of groups."""

    def __init__(self, client: KubernetesClient, settings: PodSettings, clock: Callable[[], float]) -> None:
        """`clock` returns seconds since 1970."""
        self._client, self._settings, self._clock = client, settings, clock
        self._caches: dict[tuple[str, tuple[str, ...]], PermissionCache] = {}
        self._lock = asyncio.Lock()

    async def admit(self, resource: Object) -> Job:
        """Return the admitted job of the resource.

        Raises:
            AdmissionRefusedError: The job may not run; the text has the reason and a hint.
            LaunchError: The API server does not answer now.
        """
        requester = job_resource.requester_of(resource)
        if not requester:
            raise AdmissionRefusedError("RequesterUnknown", _NO_REQUESTER)
        try:
            request = job_resource.request_from_resource(resource)
            most = max(request.split.counts or (0,))
            if request.mode in jobs_request.SERVER_MODES and most > objects.MAX_SERVER_WORKERS_PER_NODE:
                raise AdmissionRefusedError("TooManyWorkersForServer", _too_many_for_server(request.mode, most))
            if request.elastic is not None and most > objects.MAX_ELASTIC_WORKERS_PER_NODE:
                raise AdmissionRefusedError("TooManyWorkersForElastic", _too_many_on_node(most))
            loop = asyncio.get_running_loop()
            async with self._lock:  # one question at a time, and none twice
                job = await asyncio.to_thread(
                    admission.admit_job,
                    request,
                    requester=requester,
                    existing=(),  # the API server has reserved the name already
                    permissions=self._permission_cache(resource, loop),
                    now=self._clock(),
                )
            if request.image is None and self._settings.image is None:
                raise AdmissionRefusedError("NoImage", _NO_IMAGE)
            objects.config_map(job, JobOwner.from_resource(resource), resource["spec"].get("source"))
        except JobError as error:
            raise AdmissionRefusedError(_refusal_code(error), str(error)) from error
        return job

    def _permission_cache(self, resource: Object, loop: asyncio.AbstractEventLoop) -> PermissionCache:
        namespace, groups = resource["metadata"]["namespace"], job_resource.groups_of(resource)

        def authorise(requester: str, verb: str) -> Permission:
            asked = api_client.fetch_permission(self._client, namespace, verb, user=requester, groups=groups)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        if (namespace, groups) not in self._caches:
            self._caches[namespace, groups] = PermissionCache(authorise)
        return self._caches[namespace, groups]


def _too_many_for_server(mode: str, num_workers: int) -> str:
    most = objects.MAX_SERVER_WORKERS_PER_NODE
    expected = f"at most {most} with mode {mode}, whose credentials one Secret holds"
    do = "Share them out over more nodes, or use mode balanced"
    return explain("workers of a node", got=num_workers, expected=expected, do=do)


def _too_many_on_node(num_workers: int) -> str:
    expected = (
        f"at most {objects.MAX_ELASTIC_WORKERS_PER_NODE} in an elastic job, whose spare credentials one Secret holds"
    )
    do = "Share them out over more nodes, or leave elastic out"
    return explain("workers of a node", got=num_workers, expected=expected, do=do)


def _refusal_code(error: JobError) -> str:
    text = str(error)
    if text.startswith(f"{api_client.SUBMIT_VERB} by "):
        return "Forbidden"
    return "ConfigTooLarge" if text.startswith("bytes of the ConfigMap") else "Invalid"


_NO_REQUESTER = (
    "requester: none, expected the user who made the job. Submit it with ringweave submit --on kubernetes, write "
    "spec.requester.username as printed by kubectl auth whoami, or let the admission policies of deploy/ set it."
)
_NO_IMAGE = (
    "image: none, expected a container image with Python and ringweave. Write spec.image, or start the operator "
    "with --image."
)
