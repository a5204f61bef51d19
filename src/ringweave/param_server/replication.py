"""Replication from the leading server to its standby: the interface, the messages and the connections."""

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import pydantic

from ringweave import rpc
from ringweave.errors import RefusedError
from ringweave.param_server.barrier import BarrierResult
from ringweave.param_server.data_shards import DataShard
from ringweave.param_server.messages import BarrierArrival, Count, LeaveRing, PauseRing, Push

ReplicatedFact = DataShard | LeaveRing | PauseRing | BarrierArrival | BarrierResult
"""Recorded event of a ring other than a push or a grant."""


class Replicator(Protocol):
    """Ensures that this server leads, and that the standby has what the server is about to acknowledge.

    Each `replicate_` method returns once the standby has the event, or there is no standby any more. It raises
    LeadershipError if this server does not lead any more: then nothing may be acknowledged.
    """

    @property
    def term(self) -> int:
        """Term of the leading server, as far as this one knows."""
        ...

    @property
    def may_answer(self) -> bool:
        """True if this server leads and may answer."""
        ...

    def check_term(self, term: int) -> None:
        """Refuse a message for a server of another term, or that this one may not answer now."""
        ...

    def replicate_start(self) -> None: ...

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Replicate the push that is applied next."""
        ...

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        """Replicate that the ring gets the parameters of that version, predicted for so many train steps ahead.

        With `is_between_pushes` no push is applied until this returns, so it must not wait for the admission of a
        standby.
        """
        ...

    def replicate_fact(self, fact: ReplicatedFact) -> None: ...


class NoStandby:
    """Replicator of a server without a standby, with one term from start to end."""

    term, may_answer = 0, True

    def check_term(self, term: int) -> None:
        """Check the term.

        Raises:
            RefusedError: Another term is meant.
        """
        if term != self.term:
            raise RefusedError(
                "term of the parameter server",
                got=term,
                expected=f"{self.term}, that of this one",
                do="Ask which server leads now, and join again",
            )

    def replicate_start(self) -> None:
        """Do nothing: there is no standby."""

    def replicate_push(self, push: Push, buffers: Sequence[memoryview]) -> None:
        """Do nothing: there is no standby."""

    def replicate_grant(self, ring: int, version: int, ahead: float, *, is_between_pushes: bool) -> None:
        """Do nothing: there is no standby."""

    def replicate_fact(self, fact: ReplicatedFact) -> None:
        """Do nothing: there is no standby."""


class FollowLeader(rpc.RpcMessage):
    """Asks the leader for all its state, from a server that has none; answered once it is a standby, or refused."""

    kind: ClassVar[str] = "params.follow_leader"


class CopyState(rpc.RpcMessage):
    """Requests a standby to read the whole state, and to stay equal to the leader from then on."""

    kind: ClassVar[str] = "params.copy_state"


class ReplicatePush(rpc.RpcMessage):
    """Carries a push that the leader applies next."""

    kind: ClassVar[str] = "params.replicate_push"

    push: Push


class ReplicateGrant(rpc.RpcMessage):
    """A ring gets the parameters of that version."""

    kind: ClassVar[str] = "params.replicate_grant"

    ring: Count
    version: Count
    ahead: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """Train steps by which they are predicted ahead."""


class ReplicateFact(rpc.RpcMessage):
    """Carries what the leader has recorded of a ring."""

    kind: ClassVar[str] = "params.replicate_fact"

    fact: ReplicatedFact


class RenewLease(rpc.RpcMessage):
    """Asks whether the standby still follows."""

    kind: ClassVar[str] = "params.renew_lease"


_REPLICATE_TIMEOUT_S = 3600.0
"""Time for the standby to read the whole state; heartbeats detect one that stops meanwhile."""


class StandbyLink:
    """Leader's link to its standby: one connection for pushes, one for messages that must not queue behind them."""

    def __init__(self, connect: Callable[[], rpc.RpcClient]) -> None:
        """Connect.

        Raises:
            WireError: The standby cannot be reached.
        """
        self._control_client = connect()
        try:
            self._push_client = connect()
        except BaseException:
            self._control_client.close()
            raise
        self._closed = threading.Event()

    def replicate(self, message: rpc.RpcMessage, buffers: Sequence[memoryview] = ()) -> None:
        """Send a message; return once the standby has it.

        Raises:
            WireError: The standby does not have it, or that is unknown.
        """
        client = self._push_client if isinstance(message, ReplicatePush) else self._control_client
        client.call(message, buffers, timeout_s=_REPLICATE_TIMEOUT_S)

    def renew_lease(self, timeout_s: float) -> None:
        """Renew the lease; return if the standby still follows.

        Raises:
            WireError: It does not, or does not answer.
        """
        self._control_client.call(RenewLease(), timeout_s=timeout_s)

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the link is closed; False if time is up first."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """Close the connections; threads that wait for an answer get an error."""
        self._closed.set()
        for client in (self._push_client, self._control_client):
            client.close()
