"""Failure answers of the fake API server, with the texts and codes of a real one."""

from collections.abc import Sequence
from typing import Any


class ApiFailure(Exception):  # noqa: N818 - it is an answer, no error of the fake
    """Failure answer of the API."""

    def __init__(self, status: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.details = status, reason, message, details

    def to_status(self) -> dict[str, Any]:
        """Return the Status object."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.status,
        }


def not_found_failure(plural: str, group: str, name: str) -> ApiFailure:
    """Return the failure for a missing object."""
    what = f"{plural}.{group}" if group else plural
    return ApiFailure(404, "NotFound", f'{what} "{name}" not found', name=name, group=group, kind=plural)


def conflict_failure(plural: str, group: str, name: str, why: str) -> ApiFailure:
    """Return the failure for an object that was changed meanwhile."""
    what = f"{plural}.{group}" if group else plural
    text = f'Operation cannot be fulfilled on {what} "{name}": {why}'
    return ApiFailure(409, "Conflict", text, name=name, group=group, kind=plural)


MODIFIED_TEXT = "the object has been modified; please apply your changes to the latest version and try again"


def invalid_failure(kind: str, group: str, name: str, problems: Sequence[str]) -> ApiFailure:
    """Return the failure for values that the schema or a rule forbids."""
    what = f"{kind}.{group}" if group else kind
    listed = problems[0] if len(problems) == 1 else "[" + ", ".join(problems) + "]"
    causes = [_failure_cause(problem) for problem in problems]
    text = f'{what} "{name}" is invalid: {listed}'
    return ApiFailure(422, "Invalid", text, name=name, group=group, kind=kind, causes=causes)


def _failure_cause(problem: str) -> dict[str, str]:
    """Split `spec.gpus: Required value` into its parts, as kubectl shows them."""
    field, _, message = problem.partition(": ")
    return {"reason": "FieldValueInvalid", "field": field, "message": message}
