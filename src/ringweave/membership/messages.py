"""RPC messages between members and coordinators of the membership."""

import math
import re
from typing import Annotated, ClassVar

import pydantic

from ringweave.membership.election import Rejoin
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import MemberDirective, MemberStatus
from ringweave.rpc import RpcMessage

MAX_NOTE_CHARS = 64 * 1024
"""Maximum length of a note; each member gets the notes of all."""
MAX_LAYOUT_CHARS = 256 * 1024
"""Maximum length of a layout; each member gets one."""
MAX_BATCH_SHARES_CHARS = 1024 * 1024
"""Maximum length of the text that says how a batch is shared, by as many members as possible; each member gets one."""


MAX_MEMBERS = 65536
"""Members of one part of a job, at most."""
WHOLE_JOB = ""
"""Part that is the whole job."""
STARTUP_RENDEZVOUS = "rendezvous"
"""Part for members that do not know yet which part they belong to."""
_RING_PREFIX = "ring "
"""Prefix of the parts that are rings."""
ADDRESS_PATTERN = r"^[!-~]{1,255} [0-9]{1,5}$"
"""Regular expression of `HOST PORT`."""
MEMBER_PATTERN = r"[0-9]{1,9}\.[0-9]{1,9}"
"""Regular expression of `SLOT.INCARNATION`."""


def _check_status(status: MemberStatus) -> MemberStatus:
    bounds = (("note", MAX_NOTE_CHARS), ("layout", MAX_LAYOUT_CHARS), ("batch_shares", MAX_BATCH_SHARES_CHARS))
    for field, max_chars in bounds:
        text = getattr(status, field)
        if len(text) > max_chars:
            raise ValueError(f"a {field} of {len(text)} characters, expected at most {max_chars}")
    if not re.fullmatch(MEMBER_PATTERN, status.member):
        raise ValueError(f"a member {status.member[:80]!r}, expected SLOT.INCARNATION")
    if status.address and not re.fullmatch(ADDRESS_PATTERN, status.address):
        raise ValueError(f"an address {status.address[:80]!r}, expected HOST PORT")
    return status


def _check_heartbeat(heartbeat: Heartbeat) -> Heartbeat:
    for field in ("cpu_s", "no_progress_s", "overdue_s"):
        if not 0 <= getattr(heartbeat, field) < math.inf:
            raise ValueError(f"{field} of {getattr(heartbeat, field)}, expected seconds")
    return heartbeat


def _check_rejoin(rejoin: Rejoin) -> Rejoin:
    _check_heartbeat(rejoin.heartbeat)
    for field in ("lost_s", "patience_s"):
        if not 0 <= getattr(rejoin, field) < math.inf:
            raise ValueError(f"{field} of {getattr(rejoin, field)}, expected seconds")
    if rejoin.membership and not rejoin.membership.statuses:
        raise ValueError("a generation without members, expected at least one")
    known_statuses = (*rejoin.membership.statuses, *rejoin.membership.finished) if rejoin.membership else ()
    for each in (rejoin.status, *known_statuses):
        _check_status(each)
    named = (*rejoin.membership.unconfirmed_predecessors, rejoin.membership.departed) if rejoin.membership else ()
    for member in (each for names in named for each in names):
        if not re.fullmatch(MEMBER_PATTERN, member):
            raise ValueError(f"a member {member[:80]!r}, expected SLOT.INCARNATION")
    return rejoin


ValidMemberStatus = Annotated[MemberStatus, pydantic.AfterValidator(_check_status)]
ValidHeartbeat = Annotated[Heartbeat, pydantic.AfterValidator(_check_heartbeat)]
ValidRejoin = Annotated[Rejoin, pydantic.AfterValidator(_check_rejoin)]


def part_of_ring(ring: int) -> str:
    """Return the name of the part that is this ring."""
    return f"{_RING_PREFIX}{ring}"


def is_ring_part(part: str) -> bool:
    """Return whether that part is a ring, and not the whole job or its startup rendezvous."""
    return part.startswith(_RING_PREFIX)


class Join(RpcMessage):
    """Asks to become a member or, with `rejoining`, asks another coordinator after the loss of one."""

    kind: ClassVar[str] = "membership.join"

    rejoining: ValidRejoin | None = None
    part: str = pydantic.Field(default=WHOLE_JOB, pattern=r"^[a-z0-9 ]{0,40}$")
    """Part of the job that the membership belongs to, where parts have one each; `WHOLE_JOB` means the whole job."""
    expected: int = pydantic.Field(default=1, ge=1, le=MAX_MEMBERS)
    """Number of members that the first generation of the part waits for, and the maximum of the part."""


class WatchUpdate(RpcMessage):
    """Directive that holds now for the member that watches."""

    kind: ClassVar[str] = "membership.watch_update"

    revision: int
    """Grows with every change."""
    is_active: bool
    """True for the active coordinator; a standby's directive means nothing."""
    directive: MemberDirective


class MembershipWatch(RpcMessage):
    """Asks for the directive, as soon as it differs from the one of `revision`, or after a timeout."""

    kind: ClassVar[str] = "membership.watch"
    reply: ClassVar[type[RpcMessage]] = WatchUpdate

    revision: int = pydantic.Field(default=0, ge=0)


class HeartbeatReport(RpcMessage):
    """Reports that the member is alive."""

    kind: ClassVar[str] = "membership.heartbeat"

    heartbeat: ValidHeartbeat


class StatusReport(RpcMessage):
    """Reports the status of a paused member, for a proposal."""

    kind: ClassVar[str] = "membership.report_status"

    generation_id: tuple[int, int]
    status: ValidMemberStatus


class FailureReport(RpcMessage):
    """Reports that the generation with this id is broken."""

    kind: ClassVar[str] = "membership.report_failure"

    generation_id: tuple[int, int]
    suspects: list[str] = pydantic.Field(max_length=4096)


class LeaveMembership(RpcMessage):
    """Announces that the member leaves: at the next step boundary, or at once because it is finished."""

    kind: ClassVar[str] = "membership.leave"

    status: ValidMemberStatus
    is_finished: bool


class CoordinatorStatus(RpcMessage):
    """State of the coordinator, for people and tests."""

    kind: ClassVar[str] = "membership.coordinator_status"

    term: int
    is_active: bool
    generation_id: tuple[int, int]
    members: list[str]
    committed: int
    present: list[str]
    ended: str
    parts: dict[str, int] = pydantic.Field(default_factory=dict)
    """Part of the job -> term in which this coordinator is active for it, where parts have memberships of their own."""
    generations: dict[str, tuple[int, int]] = pydantic.Field(default_factory=dict)
    """Part of the job -> id of its generation."""


class CoordinatorStatusRequest(RpcMessage):
    """Asks for the state of the coordinator."""

    kind: ClassVar[str] = "membership.get_coordinator_status"
    reply: ClassVar[type[RpcMessage]] = CoordinatorStatus
