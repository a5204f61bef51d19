"""Refusals of the fake API server, in the words and codes of a real one."""

from collections.abc import Sequence
from typing import Any


class Refused(Exception):  # noqa: N818 - it is an answer, no error of the fake
    """An answer other than success."""

    def __init__(self, status: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.details = status, reason, message, details

    def answer(self) -> dict[str, Any]:
        """The Status object."""
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


def not_found(plural: str, group: str, name: str) -> Refused:
    """There is no such object."""
    what = f"{plural}.{group}" if group else plural
    return Refused(404, "NotFound", f'{what} "{name}" not found', name=name, group=group, kind=plural)


def conflict(plural: str, group: str, name: str, why: str) -> Refused:
    """Somebody else changed it."""
    what = f"{plural}.{group}" if group else plural
    text = f'Operation cannot be fulfilled on {what} "{name}": {why}'
    return Refused(409, "Conflict", text, name=name, group=group, kind=plural)


CHANGED = "the object has been modified; please apply your changes to the latest version and try again"


def invalid(kind: str, group: str, name: str, problems: Sequence[str]) -> Refused:
    """Values that the schema or a rule forbids."""
    what = f"{kind}.{group}" if group else kind
    listed = problems[0] if len(problems) == 1 else "[" + ", ".join(problems) + "]"
    causes = [_cause(problem) for problem in problems]
    text = f'{what} "{name}" is invalid: {listed}'
    return Refused(422, "Invalid", text, name=name, group=group, kind=kind, causes=causes)


def _cause(problem: str) -> dict[str, str]:
    """`spec.gpus: Required value` in its parts, as kubectl shows them."""
    field, _, message = problem.partition(": ")
    return {"reason": "FieldValueInvalid", "field": field, "message": message}
