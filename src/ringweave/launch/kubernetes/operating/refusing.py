"""What the API server does not do for a job: what is tried again in silence, and what people are told."""

from collections.abc import Mapping

from ringweave.errors import LaunchError
from ringweave.jobs.life import actions
from ringweave.jobs.life.actions import Action
from ringweave.launch.kubernetes.api.failures import ApiError
from ringweave.launch.kubernetes.api.kinds import Kind
from ringweave.launch.kubernetes.resource.refusals import Refusal

PATIENCE_S = 5.0
"""A failure that is no refusal, such as a webhook that does not answer, is told of when it has lasted so long."""


class RefusedError(LaunchError):
    """Objects of a job are refused, or cannot be made: by a quota, PodSecurity, a webhook, a name that is taken."""

    def __init__(self, refused: list[Refusal]) -> None:
        super().__init__(f"objects of the job: {len(refused)} refused, expected none: {refused[0].message}")
        self.refusals = refused


class ForeignError(LaunchError):
    """The name of an object that is to be made is taken by one that is not this job's."""

    def __init__(self, kind: Kind, namespace: str, name: str) -> None:
        shows = f"kubectl -n {namespace} get {kind.plural} {name} -o yaml"
        self.message = f"{kind.kind} {name} is there already, and belongs to something else ({shows})"
        super().__init__(self.message)


class UnreadLogError(LaunchError):
    """The log of a Pod that is to go cannot be read now; the Pod stays for it a while."""


class Troubles:
    """Since when something fails for each job."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """uid of a job -> when an action of it first failed, of those that have failed ever since."""

    def forget(self, uid: str) -> None:
        """All went well."""
        self._since.pop(uid, None)

    def raise_worst(self, uid: str, failed: Mapping[Action, BaseException], now: float) -> None:
        """What is to be said of actions of a job that failed together.

        Raises:
            RefusedError: The API server refuses them, or has failed for too long.
            BaseException: Something else is the matter.
        """
        since_s = self._since.setdefault(uid, now)
        refused = {
            action: _refusal(action, error, is_old=now - since_s >= PATIENCE_S) for action, error in failed.items()
        }
        others = [failed[action] for action, refusal in refused.items() if refusal is None]
        if others:
            raise others[0]
        raise RefusedError([refusal for refusal in refused.values() if refusal]) from next(iter(failed.values()))


def _refusal(action: Action, error: BaseException, *, is_old: bool) -> Refusal | None:
    """None where another look may find it otherwise, or where nobody can be told."""
    if not isinstance(error, ApiError | ForeignError) or isinstance(action, actions.SaveRecord | actions.Forget):
        return None
    is_refusal = isinstance(error, ForeignError) or error.is_refusal
    if isinstance(error, ApiError) and (error.is_stale or not (is_refusal or is_old)):
        return None
    node = getattr(action, "node", None)
    return Refusal(node=node, message=error.message, what=_WHAT[type(action)], is_failure=not is_refusal)


_WHAT: Mapping[type, str] = {
    actions.CreateConfig: "its config",
    actions.CreateGroup: "the Pod",
    actions.Regather: "a change of the Pod",
    actions.OpenGate: "the opening of the gate",
    actions.StopGroup: "the end of the Pod",
    actions.DeleteGroup: "the removal of the Pod",
    actions.DeleteConfig: "the removal of its config",
}
