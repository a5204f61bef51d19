"""Progress of a ring: its samples until the server has them, and its cursor at the parameter server."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import TypeAdapter

from ringweave.errors import TrainingError
from ringweave.membership.membership_records import Membership, parse_member_name
from ringweave.param_server.data_shards import Span, Spans, merge_spans, remaining_spans, spans_in_epoch
from ringweave.param_server.messages import DataStart, RingAssignmentReply
from ringweave.planning.balancing import SampleAccount
from ringweave.planning.balancing.epochs import Indices
from ringweave.training.elastic.accounting import EpochAccount, SampleAccounting, slice_of_member
from ringweave.training.elastic.retained_reductions import Commit
from ringweave.training.elastic.share_table import BatchShares
from ringweave.training.elastic.trainer import TrainerState


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeStart:
    """Position in the data to resume from."""

    epoch: int
    done: Spans
    """Samples of that epoch, by their positions in its order, that the parameters include already."""
    seed: int
    """Seed of the orders of all epochs."""

    @classmethod
    def of_state(cls, state: Mapping[str, Any], num_samples: int) -> "ResumeStart":
        """Parse the state that `loader_state` returned; a finished epoch is followed by the next one.

        Raises:
            TrainingError: It belongs to other data.
        """
        if state["num_samples"] != num_samples:
            raise TrainingError(
                "samples of an epoch",
                got=num_samples,
                expected=f"{state['num_samples']}, as the checkpoint has them",
                do="Go on with the data that it was saved with, or begin in another folder",
            )
        done = spans_of_json(state["done"])
        if remaining_spans(done, num_samples):
            return cls(epoch=state["epoch"], done=done, seed=state["seed"])
        return cls(epoch=state["epoch"] + 1, done=(), seed=state["seed"])

    def to_message(self, pass_number: int) -> DataStart:
        """Return the message for the server; `pass_number` is that of the next pass."""
        return DataStart(pass_number=pass_number, epoch=self.epoch, done=list(self.done), seed=self.seed)

    def done_spans_of(self, epoch: int) -> Spans:
        """Return the spans of an epoch that are not drawn again."""
        return self.done if epoch == self.epoch else ()


def spans_of_json(pairs: Iterable[Sequence[int]]) -> Spans:
    """Parse spans from JSON."""
    return tuple((first, count) for first, count in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfferedCheckpoint:
    """A checkpoint that this process offers to resume from."""

    train_step: int
    checksum: str
    state: Mapping[str, Any]
    content: Callable[[], bytes]
    """Returns the server's state."""


@dataclass(slots=True)
class UnpushedSamples:
    """Samples computed since the last push."""

    num_samples: int = 0
    """Samples of the whole ring."""
    batch_share: float = 0.0
    """Train steps of all rings that these samples make; each batch adds its part."""
    num_batches: int = 0
    pass_number: int = 0
    """Number of the pass over the data that contains the last batch."""
    epoch: int = 0
    spans: list[Span] = field(default_factory=list)
    """Samples of the pass; unpushed samples of the pass before are in no position any more."""

    def add(self, num_samples: int, batch_share: float) -> None:
        self.num_samples += num_samples
        self.batch_share += batch_share
        self.num_batches += 1

    def note_spans(self, pass_number: int, epoch: int, spans: Iterable[Span]) -> None:
        if (pass_number, epoch) != (self.pass_number, self.epoch):
            self.pass_number, self.epoch = pass_number, epoch
            self.spans.clear()
        self.spans.extend(spans)

    def clear(self) -> None:
        self.num_samples, self.batch_share, self.num_batches = 0, 0.0, 0
        self.spans.clear()

    @property
    def mean_share(self) -> float:
        """Mean over the batches of the ring's part of a train step."""
        return self.batch_share / self.num_batches if self.num_batches else 0.0


RingReport = Mapping[str, Any]
"""Report of a ring at a barrier of all rings; see `ring_report`."""


def ring_report(accounting: SampleAccounting, *, is_whole: bool) -> dict[str, Any]:
    """Return a ring's report on its samples; `is_whole`: the ring took part from the start of the epoch."""
    return {
        "epoch": accounting.epoch,
        "accounts": accounting.to_json(),
        "is_whole": is_whole and not accounting.num_planned,
    }


def ring_progress_json(accounting: SampleAccounting) -> str:
    """Return the report used if no member of the ring is left: its samples whose gradients the server has."""
    return json.dumps({**ring_report(accounting, is_whole=False), "is_ring_progress": True})


def reporting_ring(by_ring: Mapping[int, RingReport]) -> int:
    """Return the ring that writes the account for all: the first one that reported for itself."""
    return min(ring for ring, report in by_ring.items() if not report.get("is_ring_progress"))


def sum_accounts(epoch: int, expected: SampleAccount, by_ring: Sequence[RingReport], num_rings: int) -> EpochAccount:
    """Return the account of all rings. Samples that a lost ring had taken and not pushed are lost.

    `by_ring`: reports of the rings at the barrier, and progress of lost rings, which may be of earlier epochs.
    """
    by_ring = [each for each in by_ring if each["epoch"] == epoch]
    documents = [each["accounts"] for each in by_ring]
    drawn, total, lost = (
        sum(
            (SampleAccount(num_samples=each[index][0], fingerprint=each[index][1]) for each in documents),
            SampleAccount(),
        )
        for index in range(3)
    )
    may_miss = len(by_ring) < num_rings or not all(each["is_whole"] for each in by_ring)
    if may_miss and drawn.num_samples <= expected.num_samples:
        lost += expected - drawn
    return EpochAccount(epoch=epoch, expected=expected, total=total, lost=lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingPush:
    """A push whose answer has not been applied yet."""

    num_samples: int
    batch_share: float
    ring_progress: str
    num_batches: int = 1
    epoch: int = 0
    spans: Spans = ()
    pass_number: int | None = None
    """Number of the pass over the data; None is that of the epoch, as in elastic rings."""
    fragments: tuple[int, ...] = ()
    """Fragments of the parameters that are pushed; empty: all."""
    weight: float = 0.0
    """Part of the ring in an outer step of these fragments."""

    @classmethod
    def of_samples(cls, samples: UnpushedSamples, ring_progress: str) -> "PendingPush":
        return cls(
            num_samples=samples.num_samples,
            batch_share=samples.mean_share,
            ring_progress=ring_progress,
            num_batches=max(1, samples.num_batches),
            epoch=samples.epoch,
            spans=merge_spans(samples.spans),
            pass_number=samples.pass_number,
        )

    @classmethod
    def of_rounds(cls, rounds: Sequence["PendingPush"]) -> "PendingPush":
        """Return the samples of several rounds of one epoch, with the report of the last one."""
        last, num_batches = rounds[-1], sum(each.num_batches for each in rounds)
        return replace(
            last,
            num_samples=sum(each.num_samples for each in rounds),
            batch_share=sum(each.batch_share * each.num_batches for each in rounds) / num_batches,
            num_batches=num_batches,
            spans=merge_spans(span for each in rounds for span in each.spans),
        )

    def without_samples(self) -> "PendingPush":
        """Return the push without samples: they count with a later one."""
        return replace(self, num_samples=0, batch_share=0.0, num_batches=1, spans=(), ring_progress="")


@dataclass(kw_only=True, slots=True)
class RingCursor:
    """Cursor of a ring at the parameter server; its representative continues from here."""

    ring: int
    num_pushed: int = 0
    """Answered pushes of the ring."""
    base_version: int = 0
    """Version of the members' parameters."""
    num_shards: int = 0
    num_barriers: int = 0
    next_version: int = 0
    """With local steps: version of the parameters on which the push after the next one is computed."""
    local_steps: int = 0
    """Local steps from one push to the next, once they follow from measured times; 0: as the job was started."""
    num_since_level: int = 0
    """With fragments: their number in the order of pushes, since all were pushed at once."""
    weight: float = 0.0
    """With fragments: the ring's part of a train step in the last round."""
    partly_pushed: list[PendingPush] = field(default_factory=list)
    """Rounds whose changes not all fragments have been pushed with: their samples count once all have."""
    pending: PendingPush | None = None
    start: ResumeStart | None = None
    """Position in the data from a checkpoint, if the job resumed from one."""

    def done_spans_of(self, epoch: int) -> Spans:
        """Return the spans of an epoch that are not drawn."""
        return self.start.done_spans_of(epoch) if self.start else ()

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as JSON values, for a joining member."""
        return _CURSOR_ADAPTER.dump_python(self, mode="json")

    def load_json(self, document: Mapping[str, Any]) -> None:
        """Load the values that `to_json` returned; the ring stays."""
        loaded = _CURSOR_ADAPTER.validate_python({**document, "ring": self.ring})
        for each in fields(self):
            setattr(self, each.name, getattr(loaded, each.name))

    def next_fragments(self, num_fragments: int) -> tuple[int, ...]:
        """Return the fragment of the next push; none if the parameters are not divided."""
        return (self.num_since_level % num_fragments,) if num_fragments else ()

    def push_outer(self, computed: PendingPush, fragments: tuple[int, ...], num_fragments: int) -> PendingPush:
        """Return the push of these fragments, all if there are none, after a round with these samples.

        It carries the samples of the last round whose changes are in all fragments by it.
        """
        self.weight = computed.batch_share or self.weight
        self.num_since_level += 1
        if computed.num_samples:
            self.partly_pushed.append(computed)
        num_whole = max(0, len(self.partly_pushed) + 1 - num_fragments) if fragments else len(self.partly_pushed)
        whole, self.partly_pushed = self.partly_pushed[:num_whole], self.partly_pushed[num_whole:]
        counted = PendingPush.of_rounds(whole) if whole else computed.without_samples()
        return replace(counted, fragments=fragments, weight=self.weight)

    def make_level(self) -> None:
        """Note that nothing is left to push: all fragments are, or what was computed is lost."""
        self.num_since_level = 0
        self.partly_pushed.clear()

    def count_answer(self, version: int | None, *, is_lost: bool = False) -> None:
        """Count the pending push as answered, or as lost.

        `version` is that of the new parameters, None if none were pulled.
        """
        self.num_pushed += not is_lost
        self.pending = None
        if version is not None:
            self.base_version, self.next_version = self.next_version, version


_CURSOR_ADAPTER = TypeAdapter(RingCursor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotAssignment:
    """Ring that a slot is assigned to."""

    ring: int
    slots: tuple[int, ...]
    shares: dict[int, int]
    """Slot -> samples of a whole batch of all rings."""
    local_steps: int = 0
    """Local steps of the ring from one push to the next; 0 pushes the gradients of each step."""

    @classmethod
    def of_slot(cls, slot: int, reply: RingAssignmentReply) -> "SlotAssignment | None":
        """Return the assignment of a slot; None if it is in no ring."""
        ring = next((index for index, each in enumerate(reply.rings) if slot in each), None)
        if ring is None:
            return None
        slots = tuple(reply.rings[ring])
        shares = dict(zip(slots, reply.shares[ring], strict=True))
        local_steps = reply.local_steps[ring] if reply.local_steps else 0
        return cls(ring=ring, slots=slots, shares=shares, local_steps=local_steps)

    def shard_samples(self, members: Sequence[str]) -> int:
        """Return the samples of a shard for these members; a ring that has lost one takes fewer, at the same rate."""
        return sum(self.shares[parse_member_name(member)[0]] for member in members)


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenBatch:
    """A batch that is not reduced yet."""

    batch_share: float
    first: int
    num_samples: int
    batch_shares: BatchShares

    def spans_of(self, members: Collection[str]) -> Iterator[Span]:
        for member in self.batch_shares.members:
            if member in members:
                part = slice_of_member(self.num_samples, self.batch_shares, member)
                yield self.first + part.start, part.stop - part.start


class RingProgress:
    """Progress of one member's ring; counts the samples of the next push, without those of lost members."""

    def __init__(self, cursor: RingCursor, trainer: TrainerState, on_pause: Callable[[Membership], object]) -> None:
        """Create it; `on_pause` gets each membership about to form, except the first with this member."""
        self.cursor, self._trainer, self._on_pause = cursor, trainer, on_pause
        self._accounting, self._progress = trainer.accounting, trainer.progress
        self.samples = UnpushedSamples()
        """Samples of the next push."""
        self._open_batches: list[_OpenBatch] = []
        """Batches that were drawn and are not reduced yet, or miss samples of lost members."""
        self._num_reduced = 0
        """Samples of these batches that are reduced."""
        self.has_whole_epoch = True
        """The ring has taken part since the start of the epoch."""
        self.is_broadcasting = False
        """The next commit is a broadcast, without gradients."""
        self._has_begun = False

    # Hooks of the trainer state.

    @property
    def misses_samples(self) -> bool:
        """The last step misses samples of a lost member, which come next; nothing of it is pushed before."""
        return bool(self._accounting.missing)

    def status_details(self) -> dict[str, Any]:
        return {"ring": self.cursor.to_json(), "is_whole": self.has_whole_epoch}

    def note_commit(self, commit: Commit) -> None:
        """Add the samples of a commit to the next push, unless some of the step are still missing."""
        if not self._open_batches:
            return
        self._num_reduced += commit.account.num_samples
        if self._accounting.missing:
            return
        num_whole = sum(each.num_samples for each in self._open_batches)
        part = self._num_reduced / max(1, num_whole)
        self.samples.add(self._num_reduced, part * sum(each.batch_share for each in self._open_batches))
        self._note_pushed_spans(None if self._num_reduced == num_whole else commit.members)
        self.samples.num_batches += len(self._open_batches) - 1
        self._open_batches.clear()
        self._num_reduced = 0

    def _note_pushed_spans(self, members: Collection[str] | None) -> None:
        """Note the parts of these members in the ring's next push; None: of all, also of those that were lost."""
        epoch = self._progress.epoch
        done = self.cursor.done_spans_of(epoch)
        spans = [
            span
            for each in self._open_batches
            for span in each.spans_of(each.batch_shares.members if members is None else members)
        ]
        self.samples.note_spans(epoch, epoch, [part for span in spans for part in spans_in_epoch(done, *span)])

    def check_membership(self, membership: Membership) -> None:
        if self._has_begun:
            self._on_pause(membership)

    def begin_generation(self, details: Mapping[str, Any], *, is_joining: bool) -> None:
        """Begin a generation; `details` are those of the member whose state this one has, if it is joining."""
        if is_joining:
            self.cursor.load_json(details["ring"])
            self.has_whole_epoch = details["is_whole"]
        self._has_begun = True

    # The loader and the worker.

    def record_batch(self, batch: Indices, batch_share: float, first: int = 0) -> None:
        """Record a batch that the ring computes now.

        Args:
            batch: Its samples.
            batch_share: Its fraction of a train step of all rings.
            first: Position of its first sample in the remaining order of the epoch.
        """
        shares = self._trainer.record_batch(batch)
        self._open_batches.append(
            _OpenBatch(batch_share=batch_share, first=first, num_samples=len(batch), batch_shares=shares)
        )

    @property
    def batch_part(self) -> float:
        """Train steps that the last drawn batch counts for; its missing samples are drawn in the order of batches."""
        last = len(self._open_batches) - len(self._accounting.missing) - 1
        return self._open_batches[last].batch_share if self._open_batches else 1.0

    @property
    def last_batch_shares(self) -> BatchShares:
        """Shares of the last drawn batch; a new generation does not change them."""
        return self._open_batches[-1].batch_shares

    def open_epoch(self, number: int) -> None:
        """Start a new epoch of the data."""
        self.has_whole_epoch = True
        self._trainer.open_epoch(number)

    def report(self) -> dict[str, Any]:
        """Return the ring's report at a barrier of all rings."""
        return ring_report(self._accounting, is_whole=self.has_whole_epoch)

    def last_words(self) -> str:
        """Return the report used if no member of the ring is left."""
        return ring_progress_json(self._accounting)

    def resume_ring(self, cursor: Mapping[str, Any], epoch: int, ring_report: RingReport) -> None:
        """Start or resume the ring in this epoch, from the server's cursor and the ring's own last report."""
        self.cursor.load_json(cursor)
        if epoch != self._progress.epoch:
            self.open_epoch(epoch)
        if ring_report.get("epoch") == epoch:
            self._accounting.load_json(epoch, ring_report["accounts"])
        self.has_whole_epoch = self.cursor.num_shards == 0

    def discard_open_batches(self) -> None:
        """Discard the samples that were drawn and not pushed: the pass was broken off."""
        self._accounting.load_json(self._accounting.epoch, self._accounting.to_json())
        self._open_batches.clear()
        self._num_reduced = 0
        self.samples.clear()
        self._progress.num_since_commit = 0
