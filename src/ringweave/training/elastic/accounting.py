"""Sample accounting: every sample of an epoch is trained on once, or is known to be lost with a member."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.data.order import Portion
from ringweave.training.elastic.retained_reductions import Commit
from ringweave.training.elastic.share_table import BatchShares


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochAccount:
    """Account of the samples that all ranks or members together have trained on in one epoch."""

    epoch: int
    expected: SampleAccount
    """Samples of the epoch, in a fixed set of ranks from the position where it was resumed."""
    total: SampleAccount
    """Samples that all ranks received; in an elastic job those whose gradients are in committed reductions."""
    lost: SampleAccount = field(default_factory=SampleAccount)
    """Samples of members that were gone before their gradients were committed."""
    by_rank: tuple[SampleAccount, ...] = ()
    """Samples that each rank received, if ranks stay the same."""

    @classmethod
    def of_ranks(cls, epoch: int, expected: SampleAccount, by_rank: Sequence[SampleAccount]) -> "EpochAccount":
        """Return the account of a fixed set of ranks."""
        return cls(epoch=epoch, expected=expected, total=sum(by_rank, SampleAccount()), by_rank=tuple(by_rank))

    @property
    def is_accounted(self) -> bool:
        """Every sample is in exactly one of the two accounts."""
        return self.total + self.lost == self.expected

    @property
    def is_exact(self) -> bool:
        """Every sample was trained on exactly once."""
        return self.total == self.expected

    def check(self) -> None:
        """Refuse an account with samples that are neither trained on once nor known to be lost.

        Raises:
            TrainingError: There are some.
        """
        if not self.is_accounted:
            text = f"account of epoch {self.epoch}: {self.total} and {self.lost} lost, expected {self.expected}"
            raise TrainingError(f"{text}. Samples were lost or doubled; this is a bug of ringweave, please report it.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MissingBatch:
    """Samples of a batch that lost members had, which the others compute in the same train step."""

    indices: Indices
    """The missing samples, (num_samples,) int64; empty for a batch of the step that misses none."""
    epoch: int
    batch: Indices
    """Samples of the whole batch."""


@dataclass(kw_only=True, slots=True)
class DataProgress:
    """Progress of the job in its data: the same on all members that are between two steps.

    What concerns commits stays as it is in a fixed set of ranks.
    """

    epoch: int = 0
    position: int = 0
    """Samples of the epoch that were handed out."""
    num_drawn: int = 0
    """Batches that were handed out, through all epochs."""
    num_since_commit: int = 0
    """Batches since the last committed reduction."""
    committed: tuple[int, int] = (0, 0)
    """Epoch and position after the last committed reduction."""
    last_reduction: int = 0
    """Number of the last committed reduction since this member joined; 0 before it."""
    num_steps_before: int = 0
    """Train steps, as the script counts them, before the first reduction of this job; negative if it counts fewer steps
    than there were reductions since."""
    has_joined_late: bool = False
    """This member has received the job's state from another one."""

    def repeat_step(self, batches: Iterable[MissingBatch]) -> None:
        """Go back to the start of the train step of these batches, whose missing samples are handed out next."""
        self.position -= self._samples_of_epoch(batches)

    def record_drawn(self, num_samples: int) -> None:
        """Record that a batch of so many samples of the epoch is handed out."""
        self.position += num_samples
        self.num_drawn += 1
        self.num_since_commit += 1

    def record_missing(self, missing: MissingBatch) -> None:
        """Record that missing samples of this batch are handed out."""
        self.record_drawn(self._samples_of_epoch([missing]))

    def give_up_step(self, batches: Iterable[MissingBatch]) -> None:
        """Go on after that step without its missing samples."""
        self.position += self._samples_of_epoch(batches)
        self.committed = (self.epoch, self.position)

    def _samples_of_epoch(self, batches: Iterable[MissingBatch]) -> int:
        """Return the samples of these whole batches, without batches of the epoch before."""
        return sum(len(each.batch) for each in batches if each.epoch == self.epoch)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _DrawnBatch:
    """A batch that is handed out and not reduced yet."""

    indices: Indices
    batch_shares: BatchShares
    epoch: int
    missing: MissingBatch | None = None
    """Present if the samples are the missing ones of a batch that was reduced before."""

    def missing_without(self, members: Collection[str]) -> MissingBatch:
        """Return the part of all members but these."""
        lost = [each for each in self.batch_shares.members if each not in members]
        parts = [samples_of_member(self.indices, self.batch_shares, each) for each in lost]
        indices = np.concatenate([self.indices[:0], *parts])
        if self.missing is not None:
            return replace(self.missing, indices=indices)
        return MissingBatch(indices=indices, epoch=self.epoch, batch=self.indices)


class SampleAccounting:
    """Sample accounting of an epoch, kept alike by all members from the committed reductions."""

    def __init__(self, *, recomputes: bool = False) -> None:
        """Create an empty account; with `recomputes`, samples of lost members are missing at first, and not lost."""
        self.epoch = 0
        self._recomputes = recomputes
        self._expected, self._total, self._lost = SampleAccount(), SampleAccount(), SampleAccount()
        self.missing: deque[MissingBatch] = deque()
        """Batches of the last train step whose missing samples are to be computed next, in their order."""
        self._open_batches: list[_DrawnBatch] = []
        self._cached_parts: _OpenParts | None = None
        """Parts of the open batches, cached. The member computes them when it hands in gradients, so that no commit
        waits for it."""

    def open_epoch(self, epoch: int) -> None:
        """Start the account of a new epoch."""
        self.epoch = epoch
        self._expected, self._total, self._lost = SampleAccount(), SampleAccount(), SampleAccount()

    def record_batch(self, batch: Indices, batch_shares: BatchShares) -> None:
        """Record a batch that the members compute now; the next reduction commits it."""
        self._open_batches.append(_DrawnBatch(indices=batch, batch_shares=batch_shares, epoch=self.epoch))
        self._cached_parts = None

    def record_next_missing(self, batch_shares: BatchShares) -> MissingBatch:
        """Record that the members compute the next missing samples now, by these shares; return their batch."""
        batch = self.missing.popleft()
        self._open_batches.append(
            _DrawnBatch(indices=batch.indices, batch_shares=batch_shares, epoch=batch.epoch, missing=batch)
        )
        self._cached_parts = None
        return batch

    def own_part(self, member: str) -> Portion:
        """Return a member's part of the missing samples that were recorded last."""
        last = self._open_batches[-1]
        assert last.missing is not None, "recorded before"
        own = samples_of_member(last.indices, last.batch_shares, member)
        return Portion(indices=own, batch=last.missing.batch)

    def lose_missing(self) -> int:
        """Record the missing samples as lost, since no pass computes them any more; return their number."""
        lost = sum((SampleAccount.from_indices(batch.indices) for batch in self.missing), SampleAccount())
        self.missing.clear()
        self._lost += lost
        return lost.num_samples

    def check_received(self, received: Indices, member: str) -> None:
        """Compare the samples that a member received of the last batch with those that it has to compute.

        Raises:
            TrainingError: The samples differ.
        """
        last = self._open_batches[-1]
        expected = samples_of_member(last.indices, last.batch_shares, member)
        if not np.array_equal(received, expected):
            raise TrainingError(
                f"samples of worker {member}: {_preview_indices(received)}, expected {_preview_indices(expected)}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )

    @property
    def drawn_account(self) -> SampleAccount:
        """All recorded batches of the epoch, and earlier ones whose gradients are not reduced yet."""
        return sum(
            (SampleAccount.from_indices(each.indices) for each in self._open_batches if each.missing is None),
            self._expected,
        )

    def check_drawn(self, expected: SampleAccount) -> None:
        """Compare the recorded batches with the expected ones, at the end of an epoch.

        Raises:
            TrainingError: The samples differ.
        """
        if self.drawn_account != expected:
            raise TrainingError(
                f"batches of epoch {self.epoch}: {self.drawn_account}, expected {expected}. "
                "Batches were skipped or doubled; this is a bug of ringweave, please report it."
            )

    @property
    def num_planned(self) -> int:
        """Samples of the batches in the next reduction."""
        return sum(len(each.indices) for each in self._open_batches)

    def account_of(self, member: str) -> SampleAccount:
        """Return a member's part of the open batches."""
        return self._open_parts.by_member.get(member, SampleAccount())

    @property
    def _open_parts(self) -> "_OpenParts":
        if self._cached_parts is None:
            parts: dict[str, SampleAccount] = {}
            whole = SampleAccount()
            for each in self._open_batches:
                for member in each.batch_shares.members:
                    part = SampleAccount.from_indices(samples_of_member(each.indices, each.batch_shares, member))
                    parts[member] = parts.get(member, SampleAccount()) + part
                if each.missing is None:
                    whole += SampleAccount.from_indices(each.indices)
            self._cached_parts = _OpenParts(parts, whole)
        return self._cached_parts

    def discard_open_batches(self) -> None:
        """Discard the batches that are not reduced yet."""
        self._open_batches.clear()
        self._cached_parts = None

    def record_commit(self, commit: Commit) -> int:
        """Record that the open batches are committed.

        Returns:
            Number of their samples that are not in it: missing if they are to be computed, else lost.

        Raises:
            TrainingError: The samples that members report differ from those that they had to compute.
        """
        total, lost, parts = SampleAccount(), SampleAccount(), self._open_parts
        counted = () if commit.restarts_step else commit.members
        for member, part in parts.by_member.items():
            if member in counted:
                total += part
            else:
                lost += part
        if total != commit.account:
            raise TrainingError(
                f"account of reduction {commit.number}: {commit.account}, expected {total}. "
                "Samples were lost or doubled; this is a bug of ringweave, please report it."
            )
        self._expected, self._total = self._expected + parts.whole, self._total + total
        if not self._recomputes:
            self._lost += lost
        elif lost.num_samples:
            self.missing.extend(each.missing_without(counted) for each in self._open_batches)
        self.discard_open_batches()
        return lost.num_samples

    def epoch_account(self) -> EpochAccount:
        """Account of the present epoch so far."""
        return EpochAccount(epoch=self.epoch, expected=self._expected, total=self._total, lost=self._lost)

    def to_json(self) -> list[list[int]]:
        """Return the accounts as JSON numbers, for a joining member."""
        return [[each.num_samples, each.fingerprint] for each in (self._expected, self._total, self._lost)]

    def load_json(self, epoch: int, document: Sequence[Sequence[int]]) -> None:
        """Load the accounts that `to_json` returned."""
        self.epoch = epoch
        self.missing.clear()
        self.discard_open_batches()
        self._expected, self._total, self._lost = (
            SampleAccount(num_samples=number, fingerprint=fingerprint) for number, fingerprint in document
        )


class _OpenParts(NamedTuple):
    """Accounts of the open batches."""

    by_member: Mapping[str, SampleAccount]
    """Part of each member."""
    whole: SampleAccount
    """Account of the whole batches, without those whose missing samples are computed."""


def _preview_indices(indices: Indices) -> str:
    return f"{len(indices)} ({', '.join(map(str, indices[:8]))}{', ...' if len(indices) > 8 else ''})"


def samples_of_member(batch: Indices, batch_shares: BatchShares, member: str) -> Indices:
    """Return a member's part of a batch; empty if the member has no share of it.

    The shares are scaled if the batch has another size: the last batch of an epoch is smaller, and a batch that a ring
    took before it lost a member is larger.
    """
    return np.asarray(batch[slice_of_member(len(batch), batch_shares, member)])


def slice_of_member(num_samples: int, batch_shares: BatchShares, member: str) -> slice:
    """Return a member's part of a batch of so many samples, as a slice of it."""
    if member not in batch_shares.members:
        return slice(0, 0)
    shares = (
        batch_shares.shares
        if num_samples == sum(batch_shares.shares)
        else balancing.scale_shares(batch_shares.shares, num_samples)
    )
    return balancing.rank_slice(shares, batch_shares.members.index(member))
