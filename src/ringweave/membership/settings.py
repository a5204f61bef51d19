"""Settings of a membership: bounds on the number of members, and timeouts."""

from dataclasses import dataclass

from ringweave.errors import UsageError
from ringweave.membership.failure_detector import HEARTBEAT_TIMEOUT, TimeoutPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberBounds:
    """Minimum and maximum number of members of a job; prints as `parse_bounds` reads it."""

    min_members: int
    """The job does not go on with fewer."""
    max_members: int
    """The job admits no more."""

    def __str__(self) -> str:
        return f"{self.min_members}:{self.max_members}"


def parse_bounds(text: str) -> MemberBounds:
    """Return the bounds that `3:8` means; `4` alone means at least four, at most four.

    Raises:
        UsageError: The text is not of that form.
    """
    min_text, has_max, max_text = text.partition(":")
    parts = (min_text, max_text if has_max else min_text)
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts) or not (
        1 <= int(parts[0]) <= int(parts[1])
    ):
        raise UsageError(
            "--elastic",
            got=text,
            expected="MIN:MAX, two whole numbers with 1 <= MIN <= MAX",
            do="Write 3:8 to go on with 3 to 8 workers",
        )
    return MemberBounds(min_members=int(parts[0]), max_members=int(parts[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipSettings:
    """Settings of a coordinator."""

    bounds: MemberBounds
    expected: int
    """Members that the first generation waits for; fewer suffice after `member_wait_s`."""
    member_wait_s: float = 60.0
    """Longest wait of the job for members that it cannot go on without."""
    takeover_wait_s: float = 1.5
    """Minimum wait of a coordinator that takes over for members that have not reported to it."""
    has_external_state: bool = False
    """The job's state is not only with the members: when no member has it any more, others may begin with it again."""
    heartbeat_timeout: TimeoutPolicy = HEARTBEAT_TIMEOUT
    """Longest silence of a member."""
