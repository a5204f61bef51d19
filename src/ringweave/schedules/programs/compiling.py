"""From a rank's part of a schedule to the straight list of instructions that an executor runs.

The message is cut into segments, and each segment runs the whole schedule for itself, so that while one segment is
being combined the next ones are on the wire. All decisions are taken here, once per message size: which receive is
posted how far ahead and into which buffer, which send may leave when, what must have completed before a region is
overwritten. The executor then only follows.

Pieces (one transfer of one segment) carry a key, (round + lag * segment, segment, place in the round), that is the same
on both sides. Every rank waits in the order of the keys and never for anything that comes later than the piece it
waits for; so the piece with the smallest key that has not arrived can always move, and there is no deadlock. A piece
for a rank of this node may leave only when that rank takes it, at its turn; its place in the round is not the same on
both sides, so it is not waited for before a turn of the same round and segment.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from ringweave.schedules.programs import staging
from ringweave.schedules.programs.program import IN_PLACE, Do, Instruction, Pipelining, Program
from ringweave.schedules.projection import Transfer
from ringweave.schedules.schedule import How, Schedule


@dataclass(slots=True)
class _Piece:
    transfer: Transfer
    start: int
    stop: int
    key: tuple[int, int, int]
    after_arrivals: list[int] = field(default_factory=list)
    """Pieces that must have arrived before this one is sent, or posted in place."""
    after_departures: list[int] = field(default_factory=list)
    """Sent pieces that must have left before this one may touch its region."""
    stage: int = staging.NO_STAGE
    """Where it is shown, if it is sent to a rank of this node."""

    @property
    def in_place(self) -> bool:
        return self.transfer.how == How.COPY


def compile_program(
    schedule: Schedule,
    transfers: Sequence[Transfer],
    num_elements: int,
    pipelining: Pipelining,
    neighbours: Set[int] = frozenset(),
) -> Program:
    """The instructions of the rank whose transfers these are, for messages of `num_elements`.

    `neighbours` are the ranks of its node: they read what it sends them out of memory that is shared.

    Cost:
        Linear in transfers x segments x chunks per transfer.
    """
    pieces = _cut(schedule, transfers, num_elements, pipelining)
    layout = _lay_out([p for p in pieces if p.transfer.sends and p.transfer.peer in neighbours], pipelining)
    emitter = _Emitter(pieces, pipelining.window)
    emitter.run()
    sends = sum(piece.transfer.sends for piece in pieces)
    largest = max((p.stop - p.start for p in pieces if not (p.transfer.sends or p.in_place)), default=0)
    peers = frozenset(piece.transfer.peer for piece in pieces)
    return Program(tuple(emitter.instructions), len(pieces), emitter.num_buffers, largest, sends, peers, layout)


def _cut(schedule: Schedule, transfers: Sequence[Transfer], num_elements: int, pipelining: Pipelining) -> list[_Piece]:
    """All pieces in the order of their keys, with what each has to come after; empty pieces are left out."""
    pieces: list[_Piece] = []
    count = pipelining.num_segments
    for segment in range(count):
        begin, end = num_elements * segment // count, num_elements * (segment + 1) // count
        offsets = [begin + offset for offset in schedule.offsets(end - begin)]
        for place, transfer in enumerate(transfers):
            start, stop = offsets[transfer.first_chunk], offsets[transfer.first_chunk + transfer.num_chunks]
            if start < stop:
                key = (transfer.round_index + pipelining.lag * segment, segment, place)
                pieces.append(_Piece(transfer, start, stop, key))
    pieces.sort(key=lambda piece: piece.key)
    _find_hazards(pieces)
    return pieces


def _find_hazards(pieces: list[_Piece]) -> None:
    """Per segment and chunk: reads after writes, writes after reads, writes after writes."""
    last_write: dict[tuple[int, int], int] = {}
    reads_since: dict[tuple[int, int], list[int]] = {}
    for number, piece in enumerate(pieces):
        transfer = piece.transfer
        for chunk in range(transfer.first_chunk, transfer.first_chunk + transfer.num_chunks):
            region = (piece.key[1], chunk)
            if region in last_write and last_write[region] not in piece.after_arrivals:
                piece.after_arrivals.append(last_write[region])
            if transfer.sends:
                reads_since.setdefault(region, []).append(number)
            else:
                piece.after_departures.extend(n for n in reads_since.pop(region, ()) if n not in piece.after_departures)
                last_write[region] = number


def _lay_out(shown: Sequence[_Piece], pipelining: Pipelining) -> staging.Layout:
    """Give each piece that is shown to a rank of this node its stage."""
    contents = [staging.Content(p.key[1], p.start, p.stop, tuple(sorted(p.after_arrivals))) for p in shown]
    rounds = [piece.transfer.round_index for piece in shown]
    showings = zip(contents, rounds, strict=True)
    layout, stages = staging.lay_out(showings, pipelining.num_segments, pipelining.lag)
    for piece, content in zip(shown, contents, strict=True):
        piece.stage = stages[content]
    return layout


class _Emitter:
    """Walks the receives in the order of their keys and emits everything else as early as it is safe."""

    def __init__(self, pieces: list[_Piece], window: int) -> None:
        self.instructions: list[Instruction] = []
        self.num_buffers = 0
        self._pieces = pieces
        self._window = window
        self._receives = [n for n, piece in enumerate(pieces) if not piece.transfer.sends]
        self._sends: dict[int, list[int]] = {}
        for number in reversed([n for n, piece in enumerate(pieces) if piece.transfer.sends]):
            self._sends.setdefault(pieces[number].transfer.peer, []).append(number)
        self._num_posted = 0
        self._arrived: set[int] = set()
        self._leaving: set[int] = set()
        self._departed: set[int] = set()
        self._buffer_of: dict[int, int] = {}
        self._free_buffers: list[int] = []

    def run(self) -> None:
        """Emit the whole program."""
        for place, number in enumerate(self._receives):
            self._send_ready()
            self._post_ahead(place)
            piece = self._pieces[number]
            if piece.transfer.how == How.REDUCE:
                self._depart(piece.after_departures)
            buffer = self._buffer_of[number]
            self._emit(Do.ARRIVE, number, buffer)
            self._arrived.add(number)
            if buffer != IN_PLACE:
                self._free_buffers.append(buffer)
        self._send_ready()
        self._depart(sorted(self._leaving))
        assert not any(self._sends.values()), "a send depends on nothing that arrives"

    def _send_ready(self) -> None:
        """Every send whose content has arrived leaves, to each peer in the order of the keys."""
        for waiting in self._sends.values():
            while waiting and self._arrived.issuperset(self._pieces[waiting[-1]].after_arrivals):
                number = waiting.pop()
                self._emit(Do.SEND, number, self._pieces[number].stage)
                self._leaving.add(number)

    def _post_ahead(self, place: int) -> None:
        """Post receives in order while the window is open and their regions are free."""
        turn = self._receives[place]
        while self._num_posted < min(place + self._window, len(self._receives)):
            number = self._receives[self._num_posted]
            piece = self._pieces[number]
            if piece.in_place:
                if not self._arrived.issuperset(piece.after_arrivals):
                    break
                if any(self._may_leave_after(sent, turn) for sent in piece.after_departures):
                    break  # it has to wait for a send that comes later than our turn
                self._depart(piece.after_departures)
            self._buffer_of[number] = IN_PLACE if piece.in_place else self._take_buffer()
            self._emit(Do.POST, number, self._buffer_of[number])
            self._num_posted += 1

    def _may_leave_after(self, sent: int, turn: int) -> bool:
        """Whether a piece may be on its way until our turn, or a peer's of the same round and segment, is over."""
        if self._pieces[sent].stage == staging.NO_STAGE:
            return sent >= turn
        return self._pieces[sent].key[:2] >= self._pieces[turn].key[:2]

    def _take_buffer(self) -> int:
        if self._free_buffers:
            return self._free_buffers.pop()
        self.num_buffers += 1
        return self.num_buffers - 1

    def _depart(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number not in self._departed:
                self._leaving.remove(number)
                self._departed.add(number)
                self._emit(Do.LEAVE, number, IN_PLACE)

    def _emit(self, do: Do, number: int, buffer: int) -> None:
        piece = self._pieces[number]
        self.instructions.append(Instruction(do, number, piece.transfer.peer, piece.start, piece.stop, buffer))
