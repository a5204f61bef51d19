"""What a collective runs: its message, and the program for messages of its kind."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringweave.comm.running.reductions import Reduction
from ringweave.schedules.programs import Program


@dataclass(frozen=True, slots=True)
class Compiled:
    """What this rank runs for one kind of message."""

    program: Program
    signature: int
    """Goes into the tag, so that ranks that run different things find out at the first message."""


@dataclass(slots=True)
class Use:
    """One collective's message, and the program that it takes."""

    tensor: Tensor
    op: Any
    reduction: Reduction
    promised: Future[Compiled] | None = None
    """None if the host library does it."""
    is_first: bool = False
    """It makes the program."""

    def end(self) -> None:
        """It is over, run or not: if it did not make the program that it was to, nobody waits for that any more.

        Others that are to use the program leave it alone: it may be in the making.
        """
        if self.is_first and self.promised is not None:
            self.promised.cancel()  # nothing happens to one that was kept, or broken
