"""Ranks make sure that they are about to run the same thing before they run it for the first time."""

import json
from dataclasses import asdict, dataclass

import torch

from ringweave.comm.members import Members
from ringweave.comm.transport.seam import Transport
from ringweave.errors import DisagreementError
from ringweave.schedules.programs.staging import NO_STAGE, Layout, Stage

_MESSAGE_BYTES = 512
_LAYOUT = Layout((Stage(0, 1, NO_STAGE, is_awaited=False),), _MESSAGE_BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """What a rank is about to run; equal intents are the same program on both sides."""

    operation: str
    """Reduce operation."""
    dtype: str
    """Of the message."""
    num_elements: int
    """Length of the message."""
    schedule: str
    """Name of the schedule."""
    digest: str
    """Its digest."""
    pipelining: str
    """How the message is cut in time."""

    def __str__(self) -> str:
        return (
            f"allreduce({self.operation}) of {self.num_elements} x {self.dtype} by {self.schedule} "
            f"{self.digest[:12]}, {self.pipelining}"
        )


def agree(intent: Intent, members: Members, transport: Transport, *, tag: int, timeout_s: float) -> None:
    """Return once both neighbours on the ring of group ranks are known to intend the same.

    Every rank compares with its left neighbour only: if no pair differs, nobody does.

    Raises:
        DisagreementError: The left neighbour intends something else; the text names both ranks and intents.
        TransferFailedError: A neighbour is gone or stays silent.

    Cost:
        One small message to the right, one from the left.
    """
    size, own = members.group_size, members.group_rank
    right, left = (own + 1) % size, (own - 1) % size
    theirs = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    transport.connect({left, right}, timeout_s)
    transport.begin(_LAYOUT, 1)
    arriving = transport.receive(transport.expose(theirs)[:], left, tag)
    leaving = transport.send(transport.expose(_pack(intent))[:], right, tag, 0)
    arrived = transport.wait(arriving, timeout_s)
    if arrived is not None:
        arrived.copy_to(theirs)
        transport.release(arriving)
    transport.wait(leaving, timeout_s)
    other = _unpack(theirs)
    if other != intent:
        found = str(other) if other else "something unreadable"
        raise DisagreementError(
            f"collective: {members.name(own)} is about to run {intent}, but {members.name(left)} {found}, expected "
            "every rank of the group to call the same collectives in the same order with the same sizes and the same "
            "ringweave version. Compare what the two ranks do here."
        )


def _pack(intent: Intent) -> torch.Tensor:
    text = json.dumps(asdict(intent)).encode().ljust(_MESSAGE_BYTES)
    if len(text) > _MESSAGE_BYTES:
        raise ValueError(f"intent of {len(text)} bytes, expected at most {_MESSAGE_BYTES}: {intent}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _unpack(message: torch.Tensor) -> Intent | None:
    try:
        return Intent(**json.loads(bytes(message.tolist())))
    except (ValueError, TypeError, RecursionError):
        return None
