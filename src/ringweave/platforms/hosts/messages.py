"""RPC messages between the host services of a run, and from commands to them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

import pydantic
from typing_extensions import Buffer

from ringweave.errors import MessageError
from ringweave.files import file_io
from ringweave.files.rotation import CURSOR_PATTERN
from ringweave.jobs.records import ObservedGroup
from ringweave.platforms.agent.agent_channel import AgentStatus
from ringweave.platforms.api import EventLines
from ringweave.rpc import RpcMessage

HOST_ROLE = "host"
"""Role of a host service in its certificate."""
COMMAND_ROLE = "command"
"""Role of a command."""
SCALE = "scale"
"""Verb that changes the number of workers of an elastic run."""
JOINER_ROLE = "joiner"
"""Role that a joining host claims before it has a certificate."""


class HostReport(RpcMessage):
    """State of the job on one host."""

    kind: ClassVar[str] = "hosts.report"

    has_config: bool = False
    released_round: int = 0
    groups: tuple[ObservedGroup, ...] = ()
    statuses: tuple[tuple[int, int, AgentStatus], ...] = ()
    """Node, attempt and last status of each agent of this host."""


class HostAnswer(RpcMessage):
    """Answer of a host to its leader."""

    kind: ClassVar[str] = "hosts.answer"

    term: int
    is_accepted: bool
    """False if this host knows a newer term."""
    entry_version: tuple[int, int]
    report_version: int = 0
    report: HostReport | None = None
    """None if it has not changed."""


class LeaderContact(RpcMessage):
    """Contact of the leader: hands over a newer entry, and asks for the host's report once it changes."""

    kind: ClassVar[str] = "hosts.contact"
    reply: ClassVar[type[RpcMessage]] = HostAnswer

    term: int = pydantic.Field(ge=0)
    leader: int = pydantic.Field(ge=0)
    entry: str | None = None
    """JSON of the entry, if the host's is older."""
    known_report: int = -1
    """Version of the last report; the host answers at once if its own is another one."""
    wait_s: float = pydantic.Field(default=0.0, ge=0.0, le=10.0)
    """Time for which the host may wait for a change."""


class VoteAnswer(RpcMessage):
    """Answer of a voter."""

    kind: ClassVar[str] = "hosts.vote"

    term: int
    is_granted: bool


class VoteRequest(RpcMessage):
    """Asks for the vote of a host."""

    kind: ClassVar[str] = "hosts.request_vote"
    reply: ClassVar[type[RpcMessage]] = VoteAnswer

    term: int = pydantic.Field(ge=1)
    candidate: int = pydantic.Field(ge=0)
    version: tuple[int, int]
    is_trial: bool = False
    """Ask only whether the host would vote so."""


class HostAction(RpcMessage):
    """Asks a host to apply an action of `reconcile` to its worker groups.

    A released barrier brings the credentials of this host's processes in one buffer, see `pack_secrets`.
    """

    kind: ClassVar[str] = "hosts.action"
    reply: ClassVar[type[RpcMessage]] = HostAnswer

    term: int = pydantic.Field(ge=0)
    leader: int = pydantic.Field(ge=0)
    name: str
    """Name of the action's class."""
    fields: dict[str, int] = pydantic.Field(default_factory=dict)
    rendezvous: str = ""
    """JSON of the rendezvous result, for a released barrier."""


class RoundSecrets(RpcMessage):
    """Credentials of a round; they follow in one buffer, see `pack_secrets`."""

    kind: ClassVar[str] = "hosts.secrets"


_MAX_SECRETS_BYTES = 32 * 2**20
"""Of the credentials of a round: those of a thousand workers, eight for each, have 15 MB."""
_SECRETS = pydantic.TypeAdapter(dict[str, str], config=pydantic.ConfigDict(hide_input_in_errors=True))


def pack_secrets(files: Mapping[str, str]) -> list[bytes]:
    """Return the buffers for credentials; none without any.

    A buffer has room for those of a thousand workers, which a message itself has not.

    `files`: name of a file in the round's folder of secrets -> its content.
    """
    return [_SECRETS.dump_json(dict(files))] if files else []


def unpack_secrets(buffers: Sequence[Buffer]) -> dict[str, str]:
    """Return the credentials of such buffers.

    Raises:
        MessageError: They are something else.
    """
    if not buffers:
        return {}
    try:
        return _SECRETS.validate_json(file_io.bounded(bytes(memoryview(buffers[0])), _MAX_SECRETS_BYTES))
    except ValueError:
        expected, do = "a JSON object of texts", "Look at the host that sent it: it runs another program"
        raise MessageError("credentials of a round", got="something else", expected=expected, do=do) from None


class TakeSecrets(RpcMessage):
    """Takes the credentials that an agent of this host has issued for the processes of all hosts."""

    kind: ClassVar[str] = "hosts.take_secrets"
    reply: ClassVar[type[RpcMessage]] = RoundSecrets

    term: int = pydantic.Field(ge=0)
    leader: int = pydantic.Field(ge=0)
    round: int


class RunStatus(RpcMessage):
    """State of a run as one host knows it."""

    kind: ClassVar[str] = "hosts.status"

    entry: str
    """JSON of the entry."""
    before: int | None = None
    """Number of workers that the run was to have before this request; only in the answer to SCALE."""


class RunStatusRequest(RpcMessage):
    """Asks for the state of the run."""

    kind: ClassVar[str] = "hosts.get_status"
    reply: ClassVar[type[RpcMessage]] = RunStatus


class RunVerb(RpcMessage):
    """Applies a verb (`stop`, `delete`, ...) to the run; a host that does not lead passes it on."""

    kind: ClassVar[str] = "hosts.verb"
    reply: ClassVar[type[RpcMessage]] = RunStatus

    verb: str
    """A verb of jobs, or SCALE."""
    workers: int | None = None
    """Number of workers, for SCALE."""
    request_id: str = pydantic.Field(default="", max_length=64)
    """Id of a request for SCALE, which counts once however often it is sent."""


class LeadershipAnswer(RpcMessage):
    """Latest leadership record of a round."""

    kind: ClassVar[str] = "hosts.leadership"

    record: str | None
    """JSON of the record; None before the first."""
    is_appended: bool
    """The requested record is the latest."""


class LeadershipRequest(RpcMessage):
    """Asks for the latest record of which parameter server leads in a round; a host that does not lead passes it on."""

    kind: ClassVar[str] = "hosts.get_leadership"
    reply: ClassVar[type[RpcMessage]] = LeadershipAnswer

    round: int = pydantic.Field(ge=0)
    record: str | None = pydantic.Field(default=None, max_length=4096)
    """JSON of a record to append, if it is the next one."""


class LogPieces(RpcMessage):
    """New text of the logs of one host; its bytes follow in one buffer."""

    kind: ClassVar[str] = "hosts.log_pieces"

    pieces: tuple[tuple[str, str, int], ...] = ()
    """Log (`NODE/ATTEMPT/ROUND/RANK`, or `.../events`), cursor after this text, and number of bytes of each piece."""
    is_at_rest: bool = True
    """No worker group of this host runs any more."""


class ReadLogs(RpcMessage):
    """Asks for what the logs of this host have got since these places."""

    kind: ClassVar[str] = "hosts.read_logs"
    reply: ClassVar[type[RpcMessage]] = LogPieces

    positions: dict[str, Annotated[str, pydantic.Field(pattern=CURSOR_PATTERN)]] = pydantic.Field(default_factory=dict)
    """`NODE/ATTEMPT/ROUND/RANK`, or `.../events` -> cursor, `rotation.LogCursor`."""
    events: EventLines = "none"
    """Whether to return also event logs, or these only."""


class JoinAnswer(RpcMessage):
    """Seat of a joined host."""

    kind: ClassVar[str] = "hosts.join_answer"

    entry: str
    """JSON of the entry, in which the seat is taken."""
    host: int
    sealed: str
    """Its credentials, encrypted for its token."""
    term: int
    leader: int
    environ: dict[str, str] = pydantic.Field(default_factory=dict)
    """Variables that the command hands on to the workers."""
    unreachable: str = ""
    """Reason why the run cannot connect to the joiner, which has no seat then: it may ask for a relayed address."""


class JoinRequest(RpcMessage):
    """Asks for a seat in the run; a host that does not lead passes it on."""

    kind: ClassVar[str] = "hosts.join"
    reply: ClassVar[type[RpcMessage]] = JoinAnswer

    proof: str = pydantic.Field(repr=False, pattern="^[0-9a-f]{64}$")
    """Proof that the sender has a token."""
    joiner: str = pydantic.Field(repr=False, pattern="^[0-9a-f]{32}$")
    """Number that the joiner has drawn; it repeats a request under the same."""
    address: str = pydantic.Field(max_length=64)
    """Address at which other hosts reach the joiner: its own, or a relayed one (`ringweave.relayed_address`)."""
    port: int = pydantic.Field(ge=1, le=65535)
    """Port of its host service."""
    relay_port: int = pydantic.Field(default=0, ge=0, le=65535)
    """Port at which its relay takes connections of hosts that cannot be called."""
    hostname: str = pydantic.Field(pattern="^[A-Za-z0-9._-]{1,64}$")
    ringweave: str = pydantic.Field(max_length=64)
    torch: str = pydantic.Field(max_length=64)
    """Version of torch."""
    time_s: float
    """Its clock, seconds since 1970."""
    gpus: int = pydantic.Field(ge=0)


class FileBytes(RpcMessage):
    """Bytes of a file, or of the list of files; they follow in one buffer."""

    kind: ClassVar[str] = "hosts.file_bytes"

    size: int
    """Bytes of the whole."""


class FetchFiles(RpcMessage):
    """Asks a host for its events, run.json and logs, as a tar archive."""

    kind: ClassVar[str] = "hosts.fetch_files"
    reply: ClassVar[type[RpcMessage]] = FileBytes


class ReadFile(RpcMessage):
    """Asks for a piece of a file of the script's directory, for a host that has joined."""

    kind: ClassVar[str] = "hosts.read_file"
    reply: ClassVar[type[RpcMessage]] = FileBytes

    digest: str = ""
    """SHA-256 of the file; empty for the list of all files, as JSON: path, digest and mode of each."""
    start: int = pydantic.Field(default=0, ge=0)
