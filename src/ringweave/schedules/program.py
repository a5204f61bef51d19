"""Program of one rank: a straight list of instructions that runs its part of a schedule in pipelined segments.

The message is cut into segments, and each segment runs the whole schedule for itself, so that while one segment is
being combined the next ones are on the wire. Where chunks have owners (reduce-scatter, allgather), every chunk is cut
into segments instead, so that a chunk stays in its owner's block of the message. All decisions are taken here, once per
message size: how far ahead each receive is posted and into which buffer, when each send may leave, which operations
must complete before a region is overwritten. The executor then only follows.

Pieces (one transfer of one segment) carry a key, (round + lag * segment, segment, place in the round), that is the same
on both sides. Every rank waits in the order of the keys and never for anything that comes later than the piece it
waits for; so the piece with the smallest key that has not arrived can always move, and there is no deadlock. Sends may
be held back until the rank waits for a piece at most `ahead` rounds before them, which delays no piece whose turn it
is: streams that could start at once would take the links from those that all others wait for. A piece for a rank of
this node may leave only when that rank takes it, at its turn; its place in the round is not the same on both sides, so
it is not waited for before a turn of the same round and segment.

Content for ranks of the same node goes through shared memory. Content for several of them is staged once. Only the
segments of a window have slots of their own: segment s uses those of segment s - window again, so the memory stays
small and in the caches.
"""

import bisect
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from ringweave.schedules import wire_formats
from ringweave.schedules.schedule import ReceiveOp, Schedule
from ringweave.schedules.wire_formats import WireFormat

_ALIGNMENT_ELEMENTS = 64

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StagingSlot:
    """A place in shared memory for one content that ranks of this node read."""

    offset: int
    """Its offset, in elements."""
    num_readers: int
    """Number of ranks that read it."""
    previous_slot: int
    """Slot used before at the same place: its readers must be done; NO_SLOT if the place is unused."""
    is_reused: bool
    """A later slot of the program uses the same place."""


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """All staging slots of a program."""

    slots: tuple[StagingSlot, ...] = ()
    num_elements: int = 0
    """Size of the memory that they need, in elements."""


class StagedContent(NamedTuple):
    """Staged content; equal contents are staged once."""

    segment: int
    start: int
    stop: int
    written_by: tuple[int, ...]
    """Pieces that wrote it last; with the region they identify the content."""


def plan_staging(
    staged_sends: Iterable[tuple[StagedContent, int]], num_segments: int, lag: int
) -> tuple[StagingLayout, Mapping[StagedContent, int]]:
    """Plan the staging slot of each content.

    The window of segments is as narrow as possible without a deadlock: in the order of the keys, each reader of a place
    reads the content of segment s - window before any rank needs the content of segment s there.

    Args:
        staged_sends: Content and round of each send to a rank of this node, in the order of the keys.
        num_segments: Segments of the message.
        lag: Rounds by which a segment follows the one before it in that order.

    Returns:
        The layout, and the slot of each content.
    """
    rounds: dict[StagedContent, list[int]] = {}
    for content, round_index in staged_sends:
        rounds.setdefault(content, []).append(round_index)
    places, counts = dict[StagedContent, int](), dict[int, int]()
    for content in rounds:
        places[content] = counts.get(content.segment, 0)
        counts[content.segment] = places[content] + 1
    window = _segment_window(rounds, places, num_segments, lag)
    offsets, slot_elements = _place_offsets(places)
    slots, last_at = list[StagingSlot](), dict[tuple[int, int], int]()
    for number, content in enumerate(rounds):
        slot, place = content.segment % window, places[content]
        before = last_at.get((slot, place), NO_SLOT)
        if before != NO_SLOT:
            slots[before] = dataclasses.replace(slots[before], is_reused=True)
        offset = slot * slot_elements + offsets[place]
        slots.append(StagingSlot(offset, len(rounds[content]), before, is_reused=False))
        last_at[slot, place] = number
    numbers = {content: number for number, content in enumerate(rounds)}
    return StagingLayout(tuple(slots), window * slot_elements), numbers


def _segment_window(
    rounds: Mapping[StagedContent, list[int]], places: Mapping[StagedContent, int], num_segments: int, lag: int
) -> int:
    first, last = dict[int, int](), dict[int, int]()
    for content, when in rounds.items():
        place = places[content]
        first[place] = min(first.get(place, when[0]), when[0])
        last[place] = max(last.get(place, when[-1]), when[-1])
    span = max((last[place] - first[place] for place in first), default=0)
    return min(num_segments, max(2, span // lag + 1)) if lag else num_segments


def _place_offsets(places: Mapping[StagedContent, int]) -> tuple[list[int], int]:
    """Return the offset of each place of one segment, sized for its largest content, and their total size."""
    sizes: list[int] = []
    for content, place in places.items():
        if place == len(sizes):
            sizes.append(0)
        sizes[place] = max(sizes[place], -(-(content.stop - content.start) // _ALIGNMENT_ELEMENTS))
    ends = list(itertools.accumulate((size * _ALIGNMENT_ELEMENTS for size in sizes), initial=0))
    return ends[:-1], ends[-1]


IN_PLACE = -1
"""Buffer of a receive that lands directly in the message."""


class Opcode(enum.IntEnum):
    """Kind of an instruction."""

    POST_RECV = 0
    """Post the receive of a piece, into a scratch buffer or in place."""
    SEND = 1
    """Start sending a piece."""
    WAIT_RECV = 2
    """Wait until a posted piece has arrived; combine a piece in a scratch buffer with the message."""
    WAIT_SEND = 3
    """Wait until a sent piece has left: its region may be overwritten."""


@dataclass(frozen=True, slots=True)
class PieceCoding:
    """Coding of a piece in an encoded schedule.

    Its parts are those of the chunks, which are encoded one by one: the blocks of a chunk are then the same in all
    pieces that contain it, and encoding it again gives the same bytes.
    """

    format: WireFormat
    borders: tuple[int, ...]
    """First element of each part, and the end of the piece."""
    travels: bool
    """The piece is encoded on its way; else it travels exactly, after rounding."""
    is_copy: bool
    """It is a part of the complete sum: the receiver overwrites, and encodes without error feedback what it hands on.
    """
    fresh: tuple[bool, ...] = ()
    """Parts of a sent copy that hold a sum which is not rounded yet; all ranks get the rounded one."""

    @property
    def encoded_bytes(self) -> int:
        return sum(self.format.encoded_bytes(stop - start) for start, stop in itertools.pairwise(self.borders))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on one piece: elements `start .. stop` of the message."""

    opcode: Opcode
    piece: int
    peer: int
    start: int
    stop: int
    buffer: int
    """Scratch buffer of a receive, or IN_PLACE; staging slot of a send to a rank of this node, or NO_SLOT."""
    coding: PieceCoding | None = None
    """None for a piece that is neither rounded nor encoded."""

    def wire_bytes(self, element_bytes: int) -> int:
        """Return the size of the message, without headers."""
        if self.coding is not None and self.coding.travels:
            return self.coding.encoded_bytes
        return (self.stop - self.start) * element_bytes


@dataclass(frozen=True, slots=True)
class RankProgram:
    """Instructions of one rank for one message size."""

    instructions: tuple[Instruction, ...]
    num_pieces: int
    num_buffers: int
    buffer_elements: int
    num_sends: int
    """Messages that this rank puts on the wire."""
    peers: frozenset[int]
    """Group ranks that it exchanges messages with."""
    layout: StagingLayout
    """Staging slots that it shows to the ranks of its node."""
    is_encoded: bool = False
    """It rounds and encodes pieces, of float32 messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipelining:
    """Division of a message into segments that overlap in time."""

    num_segments: int = 1
    """Segments that run the schedule independently."""
    lag: int = 0
    """Rounds by which a segment follows the one before it in the order of waiting."""
    window: int = 2
    """Receives that are posted and not yet waited for."""
    ahead: int | None = None
    """Rounds, in the order of waiting, by which a send may precede the piece that its rank waits for; None is any
    number."""

    def __post_init__(self) -> None:
        if self.num_segments < 1 or self.lag < 0 or self.window < 1 or (self.ahead or 0) < 0:
            expected = "num_segments >= 1, lag >= 0, window >= 1, ahead >= 0"
            raise ValueError(f"pipelining: {self}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive of one rank."""

    round_index: int
    peer: int
    sends: bool
    first_chunk: int
    num_chunks: int
    how: ReceiveOp
    is_encoded: bool = False


def project_rank(schedule: Schedule, rank: int) -> tuple[Transfer, ...]:
    """Return the transfers of `rank` in the order of the rounds; within a round sends come first.

    Cost:
        One pass over the rounds.
    """
    transfers: list[Transfer] = []
    for index, round_ in enumerate(schedule.rounds):
        for sends, mine in ((True, round_.src == rank), (False, round_.dst == rank)):
            for src, dst, first, count, how in round_.select(mine).rows():
                encoded = schedule.is_encoded(src, dst)
                transfers.append(Transfer(index, dst if sends else src, sends, first, count, how, encoded))
    return tuple(transfers)


def project_all_ranks(schedule: Schedule) -> list[tuple[Transfer, ...]]:
    """Return the transfers of every rank, as `project_rank` returns them.

    Cost:
        One pass over the rounds, and an object for each side of each operation.
    """
    parts: list[list[Transfer]] = [[] for _ in range(schedule.num_ranks)]
    for index, round_ in enumerate(schedule.rounds):
        for sends in (True, False):
            for src, dst, first, count, how in round_.rows():
                own, peer = (src, dst) if sends else (dst, src)
                parts[own].append(Transfer(index, peer, sends, first, count, how, schedule.is_encoded(src, dst)))
    return [tuple(part) for part in parts]


@dataclass(slots=True)
class _Piece:
    transfer: Transfer
    chunks: range
    """Its chunks, or that one of the transfer's chunks of which it is a part."""
    start: int
    stop: int
    key: tuple[int, int, int]
    after_arrivals: list[int] = field(default_factory=list)
    """Pieces that must have arrived before this one is sent, or posted in place."""
    after_departures: list[int] = field(default_factory=list)
    """Sends that must be complete before this piece may touch its region."""
    slot: int = NO_SLOT
    """Its staging slot, if it is sent to a rank of this node."""

    borders: tuple[int, ...] = ()
    """First element of each of its chunks, and its end; in an encoded schedule."""

    @property
    def in_place(self) -> bool:
        return self.transfer.how == ReceiveOp.COPY and not self.transfer.is_encoded


def compile_program(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    num_elements: int,
    pipelining: Pipelining,
    neighbours: Set[int] = frozenset(),
) -> RankProgram:
    """Return the instructions of the rank with these transfers, for messages of `num_elements`.

    `neighbours` are the ranks of its node: they read its pieces from shared memory.

    Cost:
        Linear in transfers x segments x chunks per transfer.
    """
    pieces = _cut_pieces(schedule, transfers, num_elements, pipelining)
    if any(piece.transfer.is_encoded and piece.transfer.peer in neighbours for piece in pieces):
        raise ValueError("encoded transfers between ranks of one node, expected zones of whole nodes")
    layout = _assign_slots([p for p in pieces if p.transfer.sends and p.transfer.peer in neighbours], pipelining)
    wire_format = wire_formats.format_named(schedule.encoding.format) if schedule.encoding else None
    emitter = _ProgramEmitter(pieces, pipelining, wire_format)
    emitter.run()
    sends = sum(piece.transfer.sends for piece in pieces)
    largest = max((p.stop - p.start for p in pieces if not (p.transfer.sends or p.in_place)), default=0)
    peers, is_encoded = frozenset(piece.transfer.peer for piece in pieces), schedule.encoding is not None
    return RankProgram(
        tuple(emitter.instructions), len(pieces), emitter.num_buffers, largest, sends, peers, layout, is_encoded
    )


def _cut_pieces(
    schedule: Schedule, transfers: Sequence[Transfer], num_elements: int, pipelining: Pipelining
) -> list[_Piece]:
    """Return all pieces in the order of their keys, with their dependencies; empty pieces are left out."""
    pieces: list[_Piece] = []
    for segment in range(pipelining.num_segments):
        regions = _segment_regions(schedule, num_elements, segment, pipelining.num_segments)
        for place, transfer in enumerate(transfers):
            key = (transfer.round_index + pipelining.lag * segment, segment, place)
            for chunks, start, stop in regions(transfer.first_chunk, transfer.num_chunks):
                if start < stop:
                    pieces.append(_Piece(transfer, chunks, start, stop, key))
                    if schedule.encoding is not None:
                        pieces[-1].borders = (*(regions(chunk, 1)[0][1] for chunk in chunks), stop)
    pieces.sort(key=lambda piece: piece.key)
    _find_hazards(pieces)
    return pieces


_Region = tuple[range, int, int]
"""Consecutive chunks, and the first element and the end of their part of a segment."""


def _segment_regions(
    schedule: Schedule, num_elements: int, segment: int, num_segments: int
) -> Callable[[int, int], list[_Region]]:
    """Return the function that gives the regions of consecutive chunks in one segment, in ascending order."""
    if schedule.collective.owners is None or num_segments == 1:
        begin, end = num_elements * segment // num_segments, num_elements * (segment + 1) // num_segments
        borders = [begin + offset for offset in schedule.offsets(end - begin)]
        return lambda first, count: [(range(first, first + count), borders[first], borders[first + count])]
    borders = schedule.offsets(num_elements)

    def parts_of_chunks(first: int, count: int) -> list[_Region]:
        found: list[_Region] = []
        for chunk in range(first, first + count):
            start, size = borders[chunk], borders[chunk + 1] - borders[chunk]
            stop = start + size * (segment + 1) // num_segments
            found.append((range(chunk, chunk + 1), start + size * segment // num_segments, stop))
        return found

    return parts_of_chunks


def _find_hazards(pieces: list[_Piece]) -> None:
    """Record per segment and chunk: reads after writes, writes after reads, writes after writes."""
    last_write: dict[tuple[int, int], int] = {}
    reads_since: dict[tuple[int, int], list[int]] = {}
    for number, piece in enumerate(pieces):
        for chunk in piece.chunks:
            region = (piece.key[1], chunk)
            if region in last_write and last_write[region] not in piece.after_arrivals:
                piece.after_arrivals.append(last_write[region])
            if piece.transfer.sends:
                reads_since.setdefault(region, []).append(number)
            else:
                piece.after_departures.extend(n for n in reads_since.pop(region, ()) if n not in piece.after_departures)
                last_write[region] = number


def _assign_slots(staged: Sequence[_Piece], pipelining: Pipelining) -> StagingLayout:
    """Assign a staging slot to each piece for a rank of this node."""
    contents = [StagedContent(p.key[1], p.start, p.stop, tuple(sorted(p.after_arrivals))) for p in staged]
    rounds = [piece.transfer.round_index for piece in staged]
    staged_sends = zip(contents, rounds, strict=True)
    layout, stages = plan_staging(staged_sends, pipelining.num_segments, pipelining.lag)
    for piece, content in zip(staged, contents, strict=True):
        piece.slot = stages[content]
    return layout


class _ProgramEmitter:
    """Walks the receives in the order of their keys and emits everything else as early as is safe."""

    def __init__(self, pieces: list[_Piece], pipelining: Pipelining, wire_format: WireFormat | None) -> None:
        self._wire_format = wire_format
        self._is_rounded: dict[tuple[int, int], bool] = {}
        """Segments of chunks that hold the complete sum, rounded."""
        self.instructions: list[Instruction] = []
        self.num_buffers = 0
        self._pieces = pieces
        self._window, self._ahead = pipelining.window, math.inf if pipelining.ahead is None else pipelining.ahead
        self._receives = [n for n, piece in enumerate(pieces) if not piece.transfer.sends]
        self._sends: dict[int, list[int]] = {}
        for number in reversed([n for n, piece in enumerate(pieces) if piece.transfer.sends]):
            self._sends.setdefault(pieces[number].transfer.peer, []).append(number)
        self._num_posted = 0
        self._arrived: set[int] = set()
        self._in_flight: set[int] = set()
        self._departed: set[int] = set()
        self._buffer_of: dict[int, int] = {}
        self._free_buffers: list[int] = []

    def run(self) -> None:
        """Emit the whole program."""
        for place, number in enumerate(self._receives):
            piece = self._pieces[number]
            self._send_ready(piece.key[0] + self._ahead)
            self._post_ahead(place)
            if not piece.in_place:
                self._wait_for_sends(piece.after_departures)
            buffer = self._buffer_of[number]
            self._emit(Opcode.WAIT_RECV, number, buffer)
            self._arrived.add(number)
            if buffer != IN_PLACE:
                self._free_buffers.append(buffer)
        self._send_ready(math.inf)
        self._wait_for_sends(sorted(self._in_flight))
        assert not any(self._sends.values()), "a send depends on nothing that arrives"

    def _send_ready(self, last: float) -> None:
        """Emit every send up to key `last` whose content has arrived, to each peer in the order of the keys."""
        for waiting in self._sends.values():
            while waiting:
                number, piece = waiting[-1], self._pieces[waiting[-1]]
                if piece.key[0] > last or not self._arrived.issuperset(piece.after_arrivals):
                    break
                waiting.pop()
                self._emit(Opcode.SEND, number, self._pieces[number].slot)
                self._in_flight.add(number)

    def _post_ahead(self, place: int) -> None:
        """Post receives in order while the window is open and their regions are free."""
        turn = self._receives[place]
        while self._num_posted < min(place + self._window, len(self._receives)):
            number = self._receives[self._num_posted]
            piece = self._pieces[number]
            if piece.in_place:
                if not self._arrived.issuperset(piece.after_arrivals):
                    break
                if any(self._may_be_in_flight_after(sent, turn) for sent in piece.after_departures):
                    break  # it depends on a later send
                self._wait_for_sends(piece.after_departures)
            self._buffer_of[number] = IN_PLACE if piece.in_place else self._take_buffer()
            self._emit(Opcode.POST_RECV, number, self._buffer_of[number])
            self._num_posted += 1

    def _may_be_in_flight_after(self, sent: int, turn: int) -> bool:
        """Return whether a piece may be in flight until our turn, or a peer's in the same round, is over."""
        if self._pieces[sent].slot == NO_SLOT:
            return sent >= turn
        return self._pieces[sent].key[:2] >= self._pieces[turn].key[:2]

    def _take_buffer(self) -> int:
        if self._free_buffers:
            return self._free_buffers.pop()
        self.num_buffers += 1
        return self.num_buffers - 1

    def _wait_for_sends(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number not in self._departed:
                self._in_flight.remove(number)
                self._departed.add(number)
                self._emit(Opcode.WAIT_SEND, number, IN_PLACE)

    def _emit(self, do: Opcode, number: int, buffer: int) -> None:
        piece = self._pieces[number]
        coding = None if self._wire_format is None else self._coding_of(piece, do, self._wire_format)
        self.instructions.append(Instruction(do, number, piece.transfer.peer, piece.start, piece.stop, buffer, coding))

    def _coding_of(self, piece: _Piece, do: Opcode, wire_format: WireFormat) -> PieceCoding | None:
        """Return the coding of a piece; the first instruction that sends the complete sum of a chunk rounds it."""
        is_copy, travels = piece.transfer.how == ReceiveOp.COPY, piece.transfer.is_encoded
        regions = [(piece.key[1], chunk) for chunk in piece.chunks]
        fresh: tuple[bool, ...] = ()
        if do == Opcode.WAIT_RECV:
            self._is_rounded.update(dict.fromkeys(regions, is_copy))
        elif do == Opcode.SEND and is_copy:
            fresh = tuple(not self._is_rounded.get(region, False) for region in regions)
            self._is_rounded.update(dict.fromkeys(regions, True))
        return PieceCoding(wire_format, piece.borders, travels, is_copy, fresh) if travels or any(fresh) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentMarks:
    """Places in a program at which segments of its message may be copied; indices of segments by instruction."""

    bounds: tuple[int, ...]
    """Segment s is elements `bounds[s] .. bounds[s + 1]`."""
    first_touch: Mapping[int, tuple[int, ...]]
    """Segments that must be on the host before the instruction."""
    last_arrival: Mapping[int, tuple[int, ...]]
    """Segments that hold the sum after the instruction, which may still be sent from the host."""
    last_use: Mapping[int, tuple[int, ...]]
    """Segments that no later instruction reads or writes."""

    @property
    def num_segments(self) -> int:
        return len(self.bounds) - 1

    def missing_from(self, marks: Mapping[int, tuple[int, ...]]) -> list[int]:
        found = {segment for segments in marks.values() for segment in segments}
        return [segment for segment in range(self.num_segments) if segment not in found]


def segment_bounds(num_elements: int, num_segments: int, num_blocks: int = 1) -> tuple[int, ...]:
    """Return the bounds of the segments, or of those of each equal block, as `compile_program` cuts them."""
    size = num_elements // num_blocks
    bounds = [size * block + size * each // num_segments for block in range(num_blocks) for each in range(num_segments)]
    return (*bounds, num_elements)


def segment_marks(program: RankProgram, bounds: Sequence[int]) -> SegmentMarks:
    """Return the marks of a program for segments with these bounds; a piece may lie in several segments.

    Cost:
        Linear in the instructions, times the segments of a piece.
    """
    first: dict[int, int] = {}
    arrival: dict[int, int] = {}
    use: dict[int, int] = {}
    for index, instruction in enumerate(program.instructions):
        posts = instruction.opcode == Opcode.POST_RECV and instruction.buffer != IN_PLACE
        start = bisect.bisect_right(bounds, instruction.start) - 1
        stop = bisect.bisect_left(bounds, instruction.stop)
        for segment in range(start, stop):
            if not posts:
                first.setdefault(segment, index)
            rounds = instruction.opcode == Opcode.SEND and instruction.coding is not None and instruction.coding.is_copy
            if rounds or instruction.opcode == Opcode.WAIT_RECV:
                arrival[segment] = index
            use[segment] = index
    return SegmentMarks(
        bounds=tuple(bounds), first_touch=_by_index(first), last_arrival=_by_index(arrival), last_use=_by_index(use)
    )


def _by_index(indices: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for segment, index in indices.items():
        found[index] = (*found.get(index, ()), segment)
    return found
