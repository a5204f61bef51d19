"""Whether the roles of the cluster let somebody use a verb on TrainingJobs; `submit` is a verb of our own."""

from collections.abc import Sequence

from ringweave.jobs.admission.permissions import Permission
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.api import kinds
from ringweave.launch.kubernetes.api.client import Client

SUBMIT = "submit"


async def permission(
    client: Client, namespace: str, verb: str, *, user: str | None = None, groups: Sequence[str] = ()
) -> Permission:
    """What the API server says.

    Args:
        client: Who asks it.
        namespace: Of the jobs.
        verb: What they want to do.
        user: Who wants to; None: whoever asks.
        groups: Of the user.

    Raises:
        ApiError: Who asks may not ask.
        LaunchError: Nobody answered.
    """
    attributes = {"namespace": namespace, "verb": verb, "group": names.GROUP, "resource": names.PLURAL}
    kind = kinds.SELF_ACCESS_REVIEWS if user is None else kinds.ACCESS_REVIEWS
    who = {} if user is None else {"user": user, "groups": list(groups)}
    status = (await client.create(kind, None, {"spec": {**who, "resourceAttributes": attributes}})).get("status", {})
    if status.get("allowed"):
        return Permission(allowed=True, text=status.get("reason", "") or "the roles of the cluster", any_owner=True)
    said = status.get("reason") or status.get("evaluationError") or "no role says so"
    return Permission(allowed=False, text=f"no role allows {verb} on {names.PLURAL}.{names.GROUP} ({said})")
