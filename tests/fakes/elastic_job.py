"""Elastic job of real processes without a launcher: coordinators in this process, workers that a test can kill."""

import atexit
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ringweave import rpc
from ringweave.membership import service
from ringweave.membership.failure_detector import TimeoutPolicy
from ringweave.membership.membership_records import GenerationId, Membership
from ringweave.membership.messages import WHOLE_JOB
from ringweave.membership.service import CoordinatorListener
from ringweave.membership.settings import MemberBounds, MembershipSettings
from ringweave.testing import ranks
from ringweave.testing.ranks import RankOutcome

if TYPE_CHECKING:
    from tests.fakes.parameter_servers import ReplicatedServers


_TICK_INTERVAL_S = 0.05


def fixed_timeout_policy(silence_s: float) -> TimeoutPolicy:
    """Return a timeout policy that evicts no member before `silence_s`, however busy the machine is."""
    return TimeoutPolicy(factor=3.0, min_s=silence_s, max_s=max(60.0, silence_s))


class InProcessCoordinator(CoordinatorListener):
    """Coordinator in this process, over real connections."""

    def __init__(
        self, authority: rpc.CertificateAuthority, settings: MembershipSettings, *, is_standby: bool = False
    ) -> None:
        self.memberships: list[Membership] = []
        """Memberships of the whole job."""
        self.memberships_by_part: dict[str, list[Membership]] = {WHOLE_JOB: self.memberships}
        self.lost_members: list[tuple[str, str]] = []
        self.returned_members: list[str] = []
        self.restarted_generations: list[GenerationId] = []
        self.service = service.make_coordinator_set(
            settings,
            index=int(is_standby),
            is_standby=is_standby,
            listener=self,
        )
        tls = rpc.TlsAuthentication(authority.issue("coordinator", "1" if is_standby else "0"))
        roles = ("worker", "coordinator")
        self._server = rpc.RpcServer(tls, self.service.handlers(), roles=roles, on_peer_exit=self.service.peer_exited)
        self._server.start("127.0.0.1")
        self.port = self._server.port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="coordinator", daemon=True)
        self._thread.start()

    def generation_begun(self, part: str, membership: Membership, term: int) -> None:
        del term
        self.memberships_by_part.setdefault(part, []).append(membership)

    def member_lost(self, part: str, member: str, reason: str, term: int) -> None:
        del part, term
        self.lost_members.append((member, reason))

    def member_returned(self, part: str, member: str, term: int) -> None:
        del part, term
        self.returned_members.append(member)

    def standstill_restarted(self, part: str, generation_id: GenerationId) -> None:
        del part
        self.restarted_generations.append(generation_id)

    def connected_members(self) -> set[str]:
        """Return the names of the connected members."""
        return self._server.peer_names()

    def num_present(self) -> dict[str, int]:
        """Return the present members of each part that this coordinator decides on."""
        counts = {name: each.num_present for name, each in self.service.services()}
        return {name: count for name, count in counts.items() if count is not None}

    def close(self) -> None:
        """Stop answering, as if killed."""
        self._stop.set()
        self._server.close(timeout_s=0.1)
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_INTERVAL_S):
            self.service.tick(self.connected_members)


class InProcessParameterServer:
    """Parameter server in this process, for the workers of an elastic job."""

    def __init__(self, authority: rpc.CertificateAuthority) -> None:
        from ringweave.param_server.service import ParameterService  # imports torch, which coordinators do not need

        self.service = ParameterService()
        tls = rpc.TlsAuthentication(authority.issue("server", "0"))
        hung_up = self.service.ring_sessions.note_disconnect
        self._server = rpc.RpcServer(tls, self.service.handlers(), roles=("worker",), on_peer_exit=hung_up)
        self._server.start("127.0.0.1")

    @property
    def address(self) -> str:
        """Address as `host:port`."""
        return f"127.0.0.1:{self._server.port}"

    def close(self) -> None:
        """Stop answering, as if killed."""
        self._server.close(timeout_s=0.1)


class ElasticJob:
    """Elastic job of workers 0 .. n-1, each running `function(*args)` as a member."""

    # Longer than a constructor should be: it starts the whole job, in an order that the parts ask for.
    def __init__(
        self,
        function: Callable[..., Any],
        num_workers: int,
        *args: Any,
        min_members: int = 1,
        environ: Mapping[str, str] | None = None,
        services: Collection[str] = (),
        patience_s: float = 600.0,
        silence_s: float = 60.0,
    ) -> None:
        """`environ` goes into the environment of every worker.

        `services` may hold `standby` (of the coordinator), and `server` (a parameter server in this process) or
        `servers` (a primary and its standby, in processes of their own).

        A slow machine evicts no member: only silence for `silence_s` does.
        """
        self._function, self._args = function, args
        self._environ = {**(environ or {}), "WORLD_SIZE": str(num_workers)}
        self._authority = rpc.CertificateAuthority("test")
        bounds, silence = MemberBounds(min_members=min_members, max_members=64), fixed_timeout_policy(silence_s)
        settings = MembershipSettings(
            bounds=bounds,
            expected=num_workers,
            heartbeat_timeout=silence,
            member_wait_s=patience_s,
            takeover_wait_s=60.0,
        )
        self.coordinators = [InProcessCoordinator(self._authority, settings)]
        if "standby" in services:
            self.coordinators.append(InProcessCoordinator(self._authority, settings, is_standby=True))
        self._folder = tempfile.TemporaryDirectory()
        self.server = InProcessParameterServer(self._authority) if "server" in services else None
        self.servers = self._start_servers() if "servers" in services else None
        if attendant := self.server or self.servers:
            self._environ["RINGWEAVE_SERVER"] = attendant.address
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[str, Connection] = {}
        self._unread_messages: dict[str, deque[Any]] = {}
        self._outcomes: dict[str, RankOutcome] = {}
        self._messages: dict[str, list[tuple[Any, float]]] = {}
        self._context = ranks.forkserver_context()
        for slot in range(num_workers):
            self.start_worker(slot, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        for each in (*self.coordinators, *([self.server] if self.server else ())):
            each.close()
        if self.servers is not None:
            self.servers.__exit__()
        self._folder.cleanup()

    def _start_servers(self) -> "ReplicatedServers":
        from tests.fakes.parameter_servers import ReplicatedServers  # brings torch, which coordinators do without

        return ReplicatedServers(Path(self._folder.name), 1, authority=self._authority).__enter__()

    def start_worker(self, slot: int, incarnation: int) -> str:
        """Start one more worker and return its name."""
        member = f"{slot}.{incarnation}"
        path = Path(self._folder.name) / member
        self._authority.issue("worker", member).save(path)
        addresses = ",".join(f"127.0.0.1:{each.port}" for each in self.coordinators)
        variables = {
            "RINGWEAVE_MEMBER": member,
            "RINGWEAVE_COORDINATORS": addresses,
            "RINGWEAVE_CREDENTIALS": str(path),
            "RINGWEAVE_NODE": "a0",
            "MASTER_ADDR": "127.0.0.1",
            **self._environ,
        }
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_elastic_worker_main, args=(theirs, variables, self._function, self._args), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[member], self._connections[member] = process, ours
        self._unread_messages[member] = deque()
        return member

    def send_signal(self, member: str, number: signal.Signals) -> None:
        """Send a real signal to a worker."""
        pid = self._processes[member].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_message(self, member: str, matches: Callable[[Any], bool], timeout_s: float = 250.0) -> float:
        """Wait for a message (`send_message`) that matches; return its time, on the clock that all processes share."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for message, at_s in self._messages.get(member, []):
                if matches(message):
                    return at_s
            outcome = self._receive(member, deadline_s)
            if outcome is not None:
                raise AssertionError(f"{member} ended without saying it: {outcome.exit_code} {outcome.error}")

    def outcome(self, member: str, timeout_s: float = 250.0) -> RankOutcome:
        """Wait for the end of a worker and return its outcome."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self._receive(member, deadline_s)
            if isinstance(found, RankOutcome):
                return found

    def replace_killed(self, victims: Collection[str]) -> None:
        """Start the next incarnation of each of these workers as soon as it has killed itself, in any order."""
        left = set(victims)
        while left:
            for member in sorted(left & self._processes.keys()):
                has_ended = member in self._outcomes or member not in self._connections
                if has_ended and self.outcome(member).exit_code != -signal.SIGKILL:
                    raise AssertionError(f"{member} was not killed: {self.outcome(member)}")
                if has_ended:
                    left.discard(member)
                    slot, _, incarnation = member.partition(".")
                    self.start_worker(int(slot), int(incarnation) + 1)
                    break
            else:
                if not self._receive_messages(250.0):
                    raise TimeoutError(f"none of {sorted(left)} ended in time")

    @property
    def members(self) -> list[str]:
        """Names of all started processes."""
        return list(self._processes)

    def read_messages(self, member: str) -> None:
        """Read the messages that a worker has sent by now."""
        while self._receive_messages(0.0):
            pass
        while self._unread_messages[member] and self._receive(member, time.monotonic()) is None:
            pass

    def messages(self, member: str) -> list[tuple[Any, float]]:
        """Return all messages of a worker that were read, with their times."""
        return list(self._messages.get(member, []))

    def _receive(self, member: str, deadline_s: float) -> RankOutcome | None:
        if member in self._outcomes:
            return self._outcomes[member]
        found = self._next_message(member, deadline_s)
        if isinstance(found, RankOutcome):
            self._outcomes[member] = found
            return found
        self._messages.setdefault(member, []).append(found)
        return None

    def _next_message(self, member: str, deadline_s: float) -> Any:
        while not self._unread_messages[member]:
            if not self._receive_messages(max(0.0, deadline_s - time.monotonic())):
                generations = [[membership.members for membership in each.memberships] for each in self.coordinators]
                unread = {each: messages[-1] for each, messages in self._unread_messages.items() if messages}
                ended = {each: last for each, last in unread.items() if isinstance(last, RankOutcome)}
                raise TimeoutError(f"{member} said nothing in time; epochs {generations}; others ended: {ended}")
        return self._unread_messages[member].popleft()

    def _receive_messages(self, timeout_s: float) -> bool:
        """Read the messages of all workers, so that none blocks in sending. Return False if there are none."""
        readable = connection.wait(list(self._connections.values()), timeout_s)
        for member in [name for name, each in self._connections.items() if each in readable]:
            try:
                message = self._connections[member].recv()
            except (EOFError, ConnectionResetError):
                self._processes[member].join()
                message = RankOutcome(exit_code=self._processes[member].exitcode)
            self._unread_messages[member].append(message)
            if isinstance(message, RankOutcome):
                del self._connections[member]
        return bool(readable)


_own_connection: list[Connection] = []
_send_lock = threading.Lock()


def send_message(message: Any) -> None:
    """Send a message with the time to the test. Called in a worker, in any of its threads."""
    with _send_lock:
        _own_connection[0].send((message, time.monotonic()))


def own_member() -> str:
    """Return the name of this worker. Called in a worker."""
    return os.environ["RINGWEAVE_MEMBER"]


def _elastic_worker_main(
    pipe: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple
) -> None:
    gc.freeze()  # as `ranks` does
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    _own_connection.append(pipe)
    try:
        outcome = RankOutcome(value=function(*args))
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        outcome = RankOutcome(error="" if code in (0, 143) else traceback.format_exc(), exit_code=code)
        if code not in (0, 143):
            sys.last_value = error  # as the interpreter does after a script
    atexit._run_exitfuncs()  # a forked process does not run them by itself
    with _send_lock:
        pipe.send(outcome)
        pipe.close()
