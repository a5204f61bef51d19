"""What a job wants of its membership."""

from dataclasses import dataclass

from ringweave.errors import UsageError, explain
from ringweave.membership.rules.rhythm import SILENCE, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """How many members a job may have; prints as `parse` reads it."""

    least: int
    """With fewer it does not go on."""
    most: int
    """More are not let in."""

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def parse(text: str) -> Bounds:
    """The bounds that `3:8` means; `4` alone means at least four, at most four.

    Raises:
        UsageError: It means none.
    """
    least, has_most, most = text.partition(":")
    parts = (least, most if has_most else least)
    if not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts) or not (
        1 <= int(parts[0]) <= int(parts[1])
    ):
        raise UsageError(
            explain(
                "--elastic",
                got=text,
                expected="MIN:MAX, two whole numbers with 1 <= MIN <= MAX",
                do="Write 3:8 to go on with 3 to 8 workers",
            )
        )
    return Bounds(least=int(parts[0]), most=int(parts[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What a coordinator goes by."""

    bounds: Bounds
    expected: int
    """Members that the first epoch waits for; fewer will do once patience has run out."""
    patience_s: float = 60.0
    """How long the job waits for members that it cannot go on without."""
    recovery_s: float = 1.5
    """How long a coordinator that takes over waits at least for the members that it has not heard of."""
    is_kept_elsewhere: bool = False
    """The job's state is not with the members alone: when nobody is left who has it, others may begin with it again."""
    silence: Tolerance = SILENCE
    """How long a member may say nothing."""
