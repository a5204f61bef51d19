"""May this job run: who asks is known, a SubjectAccessReview allows it, it can be split, its config has room."""

import asyncio
from collections.abc import Callable

from ringweave.errors import JobError, RingweaveError, explain
from ringweave.jobs.admission import admitting
from ringweave.jobs.admission.permissions import Permission, PermissionCache
from ringweave.jobs.life.records import Job
from ringweave.launch.groups import config
from ringweave.launch.kubernetes.api import permitting
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.objects import configs, lodging
from ringweave.launch.kubernetes.objects.owning import Owner
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.resource import reading


class RefusalError(RingweaveError):
    """A job is not admitted; `code` is the condition's reason."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Admission:
    """Admits jobs; remembers permissions for as long as they are believed, each namespace and set of groups apart."""

    def __init__(self, client: Client, settings: PodSettings, clock: Callable[[], float]) -> None:
        """`clock` tells seconds since 1970."""
        self._client, self._settings, self._clock = client, settings, clock
        self._caches: dict[tuple[str, tuple[str, ...]], PermissionCache] = {}
        self._lock = asyncio.Lock()

    async def admit(self, resource: Object) -> Job:
        """The job that the resource becomes.

        Raises:
            RefusalError: It may not run; the text says why and what helps.
            LaunchError: It cannot be known now.
        """
        requester = reading.requester_of(resource)
        if not requester:
            raise RefusalError("RequesterUnknown", _NOBODY)
        try:
            request = reading.request_of(resource)
            if request.mode in config.SERVED and request.num_workers > lodging.MAX_WORKERS:
                raise RefusalError("TooManyForServer", _too_many(request.mode, request.num_workers))
            if (
                request.elastic is not None
                and (most := max(request.split.counts or (0,))) > lodging.MAX_WORKERS_OF_NODE
            ):
                raise RefusalError("TooManyForElastic", _too_many_of_a_node(most))
            loop = asyncio.get_running_loop()
            async with self._lock:  # one question at a time, and none twice
                job = await asyncio.to_thread(
                    admitting.admit,
                    request,
                    requester=requester,
                    there=(),  # the API server has given the name away already
                    permissions=self._cache(resource, loop),
                    now=self._clock(),
                )
            if request.image is None and self._settings.image is None:
                raise RefusalError("NoImage", _NO_IMAGE)
            configs.config_map(job, Owner.of(resource), resource["spec"].get("source"))
        except JobError as error:
            raise RefusalError(_code(error), str(error)) from error
        return job

    def _cache(self, resource: Object, loop: asyncio.AbstractEventLoop) -> PermissionCache:
        namespace, groups = resource["metadata"]["namespace"], reading.groups_of(resource)

        def authorise(requester: str, verb: str) -> Permission:
            asked = permitting.permission(self._client, namespace, verb, user=requester, groups=groups)
            return asyncio.run_coroutine_threadsafe(asked, loop).result()

        if (namespace, groups) not in self._caches:
            self._caches[namespace, groups] = PermissionCache(authorise)
        return self._caches[namespace, groups]


def _too_many(mode: str, num_workers: int) -> str:
    expected = f"at most {lodging.MAX_WORKERS} with mode {mode}, whose credentials one Secret holds"
    return explain("workers", got=num_workers, expected=expected, do="Ask for fewer, or take mode balanced")


def _too_many_of_a_node(num_workers: int) -> str:
    expected = f"at most {lodging.MAX_WORKERS_OF_NODE} in an elastic job, whose spare credentials one Secret holds"
    do = "Share them out over more nodes, or leave elastic out"
    return explain("workers of a node", got=num_workers, expected=expected, do=do)


def _code(error: JobError) -> str:
    text = str(error)
    if text.startswith(f"{permitting.SUBMIT} by "):
        return "Forbidden"
    return "ConfigTooLarge" if text.startswith("bytes of the ConfigMap") else "Invalid"


_NOBODY = (
    "requester: nobody, expected the user who made the job. Submit it with ringweave submit --on kubernetes, write "
    "spec.requester.username as kubectl auth whoami says it, or have the admission policies of deploy/ set it."
)
_NO_IMAGE = (
    "image: none, expected a container image with Python and ringweave. Write spec.image, or have the operator run "
    "with --image."
)
