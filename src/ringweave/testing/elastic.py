"""An elastic job of real processes without a launcher: a coordinator in this process, workers to be killed."""

import atexit
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

from ringweave import wire
from ringweave.membership.messages import JOB
from ringweave.membership.rules.records import Ballot, Decree
from ringweave.membership.rules.rhythm import Tolerance
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.serving import parts
from ringweave.membership.serving.notes import Notes
from ringweave.testing import forking
from ringweave.testing.ranks import Outcome

if TYPE_CHECKING:
    from ringweave.testing.servers import PairOfServers

_TICK_S = 0.05


def patient(silence_s: float) -> Tolerance:
    """Nobody is given up before, however busy the machine is."""
    return Tolerance(factor=3.0, least_s=silence_s, most_s=max(60.0, silence_s))


class Headquarters(Notes):
    """One coordinator, in this process, over real connections."""

    def __init__(self, authority: wire.Authority, settings: Settings, *, is_standby: bool = False) -> None:
        self.decrees: list[Decree] = []
        """Of the job."""
        self.by_part: dict[str, list[Decree]] = {JOB: self.decrees}
        self.those_lost: list[tuple[str, str]] = []
        self.those_back: list[str] = []
        self.all_woken: list[Ballot] = []
        self.service = parts.coordinators(
            settings,
            index=int(is_standby),
            is_standby=is_standby,
            notes=self,
        )
        trust = wire.Tls(authority.issue("coordinator", "1" if is_standby else "0"))
        roles = ("worker", "coordinator")
        self._server = wire.Server(trust, self.service.handlers(), roles=roles, hung_up=self.service.hung_up)
        self._server.start("127.0.0.1")
        self.port = self._server.port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="coordinator", daemon=True)
        self._thread.start()

    def begun(self, part: str, decree: Decree, term: int) -> None:
        """Keep it."""
        del term
        self.by_part.setdefault(part, []).append(decree)

    def lost(self, part: str, member: str, reason: str, term: int) -> None:
        """Keep it."""
        del part, term
        self.those_lost.append((member, reason))

    def back(self, part: str, member: str, term: int) -> None:
        """Keep it."""
        del part, term
        self.those_back.append(member)

    def woken(self, part: str, ballot: Ballot) -> None:
        """Keep it."""
        del part
        self.all_woken.append(ballot)

    def connected(self) -> set[str]:
        """Names of those that hold a connection."""
        return self._server.names()

    def close(self) -> None:
        """As if it was killed: it answers nobody any more."""
        self._stop.set()
        self._server.close(timeout_s=0.1)
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(_TICK_S):
            self.service.tick(self.connected)


class ParameterDesk:
    """A parameter server in this process, for the workers of an elastic job."""

    def __init__(self, authority: wire.Authority) -> None:
        from ringweave.params.serving.service import ParameterService  # brings torch, which coordinators do without

        self.service = ParameterService()
        trust = wire.Tls(authority.issue("server", "0"))
        hung_up = self.service.attendance.missed
        self._server = wire.Server(trust, self.service.handlers(), roles=("worker",), hung_up=hung_up)
        self._server.start("127.0.0.1")

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"127.0.0.1:{self._server.port}"

    def close(self) -> None:
        """As if it was killed."""
        self._server.close(timeout_s=0.1)


class ElasticJob:
    """Workers 0 .. n-1, each running `function(*args)` as a member of one job."""

    def __init__(
        self,
        function: Callable[..., Any],
        num_workers: int,
        *args: Any,
        least: int = 1,
        environ: Mapping[str, str] | None = None,
        attended_by: Collection[str] = (),
        patience_s: float = 600.0,
        silence_s: float = 60.0,
    ) -> None:
        """`environ` goes into the environment of every worker.

        `attended_by` may name `standby` (of the coordinator), and `server` (of parameters, in this process) or
        `servers` (that and its standby, in processes of their own).

        On a machine where everything takes long nobody is given up for it: only who is silent for `silence_s`.
        """
        self._function, self._args = function, args
        self._environ = {**(environ or {}), "WORLD_SIZE": str(num_workers)}
        self._authority = wire.Authority("test")
        bounds, silence = Bounds(least=least, most=64), patient(silence_s)
        wanted = Settings(bounds=bounds, expected=num_workers, silence=silence, patience_s=patience_s, recovery_s=60.0)
        self.headquarters = [Headquarters(self._authority, wanted)]
        if "standby" in attended_by:
            self.headquarters.append(Headquarters(self._authority, wanted, is_standby=True))
        self._folder = tempfile.TemporaryDirectory()
        self.desk = ParameterDesk(self._authority) if "server" in attended_by else None
        self.servers = self._pair() if "servers" in attended_by else None
        if attendant := self.desk or self.servers:
            self._environ["RINGWEAVE_SERVER"] = attendant.address
        self._processes: dict[str, BaseProcess] = {}
        self._connections: dict[str, Connection] = {}
        self._unread: dict[str, deque[Any]] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._said: dict[str, list[tuple[Any, float]]] = {}
        self._context = forking.context()
        for slot in range(num_workers):
            self.start(slot, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        for each in (*self.headquarters, *([self.desk] if self.desk else ())):
            each.close()
        if self.servers is not None:
            self.servers.__exit__()
        self._folder.cleanup()

    def _pair(self) -> "PairOfServers":
        from ringweave.testing.servers import PairOfServers  # brings torch, which coordinators do without

        return PairOfServers(Path(self._folder.name), 1, authority=self._authority).__enter__()

    def start(self, slot: int, incarnation: int) -> str:
        """One more worker; its name."""
        member = f"{slot}.{incarnation}"
        path = Path(self._folder.name) / member
        self._authority.issue("worker", member).save(path)
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.headquarters)
        variables = {
            "RINGWEAVE_MEMBER": member,
            "RINGWEAVE_COORDINATORS": places,
            "RINGWEAVE_CREDENTIALS": str(path),
            "RINGWEAVE_NODE": "a0",
            "MASTER_ADDR": "127.0.0.1",
            **self._environ,
        }
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_main, args=(theirs, variables, self._function, self._args), daemon=True)
        process.start()
        theirs.close()
        self._processes[member], self._connections[member] = process, ours
        self._unread[member] = deque()
        return member

    def signal(self, member: str, number: signal.Signals) -> None:
        """Send a real signal."""
        pid = self._processes[member].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_said(self, member: str, is_it: Callable[[Any], bool], timeout_s: float = 250.0) -> float:
        """When the worker said (`say`) what `is_it` is true of, on the clock that all processes share."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for said, at_s in self._said.get(member, []):
                if is_it(said):
                    return at_s
            outcome = self._receive(member, deadline_s)
            if outcome is not None:
                raise AssertionError(f"{member} ended without saying it: {outcome.exit_code} {outcome.error}")

    def outcome(self, member: str, timeout_s: float = 250.0) -> Outcome:
        """How a worker ended."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self._receive(member, deadline_s)
            if isinstance(found, Outcome):
                return found

    @property
    def members(self) -> list[str]:
        """Every process that was started."""
        return list(self._processes)

    def read(self, member: str) -> None:
        """Read what a worker has said that has ended."""
        while self._take_words(0.0):
            pass
        while self._unread[member] and self._receive(member, time.monotonic()) is None:
            pass

    def said(self, member: str) -> list[tuple[Any, float]]:
        """All that it has said and that was read, with the times."""
        return list(self._said.get(member, []))

    def _receive(self, member: str, deadline_s: float) -> Outcome | None:
        if member in self._outcomes:
            return self._outcomes[member]
        found = self._next_word(member, deadline_s)
        if isinstance(found, Outcome):
            self._outcomes[member] = found
            return found
        self._said.setdefault(member, []).append(found)
        return None

    def _next_word(self, member: str, deadline_s: float) -> Any:
        while not self._unread[member]:
            if not self._take_words(max(0.0, deadline_s - time.monotonic())):
                epochs = [[decree.members for decree in each.decrees] for each in self.headquarters]
                raise TimeoutError(f"{member} said nothing in time; epochs {epochs}")
        return self._unread[member].popleft()

    def _take_words(self, timeout_s: float) -> bool:
        """Read what any worker has said, so that none has to wait until it is heard; False if none says anything."""
        said = connection.wait(list(self._connections.values()), timeout_s)
        for member in [name for name, each in self._connections.items() if each in said]:
            try:
                word = self._connections[member].recv()
            except (EOFError, ConnectionResetError):
                self._processes[member].join()
                word = Outcome(exit_code=self._processes[member].exitcode)
            self._unread[member].append(word)
            if isinstance(word, Outcome):
                del self._connections[member]
        return bool(said)


_own: list[Connection] = []
_saying = threading.Lock()


def say(word: Any) -> None:
    """Called in a worker, in any of its threads: tell the test, with the time."""
    with _saying:
        _own[0].send((word, time.monotonic()))


def own_member() -> str:
    """Called in a worker: its name."""
    return os.environ["RINGWEAVE_MEMBER"]


def _main(teller: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    _own.append(teller)
    try:
        outcome = Outcome(value=function(*args))
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
        outcome = Outcome(error="" if code in (0, 143) else traceback.format_exc(), exit_code=code)
        if code not in (0, 143):
            sys.last_value = error  # as the interpreter does at the end of a script
    atexit._run_exitfuncs()  # which a process of this kind does not do by itself
    with _saying:
        teller.send(outcome)
        teller.close()
