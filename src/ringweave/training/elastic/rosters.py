"""Who computes which part of a batch, as members come and go. Pure, and the same on all members."""

import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ringweave.planning import balancing
from ringweave.planning.balancing import Change, Speed
from ringweave.planning.balancing.shares import Shares


@dataclass(frozen=True, kw_only=True, slots=True)
class Roster:
    """Who shares the batches from one number on."""

    first_batch: int
    members: tuple[str, ...]
    shares: Shares
    """Samples of each member in a whole batch."""


class Rosters:
    """All rosters that still matter, and the next ones."""

    def __init__(
        self,
        batch_samples: int,
        *,
        is_balanced: bool,
        samples_of: Callable[[Sequence[str]], int] | None = None,
    ) -> None:
        """`samples_of` says how many samples these members' batches are of; None makes it `batch_samples` always."""
        self._batch_samples, self._is_balanced = batch_samples, is_balanced
        self._samples_of = samples_of
        self._rosters: list[Roster] = []
        self._caps: tuple[int, ...] = ()
        self._assumed: tuple[float, ...] = ()
        self._following: frozenset[str] = frozenset()
        self.version = 0
        """Grows with every change of members: batches that were read ahead of time are other members' then."""

    def of(self, batch_number: int) -> Roster:
        """The roster of a batch; batches are counted through all epochs."""
        return next(each for each in reversed(self._rosters) if each.first_batch <= batch_number)

    @property
    def latest(self) -> Roster:
        """That decided last."""
        return self._rosters[-1]

    @property
    def following(self) -> frozenset[str]:
        """Members that are not level with the others yet: they have no samples."""
        return self._following

    def begin(
        self,
        first_batch: int,
        members: Sequence[str],
        caps: Sequence[int | None],
        measured: Sequence[Speed | None],
        assumed: Sequence[float],
        following: Collection[str] = (),
    ) -> Roster:
        """Other members from a batch on.

        Args:
            first_batch: Number of the first batch that no member has been given yet.
            members: Their names.
            caps: The most samples that each takes; None means any number.
            measured: Speed of each, where it is known.
            assumed: Relative speed of each by the cluster file.
            following: Those that have no samples before they are admitted.
        """
        if self._samples_of is not None:
            self._batch_samples = self._samples_of(members)
        self._caps = balancing.limits(self._batch_samples, caps)
        self._assumed, self._following = tuple(assumed), frozenset(following) & set(members)
        self.version += 1
        return self._add(self._apportion(first_batch, tuple(members), measured))

    def still_following(self, followers: Collection[str]) -> frozenset[str]:
        """Those of them that were not admitted meanwhile, by what is known here."""
        known = set(self.latest.members) if self._rosters else set()
        return frozenset(each for each in followers if each not in known or each in self._following)

    def admit(self, first_batch: int, level: Collection[str], measured: Sequence[Speed | None]) -> Roster:
        """Members that were following have samples from a batch on that nobody has read ahead of time."""
        self._following -= set(level)
        return self._add(self._apportion(first_batch, self.latest.members, measured))

    def _apportion(self, first_batch: int, members: tuple[str, ...], measured: Sequence[Speed | None]) -> Roster:
        speeds = _speeds(measured, self._assumed) if self._is_balanced else [Speed(s_per_sample=1.0)] * len(members)
        taking = [index for index, member in enumerate(members) if member not in self._following]
        # With fewer samples than members some have none: they compute one and it does not count.
        least = 1 if self._batch_samples >= len(taking) else 0
        parts = balancing.apportion(
            self._batch_samples, [speeds[index] for index in taking], [self._caps[index] for index in taking], least
        )
        shares = [0] * len(members)
        for index, part in zip(taking, parts, strict=True):
            shares[index] = part
        return Roster(first_batch=first_batch, members=members, shares=tuple(shares))

    def rebalance(self, first_batch: int, speeds: Sequence[Speed | None]) -> Change | None:
        """Other shares of the same members from a batch on, if that pays."""
        known = [speed for speed in speeds if speed is not None]
        if not self._is_balanced or self._following or len(known) < len(speeds):
            return None
        change = balancing.rebalance(self.latest.shares, known, self._caps)
        if change is not None:
            self._add(Roster(first_batch=first_batch, members=self.latest.members, shares=change.shares))
        return change

    def forget(self, before_batch: int) -> None:
        """Nobody asks for batches before that one any more."""
        while len(self._rosters) > 1 and self._rosters[1].first_batch <= before_batch:
            del self._rosters[0]

    def sharing(self, first: int, end: int) -> list[Roster]:
        """The rosters of batches `first` to `end - 1`."""
        later = [each for each in self._rosters if first < each.first_batch < end]
        return [replace(self.of(first), first_batch=first), *later]

    def share_so(self, sharing: Sequence[Roster]) -> None:
        """Batches that others have drawn are shared so: with members, perhaps, that have never met this one."""
        for each in sharing:
            self._add(each)

    def _add(self, roster: Roster) -> Roster:
        self._rosters = [each for each in self._rosters if each.first_batch < roster.first_batch] + [roster]
        return roster


def _speeds(measured: Sequence[Speed | None], assumed: Sequence[float]) -> list[Speed]:
    """Measured ones; for those who have not measured yet, what the others' let expect of the assumed ones."""
    if all(speed is None for speed in measured):
        return [Speed(s_per_sample=1 / speed) for speed in assumed]
    known = [speed.s_per_sample * relative for speed, relative in zip(measured, assumed, strict=True) if speed]
    typical_s = statistics.median(known)
    return [
        speed or Speed(s_per_sample=typical_s / relative) for speed, relative in zip(measured, assumed, strict=True)
    ]
