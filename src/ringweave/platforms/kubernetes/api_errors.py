"""Errors of the Kubernetes API server, by kind; importable without aiohttp."""

from collections.abc import Mapping
from typing import Any

from ringweave.errors import LaunchError, explain


class ApiError(LaunchError):
    """Failure answer of the API server."""

    def __init__(self, text: str, *, status: int, reason: str, message: str) -> None:
        super().__init__(text)
        self.status = status
        """HTTP status code."""
        self.reason = reason
        """One word: `NotFound`, `AlreadyExists`, `Conflict`, `Invalid`, `Forbidden`, `Expired`."""
        self.message = message
        """Message of the server."""

    @property
    def is_not_found(self) -> bool:
        """Return whether the object does not exist."""
        return self.status == 404

    @property
    def already_exists(self) -> bool:
        return self.reason == "AlreadyExists"

    @property
    def is_stale(self) -> bool:
        """Return whether the object was changed or replaced meanwhile; read it again."""
        is_another = self.status == 422 and "metadata.uid" in self.message  # the answer to a patch with a uid
        return is_another or (self.status == 409 and not self.already_exists)

    @property
    def is_refusal(self) -> bool:
        """Return whether the request itself is wrong or not allowed, so that a retry does not help."""
        return self.status in (400, 403, 405, 413, 415, 422) and not self.is_stale


def error_from_answer(what: str, status: int, answer: Mapping[str, Any]) -> ApiError:
    """Return the error of an answer: a Status object, or the body that a proxy made."""
    reason = str(answer.get("reason") or "Unknown")
    message = str(answer.get("message") or "no message")
    do = _FIXES.get(reason, "Check the API server and its log")
    text = explain(what, got=f"{status} {reason}", expected="an answer of the API server", do=f"{message}. {do}")
    return ApiError(text, status=status, reason=reason, message=message)


def unreachable_error(server: str, error: Exception) -> LaunchError:
    """Return the error for a server that does not answer."""
    got = str(error) or type(error).__name__
    do = "Check the kubeconfig (kubectl cluster-info shows whether kubectl gets there), and the network"
    return LaunchError(explain("Kubernetes API server", got=got, expected="an answer", do=do, where=server))


_FIXES = {
    "Forbidden": "Ask for a role that allows it (kubectl auth can-i --list shows your permissions)",
    "Unauthorized": "Log in again: the credentials of the kubeconfig are not accepted",
    "NotFound": "Check the name and the namespace; if the resource itself is unknown, apply deploy/base first",
    "Conflict": "It was changed at the same time; try again",
}
