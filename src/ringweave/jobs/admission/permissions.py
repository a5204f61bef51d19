"""Who may do what: permissions, and a cache of them that forgets in time."""

from collections.abc import Callable
from dataclasses import dataclass

ALLOW_S = 300.0
"""How long a yes is believed."""
DENY_S = 30.0
"""How long a no is: shorter, since somebody who was just given a permission tries again at once."""
MAX_CACHED = 10_000
"""Answers kept; the oldest go first. A place has fewer users."""

VERBS = (
    *("submit", "jobs", "status", "why", "logs", "events"),
    *("stop", "delete", "retry", "suspend", "resume"),
)
"""Everything that can be asked of jobs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """Whether somebody may use a verb."""

    allowed: bool
    """They may."""
    text: str
    """Why, in words: which rule or role says so."""
    any_owner: bool = False
    """Also on other people's jobs."""
    max_gpus: int | None = None
    """GPUs of all their jobs that have not ended, the one asked for included; None: no limit."""


Authorise = Callable[[str, str], Permission]
"""(requester, verb) -> permission; raises where it cannot be known. Asks a policy file, or the platform."""


class PermissionCache:
    """Answers of an authoriser, each believed for a while.

    An error of the authoriser is passed on and never kept, so that it becomes neither a yes nor a no.
    """

    def __init__(self, authorise: Authorise) -> None:
        self._authorise = authorise
        self._answers: dict[tuple[str, str], tuple[float, Permission]] = {}

    def permission(self, requester: str, verb: str, now: float) -> Permission:
        """The answer, from the cache while it is believed.

        Args:
            requester: Who the platform says it is.
            verb: One of `VERBS`.
            now: Seconds on a clock that never goes back.
        """
        key = (requester, verb)
        known = self._answers.get(key)
        if known is not None and now < known[0]:
            return known[1]
        self._answers.pop(key, None)
        answer = self._authorise(requester, verb)
        while len(self._answers) >= MAX_CACHED:
            self._answers.pop(next(iter(self._answers)))
        self._answers[key] = (now + (ALLOW_S if answer.allowed else DENY_S), answer)
        return answer
