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

    def abandon(self) -> None:
        """It is never run: whoever waits for the program must not wait for ever."""
        if self.promised is not None:
            self.promised.cancel()
