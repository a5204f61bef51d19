"""Share table: samples of each member in each batch, as members come and go. Pure, and the same on all members."""

import json
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import pydantic
from pydantic import Field

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.membership.messages import MAX_BATCH_SHARES_CHARS, MAX_MEMBERS, MEMBER_PATTERN
from ringweave.planning import balancing
from ringweave.planning.balancing import ShareChange, Speed
from ringweave.planning.balancing.shares import Shares
from ringweave.training.elastic.member_details import describe_validation_error


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShares:
    """Shares of all members in the batches from one number on."""

    first_batch: int
    members: tuple[str, ...]
    shares: Shares
    """Samples of each member in a whole batch."""


class ShareTable:
    """Table of the shares of all batches that are open or still to come."""

    def __init__(
        self,
        batch_samples: int,
        *,
        is_balanced: bool,
        samples_of: Callable[[Sequence[str]], int] | None = None,
    ) -> None:
        """Create an empty table; `samples_of` gives the batch size of a set of members, if it depends on them."""
        self._batch_samples, self._is_balanced = batch_samples, is_balanced
        self._batch_samples_of = samples_of
        self._rows: list[BatchShares] = []
        self._caps: tuple[int, ...] = ()
        self._assumed_speeds: tuple[float, ...] = ()
        self._recovering: frozenset[str] = frozenset()
        self.version = 0
        """Grows with every change of members, which makes batches that were read ahead invalid."""

    def shares_of_batch(self, batch_number: int) -> BatchShares:
        """Return the shares of a batch; batches are counted through all epochs."""
        return next(each for each in reversed(self._rows) if each.first_batch <= batch_number)

    @property
    def latest(self) -> BatchShares:
        return self._rows[-1]

    @property
    def recovering(self) -> frozenset[str]:
        """Members that have not caught up yet; they have no samples."""
        return self._recovering

    def start_generation(
        self,
        first_batch: int,
        members: Sequence[str],
        caps: Sequence[int | None],
        measured: Sequence[Speed | None],
        assumed: Sequence[float],
        recovering: Collection[str] = (),
    ) -> BatchShares:
        """Add the shares of other members from a batch on.

        Args:
            first_batch: Number of the first batch that no member has received yet.
            members: Their names.
            caps: Limit of samples of each; None means no limit.
            measured: Speed of each, where it is known.
            assumed: Relative speed of each by the cluster file.
            recovering: Members that have no samples before they are admitted.
        """
        if self._batch_samples_of is not None:
            self._batch_samples = self._batch_samples_of(members)
        self._caps = balancing.share_limits(self._batch_samples, caps)
        self._assumed_speeds, self._recovering = tuple(assumed), frozenset(recovering) & set(members)
        self.version += 1
        return self._add_row(self._apportion(first_batch, tuple(members), measured))

    def still_recovering(self, recovering: Collection[str]) -> frozenset[str]:
        """Return those of them that have not been admitted, as far as this table knows."""
        known = set(self.latest.members) if self._rows else set()
        return frozenset(each for each in recovering if each not in known or each in self._recovering)

    def admit(self, first_batch: int, caught_up: Collection[str], measured: Sequence[Speed | None]) -> BatchShares:
        """Give samples to members that have caught up, from a batch on that no member has read ahead."""
        self._recovering -= set(caught_up)
        return self._add_row(self._apportion(first_batch, self.latest.members, measured))

    def _apportion(self, first_batch: int, members: tuple[str, ...], measured: Sequence[Speed | None]) -> BatchShares:
        speeds = (
            _fill_in_speeds(measured, self._assumed_speeds)
            if self._is_balanced
            else [Speed(s_per_sample=1.0)] * len(members)
        )
        taking = [index for index, member in enumerate(members) if member not in self._recovering]
        # With fewer samples than members, some have none: they compute a placeholder sample.
        min_samples = 1 if self._batch_samples >= len(taking) else 0
        parts = balancing.apportion(
            self._batch_samples,
            [speeds[index] for index in taking],
            [self._caps[index] for index in taking],
            min_samples,
        )
        shares = [0] * len(members)
        for index, part in zip(taking, parts, strict=True):
            shares[index] = part
        return BatchShares(first_batch=first_batch, members=members, shares=tuple(shares))

    def rebalance(self, first_batch: int, speeds: Sequence[Speed | None]) -> ShareChange | None:
        """Change the shares of the same members from a batch on, if that pays."""
        known = [speed for speed in speeds if speed is not None]
        if not self._is_balanced or self._recovering or len(known) < len(speeds):
            return None
        change = balancing.rebalance(self.latest.shares, known, self._caps)
        if change is not None:
            self._add_row(BatchShares(first_batch=first_batch, members=self.latest.members, shares=change.shares))
        return change

    def forget_before(self, before_batch: int) -> None:
        """Forget rows that only concern batches before this one."""
        while len(self._rows) > 1 and self._rows[1].first_batch <= before_batch:
            del self._rows[0]

    def rows_between(self, first: int, end: int) -> list[BatchShares]:
        """Return the shares of batches `first` to `end - 1`."""
        later = [each for each in self._rows if first < each.first_batch < end]
        return [replace(self.shares_of_batch(first), first_batch=first), *later]

    def adopt_rows(self, rows: Sequence[BatchShares]) -> None:
        """Adopt the shares of batches that others have drawn, perhaps among members that this one has never met."""
        for each in rows:
            self._add_row(each)

    def _add_row(self, batch_shares: BatchShares) -> BatchShares:
        self._rows = [each for each in self._rows if each.first_batch < batch_shares.first_batch] + [batch_shares]
        return batch_shares


def _fill_in_speeds(measured: Sequence[Speed | None], assumed: Sequence[float]) -> list[Speed]:
    """Return the measured speeds; missing ones follow from the assumed speeds, scaled as the measured ones are."""
    if all(speed is None for speed in measured):
        return [Speed(s_per_sample=1 / speed) for speed in assumed]
    known = [speed.s_per_sample * relative for speed, relative in zip(measured, assumed, strict=True) if speed]
    typical_s = statistics.median(known)
    return [
        speed or Speed(s_per_sample=typical_s / relative) for speed, relative in zip(measured, assumed, strict=True)
    ]


_SHARE_NUMBER = Annotated[int, Field(ge=0, lt=2**63)]
_MAX_SHARE_ROWS = 4096
"""Limit of rows for open batches: at most as many as backward passes of one update."""


class _BatchSharesModel(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    first_batch: _SHARE_NUMBER
    members: Annotated[
        list[Annotated[str, Field(pattern=rf"^{MEMBER_PATTERN}$")]], Field(min_length=1, max_length=MAX_MEMBERS)
    ]
    shares: list[_SHARE_NUMBER]

    @pydantic.model_validator(mode="after")
    def _check_fits(self) -> "_BatchSharesModel":
        if len(self.shares) != len(self.members) or not any(self.shares):
            raise ValueError(f"{self.shares[:8]} of {len(self.members)} members, expected one of each, not all 0")
        return self


_SHARES_ADAPTER = pydantic.TypeAdapter(Annotated[list[_BatchSharesModel], Field(max_length=_MAX_SHARE_ROWS)])


def shares_to_text(rows: Sequence[BatchShares]) -> str:
    """Return shares as text."""
    documents = [{"first_batch": each.first_batch, "members": each.members, "shares": each.shares} for each in rows]
    return json.dumps(documents, separators=(",", ":"))


def shares_of_text(text: str) -> list[BatchShares]:
    """Parse the text that `shares_to_text` returned; an empty text has no rows.

    Raises:
        TrainingError: The text is something else.
    """
    if not text:
        return []
    if len(text) > MAX_BATCH_SHARES_CHARS:
        raise _shares_error(f"{len(text)} characters", f"at most {MAX_BATCH_SHARES_CHARS}")
    try:
        found = _SHARES_ADAPTER.validate_json(file_io.bounded(text, MAX_BATCH_SHARES_CHARS))
    except pydantic.ValidationError as error:
        raise _shares_error(describe_validation_error(error), "the shares of each member") from None
    return [
        BatchShares(first_batch=each.first_batch, members=tuple(each.members), shares=tuple(each.shares))
        for each in found
    ]


def _shares_error(got: str, expected: str) -> TrainingError:
    return TrainingError(
        "batches that were drawn", got=got, expected=expected, do="Run the same ringweave on all nodes"
    )
