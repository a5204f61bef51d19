"""What every member says of a reduction while it is under way: one row of whole numbers.

Behind the row are bits for the parameters that the member has used: who commits has those of all, without another
collective.
"""

import functools
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringweave.planning.balancing import Account, Speed

WIDTH = 7
_HALF = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One member's."""

    account: Account = field(default_factory=Account)
    """Samples that its gradients are of."""
    num_planned: int = 0
    """Samples that all members of the batches together were to have; the same in all rows but those of who follows."""
    is_following: bool = False
    """It has joined, and its part of this reduction is nothing."""
    is_level: bool = False
    """It follows no more: it waits for this reduction as all others do, and computes what comes next."""
    speed: Speed | None = None

    @property
    def may_stop(self) -> bool:
        """While somebody follows nobody stops to let others come or go: its script is not at a border then."""
        return self.is_level or not self.is_following

    def to_list(self) -> list[int]:
        """Seven whole numbers of 64 bits."""
        speed = self.speed
        floats = (0.0, 0.0, 0.0) if speed is None else (speed.s_per_sample, speed.overhead_samples, speed.noise)
        words = struct.unpack("<3q", struct.pack("<3d", *floats))
        return [
            self.account.num_samples,
            self.account.fingerprint - _HALF,
            self.num_planned,
            self.is_following | self.is_level << 1,
            *words,
        ]

    @classmethod
    def of(cls, words: Sequence[int]) -> "Row":
        """What `to_list` gave."""
        each_s, overhead, noise = struct.unpack("<3d", struct.pack("<3q", *words[4:WIDTH]))
        return cls(
            account=Account(num_samples=words[0], fingerprint=words[1] + _HALF),
            num_planned=words[2],
            is_following=bool(words[3] & 1),
            is_level=bool(words[3] & 2),
            speed=Speed(s_per_sample=each_s, overhead_samples=overhead, noise=noise) if each_s > 0 else None,
        )


def to_tensor(row: Row, used: int, num_parameters: int) -> Tensor:
    """(width,) int64: the row, and bit i for parameter i of so many."""
    num_words = width(num_parameters) - WIDTH
    words = struct.unpack(f"<{num_words}q", used.to_bytes(8 * num_words, "little"))
    return torch.tensor([*row.to_list(), *words], dtype=torch.int64)


def width(num_parameters: int) -> int:
    """Of what a member says, in words of 64 bits."""
    return WIDTH + -(-num_parameters // 64)


def of_tensor(said: Tensor) -> tuple[tuple[Row, ...], int]:
    """(the row of each member, the bits that any of them has set) from what each has said, (num_members, width)."""
    lists = said.tolist()
    used = (int.from_bytes(struct.pack(f"<{len(words) - WIDTH}q", *words[WIDTH:]), "little") for words in lists)
    return tuple(Row.of(words) for words in lists), functools.reduce(operator.or_, used, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A reduction that counts."""

    number: int
    members: tuple[str, ...]
    """Whose gradients are in it."""
    rows: tuple[Row, ...]
    """In the order of the members."""
    used: int = 0
    """Bit i: one of them has used parameter i."""

    @property
    def account(self) -> Account:
        """The samples that it is of."""
        return sum((row.account for row in self.rows), Account())

    @property
    def num_planned(self) -> int:
        """Samples that it would be of had nobody gone."""
        return max((row.num_planned for row in self.rows), default=0)

    @property
    def level(self) -> tuple[str, ...]:
        """Who has followed until now, and computes from now on."""
        return tuple(member for member, row in zip(self.members, self.rows, strict=True) if row.is_level)

    @property
    def scale(self) -> float:
        """What makes the sum of the weighed gradients a mean over exactly the samples that are in it."""
        num_samples = self.account.num_samples
        if not self.num_planned:  # gradients that are of no batch of the loader's: all members count the same
            return 1 / max(1, sum(not row.is_following for row in self.rows))
        return self.num_planned / num_samples if num_samples else 0.0
