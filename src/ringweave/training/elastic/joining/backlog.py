"""A member that has joined and is not level with the others yet: what it keeps of their steps until it has done them.

It is in every reduction from its first epoch on, with nothing of its own, so nobody waits for it. What comes out it
keeps, beside what the epochs are that begin, in one log. Meanwhile it reads the state that the others had when it came,
and then its script does the very steps that the others have done: it computes a sample that does not count, and in the
place of its gradients it gets the sums that were kept. So whatever a script makes of gradients (clipping, scaling,
accumulation, schedules, averages of parameters) is done by the script, and is the same bit for bit. Once the log is
empty, and the script waits for the same reduction as all others, it says so in its row: it is level.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from ringweave.membership.rules.records import Decree
from ringweave.training.elastic.kept import Reduction
from ringweave.training.elastic.rows import Commit

MOST_KEPT = 16
"""Reductions that are kept; with more the others wait. While they step, the state of an optimizer with two moments is
read in about a dozen steps at a pace that leaves them most of the link."""
_LEAST_KEPT = 2
_PART_OF_MEMORY = 0.5
"""Of what is free: no more is kept."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kept:
    """A reduction that counts, and that this member's script has not done yet."""

    commit: Commit
    sums: list[Tensor]
    """Of each bucket, over all members."""
    buffers: Sequence[tuple[Tensor, Tensor]]
    """(buffer of the model, what it becomes)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Begun:
    """An epoch that has begun between two reductions, or in the midst of one."""

    decree: Decree
    notes: Sequence[dict[str, Any]]
    is_newcomer: bool


class Backlog:
    """What this member's script has not done yet; guarded by the session's lock."""

    def __init__(self, layout: Sequence[Sequence[Any]], committed: int, most_bytes: float | None = None) -> None:
        """`committed` is the last reduction that the state is of; `most_bytes` bounds what is kept."""
        self._zeros = [
            torch.zeros(numel, dtype=getattr(torch, dtype), device=device) for numel, dtype, device in layout
        ]
        self._is_on_host = all(zeros.device.type == "cpu" for zeros in self._zeros)
        each_bytes = max(1, sum(zeros.nbytes for zeros in self._zeros))
        free = _PART_OF_MEMORY * psutil.virtual_memory().available if most_bytes is None else most_bytes
        self.most_kept = max(_LEAST_KEPT, min(MOST_KEPT, int(free // each_bytes)))
        """Reductions that may be kept; with more the others wait."""
        self._log: deque[Kept | Begun] = deque()
        self._spare: list[list[Tensor]] = []
        self.number = committed
        """The last reduction that this member's script has done."""

    @property
    def num_kept(self) -> int:
        """Reductions by which this member is behind."""
        return sum(isinstance(each, Kept) for each in self._log)

    def __bool__(self) -> bool:
        """Something is kept."""
        return bool(self._log)

    def nothing(self, number: int) -> Reduction:
        """This member's part in the next reduction."""
        made = Reduction(number=number, is_whole=True, is_nothing=True)
        sums = self._spare.pop() if self._spare else [torch.empty_like(zeros) for zeros in self._zeros]
        for zeros, summed in zip(self._zeros, sums, strict=True):
            made.add_nothing(zeros, summed)
        return made

    def keep(self, commit: Commit, reduction: Reduction, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """It counts."""
        # In the host's memory in any case: a device's has no room for it.
        self._log.append(Kept(commit=commit, sums=[summed.cpu() for summed in reduction.sums], buffers=buffers))
        if not self._is_on_host:
            self._spare.append(reduction.sums)

    def begin(self, begun: Begun) -> None:
        """An epoch begins, for this member's script after what is kept already."""
        self._log.append(begun)

    def take_epoch(self) -> Begun | None:
        """The epoch that began before anything else that is kept, if one did."""
        head = self._log[0] if self._log else None
        if not isinstance(head, Begun):
            return None
        self._log.popleft()
        return head

    def take(self) -> Kept:
        """The reduction that comes next."""
        kept = self._log.popleft()
        assert isinstance(kept, Kept), "epochs are taken first"
        self.number = kept.commit.number
        return kept

    def give_back(self, kept: Kept) -> None:
        """Its sums are taken over: the memory is for others to come."""
        if self._is_on_host:
            self._spare.append(kept.sums)
