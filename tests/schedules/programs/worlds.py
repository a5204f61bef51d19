"""Programs of all ranks run in one thread on made-up memory, in any order that real ranks and wires could take.

Elements are expressions, so that what was combined with what, and in which order, can be read from the result. Nothing
is copied when a send starts: an element is read when it leaves, which may be any time later, one by one. Under
rendezvous it leaves when the receive is posted as well; with buffers in between it leaves when it likes. Between ranks
of one node it is shown in the sender's arena once its place there is free, and read from there by the instruction that
waits for it; or it is lent: read in the sender's memory by that instruction, and only then it has left.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ringweave.schedules.program import IN_PLACE, NO_SLOT, Instruction, Opcode, RankProgram

Action = Callable[[], None]


class ViolationError(AssertionError):
    """A program did what it must not."""


@dataclass
class Send:
    """A piece on its way out of a rank's memory."""

    memory: list[Any]
    start: int
    stop: int
    next: int
    slot: int = NO_SLOT
    is_cross_memory: bool = False


@dataclass
class Post:
    """A posted receive."""

    owner: int
    memory: list[Any]
    next: int
    stop: int
    size: int


@dataclass
class Channel:
    """From one rank to another, in order."""

    sends: deque[Send] = field(default_factory=deque)
    sizes: deque[int] = field(default_factory=deque)
    pipe: deque[Any] = field(default_factory=deque)
    shown: deque[Send] = field(default_factory=deque)
    posts: deque[Post] = field(default_factory=deque)


@dataclass
class Rank:
    """One interpreter."""

    number: int
    program: RankProgram
    memory: list[Any]
    buffers: list[list[Any]]
    at: int = 0
    sends: dict[int, Send] = field(default_factory=dict)
    posts: dict[int, Post] = field(default_factory=dict)
    arena: list[Any] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    is_shown: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = self.program.layout.slots
        self.arena = [None] * self.program.layout.num_elements
        self.unread = [stage.num_readers for stage in stages]
        self.is_shown = [False] * len(stages)

    @property
    def step(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.at] if self.at < len(instructions) else None


class World:
    """All ranks of one collective, and the wires between them."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        num_elements: int,
        random: Random,
        *,
        eager: bool,
        pace: str,
        lent: float = 0.0,
    ) -> None:
        """`lent` is the fraction of the pieces for ranks of the same node that are lent."""
        self.ranks = [
            Rank(r, program, [r] * num_elements, [[None] * program.buffer_elements for _ in range(program.num_buffers)])
            for r, program in enumerate(programs)
        ]
        self._channels: dict[tuple[int, int], Channel] = {}
        self._random = random
        self._eager = eager
        self._lent = lent
        self._pace = pace
        self._slow = random.randrange(len(programs))

    def run(self) -> list[list[Any]]:
        """Every rank's memory after the last instruction."""
        while actions := self._possible():
            self._random.choice(actions)()
        for rank in self.ranks:
            if rank.step is not None:
                raise ViolationError(f"rank {rank.number} waits for ever in {rank.step}")
        if any(c.sends or c.pipe or c.shown or c.posts for c in self._channels.values()):
            raise ViolationError("a message was sent or awaited in vain")
        return [rank.memory for rank in self.ranks]

    def _possible(self) -> list[Action]:
        """What may happen next, as far as the pace lets it."""
        steps = {r.number: action for r in self.ranks if (action := self._step_of(r))}
        moves = {ends: action for ends, c in self._channels.items() if (action := self._move_of(c))}
        if self._pace == "one slow":
            others = [action for r, action in steps.items() if r != self._slow]
            others += [action for ends, action in moves.items() if self._slow not in ends]
            return others or [*steps.values(), *moves.values()]
        if self._pace == "wires slow":
            return list(steps.values() or moves.values())
        if self._pace == "ranks slow":
            return list(moves.values() or steps.values())
        return [*steps.values(), *moves.values()]

    def _step_of(self, rank: Rank) -> Action | None:
        step = rank.step
        if step is None:
            return None
        channel = self._channel(step.peer, rank.number)
        if step.opcode == Opcode.WAIT_RECV and channel.shown and channel.posts[0] is rank.posts[step.piece]:
            return lambda: self._read_or_report(channel, rank, step)
        if step.opcode == Opcode.WAIT_RECV and rank.posts[step.piece].next < rank.posts[step.piece].stop:
            return None
        if step.opcode == Opcode.WAIT_SEND and rank.sends[step.piece].next < rank.sends[step.piece].stop:
            return None
        return lambda: self._do(rank, step)

    def _do(self, rank: Rank, step: Instruction) -> None:
        rank.at += 1
        size = step.stop - step.start
        if step.opcode == Opcode.SEND:
            send = Send(rank.memory, step.start, step.stop, step.start, step.buffer)
            if step.buffer != NO_SLOT and self._random.random() < self._lent:
                send.is_cross_memory = True
                rank.unread[step.buffer] -= 1
            rank.sends[step.piece] = send
            channel = self._channel(rank.number, step.peer)
            channel.sends.append(rank.sends[step.piece])
            channel.sizes.append(size)
        elif step.opcode == Opcode.POST_RECV:
            memory, start = (rank.memory, step.start) if step.buffer == IN_PLACE else (rank.buffers[step.buffer], 0)
            rank.posts[step.piece] = Post(rank.number, memory, start, start + size, size)
            self._channel(step.peer, rank.number).posts.append(rank.posts[step.piece])
        elif step.opcode == Opcode.WAIT_RECV and step.buffer != IN_PLACE:
            for offset in range(size):
                mine = rank.memory[step.start + offset]
                self._write_job(rank, step.start + offset, (mine, rank.buffers[step.buffer][offset]))

    def _write_job(self, rank: Rank, at: int, value: Any) -> None:
        if any(send.next <= at < send.stop for send in rank.sends.values()):
            raise ViolationError(f"rank {rank.number} overwrites element {at} before it has left")
        rank.memory[at] = value

    def _channel(self, src: int, dst: int) -> Channel:
        return self._channels.setdefault((src, dst), Channel())

    def _read_or_report(self, channel: Channel, reader: Rank, step: Instruction) -> None:
        """Take a piece that is shown, as it is there by now."""
        reader.at += 1
        send, owner = channel.shown.popleft(), self._rank_of(channel)
        channel.posts.popleft()
        if channel.sizes.popleft() != step.stop - step.start:
            raise ViolationError(f"rank {reader.number} reads another piece than is shown")
        offset = owner.program.layout.slots[send.slot].offset
        for place, at in enumerate(range(step.start, step.stop), start=offset):
            shown_at, value = (at, send.memory[at]) if send.is_cross_memory else owner.arena[place]
            if shown_at != at:
                raise ViolationError(f"rank {reader.number} finds element {shown_at} where {at} was shown")
            self._write_job(reader, at, value if step.buffer == IN_PLACE else (reader.memory[at], value))
        if send.is_cross_memory:
            send.next = send.stop
        else:
            owner.unread[send.slot] -= 1

    def _show(self, channel: Channel) -> None:
        """Copy what is next into the arena, unless another rank's reading has brought it there."""
        send, owner = channel.sends.popleft(), self._rank_of(channel)
        if send.is_cross_memory:
            channel.shown.append(send)
            return
        offset = owner.program.layout.slots[send.slot].offset
        if not owner.is_shown[send.slot]:
            for place, at in enumerate(range(send.start, send.stop), start=offset):
                owner.arena[place] = (at, send.memory[at])
            owner.is_shown[send.slot] = True
        send.next = send.stop
        channel.shown.append(send)

    def _may_show(self, channel: Channel) -> bool:
        owner, send = self._rank_of(channel), channel.sends[0]
        stages = owner.program.layout.slots
        after = stages[send.slot].previous_slot
        while after != NO_SLOT and not owner.unread[after] and not owner.is_shown[after]:
            after = stages[after].previous_slot
        return send.is_cross_memory or owner.is_shown[send.slot] or after == NO_SLOT or owner.unread[after] == 0

    def _rank_of(self, channel: Channel) -> Rank:
        """Who sends in this channel."""
        return next(self.ranks[src] for (src, _), other in self._channels.items() if other is channel)

    def _move_of(self, channel: Channel) -> Action | None:
        """An element leaves, or arrives, or under rendezvous does both; or a piece is shown."""
        if channel.sends and channel.sends[0].slot != NO_SLOT:
            return (lambda: self._show(channel)) if self._may_show(channel) else None
        may_leave = bool(channel.sends) and (self._eager or bool(channel.posts and not channel.pipe))
        may_arrive = bool(channel.posts and channel.pipe)
        if may_arrive and not (may_leave and self._random.random() < 0.5):
            return lambda: self._arrive(channel)
        return (lambda: self._leave(channel)) if may_leave else None

    def _leave(self, channel: Channel) -> None:
        send = channel.sends[0]
        for _ in range(self._random.randint(1, send.stop - send.next)):
            channel.pipe.append(send.memory[send.next])
            send.next += 1
            if not self._eager:
                self._arrive(channel)
        if send.next == send.stop:
            channel.sends.popleft()

    def _arrive(self, channel: Channel) -> None:
        post = channel.posts[0]
        if post.size != channel.sizes[0]:
            raise ViolationError(f"rank {post.owner} expects {post.size} elements, {channel.sizes[0]} come")
        value, owner = channel.pipe.popleft(), self.ranks[post.owner]
        if post.memory is owner.memory:
            self._write_job(owner, post.next, value)
        else:
            post.memory[post.next] = value
        post.next += 1
        if post.next == post.stop:
            channel.posts.popleft()
            channel.sizes.popleft()


def check_exposure(program: RankProgram, window: int) -> None:
    """Whether a program is safe by itself, whatever the wires do.

    A region that is being sent is not written, one that a receive lands in is neither read nor written, a buffer holds
    one piece, no more receives are posted than the window allows, and everything that was begun is waited for.
    """
    sending: dict[int, Instruction] = {}
    landing: dict[int, Instruction] = {}
    for step in program.instructions:
        in_place = [other for other in landing.values() if other.buffer == IN_PLACE]
        if step.opcode == Opcode.SEND:
            _expect_apart(step, in_place)
            sending[step.piece] = step
        elif step.opcode == Opcode.POST_RECV:
            if step.buffer == IN_PLACE:
                _expect_apart(step, [*in_place, *sending.values()])
            elif any(other.buffer == step.buffer for other in landing.values()):
                raise ViolationError(f"buffer {step.buffer} holds two pieces")
            landing[step.piece] = step
            if len(landing) > window:
                raise ViolationError(f"{len(landing)} receives are posted, the window is {window}")
        elif step.opcode == Opcode.WAIT_RECV:
            if _begun(landing, step).buffer != IN_PLACE:
                _expect_apart(step, [*in_place, *sending.values()])
        else:
            _begun(sending, step)
    if sending or landing:
        raise ViolationError("the program ends before all that it began is through")


def _begun(under_way: dict[int, Instruction], step: Instruction) -> Instruction:
    if step.piece not in under_way:
        raise ViolationError(f"{step} waits for what was never begun")
    return under_way.pop(step.piece)


def _expect_apart(step: Instruction, others: Sequence[Instruction]) -> None:
    for other in others:
        if step.start < other.stop and other.start < step.stop:
            raise ViolationError(f"{step} touches what {other} uses")
