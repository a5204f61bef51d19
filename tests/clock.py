"""A clock that only the test moves on: what is tested does not depend on this machine."""

from collections.abc import Callable


class Clock:
    """Called, it says the seconds; who sleeps by it moves it on, and `on_sleep` is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()
