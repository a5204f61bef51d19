"""Restart policy of everything that is started again: workers, services, spares, nodes of a job, whole runs."""

from dataclasses import dataclass, replace

EARLY_S, EARLY_IF_USEFUL_S = 60.0, 10.0
"""A process that ended sooner was not worth its start. Of one that was of use the limit is shorter: its end says little
about the next one, and where faults are frequent, those that come back must not be fewer and fewer."""
MAX_OWN_FAILURES = 3
"""What fails by itself this often in a row is given up: its device is probably broken, or its script wrong."""
MAX_FAILED_STARTS = 10
"""What fails to start this often in a row is given up. That takes two to three minutes with the delays below: a longer
shortage on the machine needs a person."""
_SECOND_DELAY_S, _MAX_DELAY_S = 1.0, 30.0


def backoff_s(num_failures: int, *, first_s: float, max_s: float) -> float:
    """Return the delay after so many failures in a row: the first one's, doubled with each further one, up to a limit.

    Without failures it is the first delay too.
    """
    return min(max_s, first_s * 2.0 ** min(max(0, num_failures - 1), 20))


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """Restarts of one worker, service, spare or node, or of all workers together, by the ends in a row.

    The first restart has the first delay, the second in a row 1 s, doubling up to 30 s. A life that was not early
    begins the row anew. Each end gives another value, which a record may keep.
    """

    first_delay_s: float = 0.0
    max_failed_starts: int | None = MAX_FAILED_STARTS
    """None: it is never given up, since somebody else counts."""
    num_early_ends: int = 0
    """In a row."""
    num_failed_starts: int = 0
    """In a row: ended before it joined the others, or early if it does not say when it has joined."""
    num_own_failures: int = 0
    """In a row: failed by itself, not with others or by a signal."""
    due_s: float | None = None
    """Time of the next start."""

    @property
    def has_given_up(self) -> bool:
        """True if it is not restarted any more."""
        if self.max_failed_starts is None:
            return False
        return self.num_own_failures >= MAX_OWN_FAILURES or self.num_failed_starts >= self.max_failed_starts

    def after_end(
        self,
        lifetime_s: float,
        now_s: float,
        *,
        is_useful: bool = False,
        has_joined: bool | None = None,
        is_own_failure: bool | None = None,
    ) -> "RestartPolicy":
        """Return the policy after an end or a failed start, with the time of the next start.

        Args:
            lifetime_s: Seconds since its start.
            now_s: Time on the clock of `due_s`.
            is_useful: It is known to have been of use: it has trained, or somebody killed it.
            has_joined: It has joined the others; None if it does not say so.
            is_own_failure: It failed by itself; None if nothing ran that could.
        """
        is_early = lifetime_s < (EARLY_IF_USEFUL_S if is_useful else EARLY_S)
        has_failed_to_start = is_early if has_joined is None else not has_joined
        begins_row = is_own_failure is False or (is_useful and lifetime_s >= EARLY_S)
        num_own = self.num_own_failures if is_own_failure is None else (not begins_row) * self.num_own_failures
        found = replace(
            self,
            num_early_ends=self.num_early_ends + 1 if is_early else 0,
            num_failed_starts=self.num_failed_starts + 1 if has_failed_to_start else 0,
            num_own_failures=num_own + bool(is_own_failure),
        )
        delay_s = backoff_s(found.num_early_ends - 1, first_s=_SECOND_DELAY_S, max_s=_MAX_DELAY_S)
        delay_s = self.first_delay_s if found.num_early_ends <= 1 else delay_s
        return replace(found, due_s=None if found.has_given_up else now_s + delay_s)

    def starting_at(self, due_s: float | None) -> "RestartPolicy":
        """Return the policy with another time of the next start; None once it is started, or not started any more."""
        return replace(self, due_s=due_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether to start it now; `starting_at(None)` is the policy once it is started."""
        return self.due_s is not None and now_s >= self.due_s
