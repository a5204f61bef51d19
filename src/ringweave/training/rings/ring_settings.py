"""Settings of asynchronous training in rings, as a script gives them."""

from dataclasses import dataclass

from ringweave.errors import TrainingError, explain
from ringweave.training import speed_test


@dataclass(frozen=True, kw_only=True, slots=True)
class Asynchronous:
    """Settings of asynchronous training in rings, for modes `ps-hra` and `ps`."""

    rings: int | None = None
    """Number of rings; None means one per kind of workers, at least two. Mode `ps` ignores it."""
    local_steps: int = 0
    """Local steps of each ring from one push to the next, with the script's optimizer; the push runs meanwhile. Slow
    rings take as many steps, with fewer samples. 0 pushes the gradients of every step, and waits."""
    compensation: float = 0.0
    """Lambda of delay compensation, g + lambda g g (theta_now - theta_base). It costs the server a copy of the
    parameters for each ring, and changed no loss that was measured; its authors use 0.04."""

    speed_test_s: float = speed_test.START_TIMEOUT_S
    """Seconds that the speed test at the start waits for the last worker, before it fails with an error that names it.
    """

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.rings is not None and self.rings < 1:
            do = "Leave it out for one of each kind of workers"
            raise TrainingError(explain("rings", got=self.rings, expected="1 or more", do=do))
        if self.local_steps < 0:
            raise TrainingError(
                explain("local_steps", got=self.local_steps, expected="0 or more", do="Leave it out to push every step")
            )
        if not self.speed_test_s > 0:
            do = f"Leave it out for {speed_test.START_TIMEOUT_S:g} s"
            raise TrainingError(explain("speed_test_s", got=self.speed_test_s, expected="more than 0 seconds", do=do))
