"""One pass over one TrainingJob: look, decide, do. Level-triggered: it may be called at any time, and again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringweave.errors import LaunchError
from ringweave.jobs.admission.permissions import DENY_S
from ringweave.jobs.life import actions
from ringweave.jobs.life.advancing import is_to_run
from ringweave.jobs.life.reconciling import reconcile
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client, Object
from ringweave.launch.kubernetes.operating import looking
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission, RefusalError
from ringweave.launch.kubernetes.operating.looking import Key, Look
from ringweave.launch.kubernetes.operating.refusing import RefusedError
from ringweave.launch.kubernetes.resource import reading, refusals, telling

Listener = Callable[[Look], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What a pass came to."""

    again: bool = False
    """Something was done: look again at once."""
    wake_s: float | None = None
    """Look again at this time even if nothing happens."""
    is_alive: bool = False
    """There is a job, and this operator leads it."""


class Controller:
    """Leads TrainingJobs; keeps nothing between two passes but what can be lost."""

    def __init__(
        self,
        client: Client,
        actor: Actor,
        admission: Admission,
        clock: Callable[[], float],
        listener: Listener = lambda _: None,
        gone: Callable[[Key], None] = lambda _: None,
    ) -> None:
        """Needs hands and a clock.

        Args:
            client: Reads.
            actor: Writes.
            admission: Says who may.
            clock: Seconds since 1970.
            listener: Told every look at an admitted job: the desk, which hands out orders.
            gone: Told of every job that is not there.
        """
        self._client, self._actor, self._admission = client, actor, admission
        self._clock, self._listener, self._gone = clock, listener, gone

    async def reconcile(self, key: Key) -> Pass:
        """Do what is to be done now for the TrainingJob.

        Raises:
            ApiError: The API server refused something; what is left is found by the next pass.
        """
        resource = await looking.resource(self._client, key)
        if resource is None:
            self._gone(key)
        if resource is None or not reading.is_ours(resource):
            return Pass()
        is_going = "deletionTimestamp" in resource["metadata"]
        if names.FINALIZER not in resource["metadata"].get("finalizers", ()):
            if is_going:
                return Pass()
            await self._hold(resource)
            return Pass(again=True)
        if "record" not in resource.get("status", {}):
            if is_going:
                await self._actor.forget(resource)
                return Pass()
            return await self._admit(resource)
        return await self._lead(resource)

    async def _hold(self, resource: Object) -> None:
        """Keep the job until all of it is gone, from before anything of it is made."""
        metadata = resource["metadata"]
        body = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": [*metadata.get("finalizers", ()), names.FINALIZER],
            }
        }
        await self._client.patch(kinds.TRAINING_JOBS, metadata["namespace"], metadata["name"], body)

    async def _admit(self, resource: Object) -> Pass:
        now = self._clock()
        generation = resource["metadata"]["generation"]
        try:
            job = await self._admission.admit(resource)
        except RefusalError as refusal:
            before = resource.get("status", {})
            told = telling.refused(before, reason=refusal.code, text=str(refusal), generation=generation, now=now)
            if told != before:
                await self._actor.write_status(resource, told)
            # Roles change, and nobody tells us.
            return Pass(wake_s=now + DENY_S)
        status = telling.status_of(job, before={}, generation=generation, events=(), now=now)
        await self._actor.write_status(resource, status)
        return Pass(again=True)

    async def _lead(self, resource: Object) -> Pass:
        job = reading.job_of(resource)
        assert job is not None
        runs = is_to_run(job, job.record)
        seen = await looking.objects(self._client, looking.Owner.of(resource), runs=runs)
        look = Look(resource=resource, job=job, seen=seen)
        now = self._clock()
        wanted = reconcile(job, seen.observed(now), now)
        self._listener(look)
        wake_s = min((action.at_s for action in wanted if isinstance(action, actions.Wake)), default=None)
        todo = [action for action in wanted if not isinstance(action, actions.Wake)]
        try:
            await self._actor.do(look, todo)
        except RefusedError as refused:
            await self._actor.tell_refused(look, refused)
            raise
        is_current = resource["metadata"]["generation"] == resource["status"].get("observedGeneration")
        is_told = is_current and refusals.reason_in(resource["status"]) is None
        if not is_told and not any(isinstance(action, actions.SaveRecord) for action in todo) and not _is_over(todo):
            await self._actor.save(look, look.job, ())
        return Pass(again=bool(todo) and not _is_over(todo), wake_s=wake_s, is_alive=not _is_over(todo))


def _is_over(todo: Sequence[actions.Action]) -> bool:
    return any(isinstance(action, actions.Forget) for action in todo)


def is_worth_a_retry(error: LaunchError) -> bool:
    """Another look may find it otherwise at once: somebody else was faster."""
    return getattr(error, "is_stale", False)
