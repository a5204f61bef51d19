"""The account of an epoch whose members come and go: every sample is trained on once, or known to be lost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import Account
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.elastic.rosters import Roster
from ringweave.training.elastic.rows import Commit


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticAccount:
    """What became of the samples of one epoch."""

    epoch: int
    expected: Account
    """The samples that the epoch consists of."""
    total: Account
    """Those that gradients which count are of."""
    lost: Account
    """Those that were a member's who was gone before its gradients counted."""

    @property
    def is_accounted(self) -> bool:
        """Every sample is in one of the two, once."""
        return self.total + self.lost == self.expected

    @property
    def is_exact(self) -> bool:
        """Every sample was trained on exactly once."""
        return self.total == self.expected


class Books:
    """Kept alike by all members, from what every reduction that counts is of."""

    def __init__(self) -> None:
        self.epoch = 0
        self._expected, self._total, self._lost = Account(), Account(), Account()
        self._open: list[tuple[Indices, Roster]] = []
        self._known: _Due | None = None
        """Of the batches that are open; computed once, by who hands in gradients: who commits is waited for."""

    def open_epoch(self, epoch: int) -> None:
        """A new epoch."""
        self.epoch = epoch
        self._expected, self._total, self._lost = Account(), Account(), Account()

    def draw(self, batch: Indices, roster: Roster) -> None:
        """A batch that members compute now; it counts with the next reduction."""
        self._open.append((batch, roster))
        self._known = None

    def check_given(self, given: Indices, member: str) -> None:
        """Compare what a member was given of the batch that was drawn last with what it is to compute of it.

        Raises:
            TrainingError: They are other samples.
        """
        due = part_of(*self._open[-1], member)
        if not np.array_equal(given, due):
            raise TrainingError(
                f"samples of worker {member}: {_some(given)}, expected {_some(due)}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )

    @property
    def drawn(self) -> Account:
        """All batches of the epoch that were drawn, and those before it whose gradients are still to be reduced."""
        return sum((Account.of(batch) for batch, _ in self._open), self._expected)

    def check_drawn(self, due: Account) -> None:
        """Compare the batches that were drawn with those that were to be, at the end of an epoch.

        Raises:
            TrainingError: They are of other samples.
        """
        if self.drawn != due:
            raise TrainingError(
                f"batches of epoch {self.epoch}: {self.drawn}, expected {due}. "
                "Batches were skipped or doubled; this is a bug of ringweave, please report it."
            )

    def drop(self) -> None:
        """What was drawn and is not reduced yet is given up."""
        self._close()

    @property
    def num_planned(self) -> int:
        """Samples of the batches that the next reduction is of."""
        return sum(len(batch) for batch, _ in self._open)

    def own(self, member: str) -> Account:
        """A member's part of them."""
        return self._due.parts.get(member, Account())

    @property
    def _due(self) -> "_Due":
        if self._known is None:
            parts: dict[str, Account] = {}
            for batch, roster in self._open:
                for member in roster.members:
                    part = Account.of(part_of(batch, roster, member))
                    parts[member] = parts.get(member, Account()) + part
            self._known = _Due(parts, sum((Account.of(batch) for batch, _ in self._open), Account()))
        return self._known

    def _close(self) -> None:
        self._open.clear()
        self._known = None

    def commit(self, commit: Commit) -> int:
        """Those batches are done.

        Returns:
            How many samples of them are lost.

        Raises:
            TrainingError: What members say they computed is not what they were to compute.
        """
        total, lost, due = Account(), Account(), self._due
        for member, part in due.parts.items():
            if member in commit.members:
                total += part
            else:
                lost += part
        if total != commit.account:
            raise TrainingError(
                f"account of reduction {commit.number}: {commit.account}, expected {total}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )
        self._close()
        self._expected, self._total, self._lost = self._expected + due.whole, self._total + total, self._lost + lost
        return lost.num_samples

    def account(self) -> ElasticAccount:
        """The present epoch so far."""
        return ElasticAccount(epoch=self.epoch, expected=self._expected, total=self._total, lost=self._lost)

    def to_words(self) -> list[list[int]]:
        """For a newcomer."""
        return [[each.num_samples, each.fingerprint] for each in (self._expected, self._total, self._lost)]

    def load(self, epoch: int, words: Sequence[Sequence[int]]) -> None:
        """What `to_words` gave."""
        self.epoch = epoch
        self._close()
        self._expected, self._total, self._lost = (
            Account(num_samples=number, fingerprint=fingerprint) for number, fingerprint in words
        )


class _Due(NamedTuple):
    """What batches that were drawn consist of."""

    parts: Mapping[str, Account]
    """Of each member."""
    whole: Account
    """Of the batches themselves."""


def _some(indices: Indices) -> str:
    return f"{len(indices)} ({', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''})"


def part_of(batch: Indices, roster: Roster, member: str) -> Indices:
    """A member's part of a batch, which may be of other size than the shares say; empty if it is not on the roster.

    Smaller is the last one of an epoch; larger one that a ring took before it lost a member.
    """
    return np.asarray(batch[slice_of(len(batch), roster, member)])


def slice_of(num_samples: int, roster: Roster, member: str) -> slice:
    """The same by places in a batch of so many samples."""
    if member not in roster.members:
        return slice(0, 0)
    shares = roster.shares if num_samples == sum(roster.shares) else balancing.scale(roster.shares, num_samples)
    return balancing.cut(shares, roster.members.index(member))
