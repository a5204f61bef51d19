"""What an API server refuses, as errors that callers can tell apart."""

from collections.abc import Mapping
from typing import Any

from ringweave.errors import LaunchError, explain


class ApiError(LaunchError):
    """The API server answered a request with a failure."""

    def __init__(self, text: str, *, status: int, reason: str, message: str) -> None:
        super().__init__(text)
        self.status = status
        """Code of HTTP."""
        self.reason = reason
        """One word: `NotFound`, `AlreadyExists`, `Conflict`, `Invalid`, `Forbidden`, `Expired`."""
        self.message = message
        """What the server says."""

    @property
    def is_gone(self) -> bool:
        """There is no such object."""
        return self.status == 404

    @property
    def is_taken(self) -> bool:
        """There is such an object already."""
        return self.reason == "AlreadyExists"

    @property
    def is_stale(self) -> bool:
        """Somebody else changed the object, or it is another one by now; look again."""
        is_another = self.status == 422 and "metadata.uid" in self.message  # what a patch with a uid is told
        return is_another or (self.status == 409 and not self.is_taken)

    @property
    def is_refusal(self) -> bool:
        """The request itself is wrong or not allowed: to send it again does not help."""
        return self.status in (400, 403, 405, 413, 415, 422) and not self.is_stale


def from_answer(what: str, status: int, answer: Mapping[str, Any]) -> ApiError:
    """The error of an answer that is a Status object, or something that a proxy made up."""
    reason = str(answer.get("reason") or "Unknown")
    message = str(answer.get("message") or "no message")
    do = _MENDS.get(reason, "See what the API server says, and whether it is well")
    text = explain(what, got=f"{status} {reason}", expected="an answer of the API server", do=f"{message}. {do}")
    return ApiError(text, status=status, reason=reason, message=message)


def unreachable(server: str, error: Exception) -> LaunchError:
    """Nobody answers there."""
    got = str(error) or type(error).__name__
    do = "Check the kubeconfig (kubectl cluster-info shows whether kubectl gets there), and the network"
    return LaunchError(explain("Kubernetes API server", got=got, expected="an answer", do=do, where=server))


_MENDS = {
    "Forbidden": "Ask whoever runs the cluster for a role that allows it (kubectl auth can-i --list shows yours)",
    "Unauthorized": "Log in again: the credentials of the kubeconfig are not accepted",
    "NotFound": "Check the name and the namespace; if the resource itself is unknown, apply deploy/base first",
    "Conflict": "Somebody else changed it at the same time; try again",
}
