"""Two parameter servers in real processes, primary and standby, that a test can kill and stop."""

import ctypes
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ringweave import rpc, telemetry
from ringweave.errors import RpcError
from ringweave.launcher.node_context import free_port
from ringweave.param_server.client import RingClient
from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipRecord
from ringweave.param_server.messages import LeaderStatus, LeaderStatusRequest
from ringweave.testing import ranks

_NETWORK_NAMESPACE = 0x40000000
_SERVER_POLL_S = 0.02
SERVER_START_TIMEOUT_S = 600.0
"""Time for servers to start: loading torch takes minutes while dozens of other processes load it too."""


class ServerProcess:
    """Process of a server, from the fork server, which has torch loaded; as much of a Popen as is needed here."""

    def __init__(self, argv: list[str], log: Path, network: Path | None = None) -> None:
        """`network` is the namespace that it runs in; None: that of this process."""
        self._process = ranks.forkserver_context().Process(target=_serve, args=(argv, log, network), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self.poll: Callable[[], int | None] = lambda: self._process.exitcode
        self.kill, self.wait = self._process.kill, self._process.join


def enter_network(namespace: Path) -> None:
    """Let this thread be in a network namespace, and what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open() as file:
        if libc.setns(file.fileno(), _NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _serve(argv: list[str], log: Path, network: Path | None) -> None:
    gc.freeze()  # as `ranks` does
    if network is not None:
        enter_network(network)
    from ringweave.param_server import main

    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    sys.exit(main.main(argv))


class ServerNetwork:
    """Network of servers and rings: all on this machine."""

    def address_of(self, index: int) -> str:
        """Return the address of a server."""
        del index
        return "127.0.0.1"

    def start(self, index: int, argv: list[str], log: Path) -> ServerProcess:
        """Start the process of a server, which writes to `log`."""
        del index
        return ServerProcess(argv, log)

    def connect(self, ring: int, connect: Callable[[], rpc.RpcClient]) -> rpc.RpcClient:
        """Connect from the location of a ring."""
        del ring
        return connect()


class ReplicatedServers:
    """Primary and standby parameter server; `restart_ended` restarts them as `ringweave run` does."""

    def __init__(
        self,
        folder: Path,
        num_rings: int,
        *,
        lease_s: float = 60.0,
        authority: rpc.CertificateAuthority | None = None,
        network: ServerNetwork | None = None,
    ) -> None:
        """`lease_s` is long unless a test is about silence: a busy machine is silent for seconds.

        `authority` is that of the job, if it exists already. `network` locates all processes; None: on this machine.
        """
        self._folder, self._lease_s, self._network = folder, lease_s, network or ServerNetwork()
        self._authority = authority or rpc.CertificateAuthority("test")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._ports = _two_free_ports()
        self._credential_paths = {
            (role, name): self._save_credentials(role, name)
            for role, name in [("server", "0"), ("server", "1"), *(("worker", str(each)) for each in range(num_rings))]
        }
        self.processes: list[ServerProcess] = []

    def __enter__(self) -> Self:
        self.processes = [self._start_server(index) for index in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def address(self) -> str:
        """Addresses for workers: `host:port` of both, separated by a comma."""
        return ",".join(self._address(index) for index in range(2))

    def restart_ended(self) -> None:
        """Restart the servers that have ended."""
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[index] = self._start_server(index)

    def send_signal(self, index: int, signum: signal.Signals) -> None:
        """Send a real signal to a server."""
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, signum)

    def ring_client(self, ring: int) -> RingClient:
        """Return the client of a ring's representative, which waits for servers as long as they may take to start."""
        connects = [lambda at=at: self.connect(at, ring) for at in range(2)]
        return RingClient(connects, ring, reconnect_timeout_s=SERVER_START_TIMEOUT_S)

    def connect(self, index: int, ring: int) -> rpc.RpcClient:
        """Connect to a server as a ring."""
        tls = rpc.TlsAuthentication(rpc.Credentials.load(self._credential_paths["worker", str(ring)]))
        host, port = self._network.address_of(index), self._ports[index]
        return self._network.connect(ring, lambda: rpc.RpcClient.connect(host, port, tls, role="server"))

    def query_server(self, index: int) -> LeaderStatus | None:
        """Return a server's answer to a ring; None if it does not answer."""
        try:
            with self.connect(index, 0) as client:
                found = client.call(LeaderStatusRequest(), timeout_s=2.0).message
        except RpcError:
            return None
        assert isinstance(found, LeaderStatus), "the class of the reply"
        return found

    def wait_leader(self, *, besides: int | None = None) -> int:
        """Wait for a leading server other than `besides`, and return its index."""
        deadline_s = time.monotonic() + SERVER_START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            for index in {0, 1} - {besides}:
                found = self.query_server(index)
                if found is not None and found.leads:
                    return index
            time.sleep(_SERVER_POLL_S)
        raise TimeoutError(f"no server leads. {self.output()}")

    def newest_leadership(self) -> LeadershipRecord | None:
        """Return the newest leadership record."""
        return FolderLeadershipLog(self._folder / "claims").latest()

    def wait_leadership(self, num_members: int | None = None, *, after: int = -1) -> LeadershipRecord:
        """Wait for a record after number `after` with this number of members, restarting servers meanwhile."""
        deadline_s = time.monotonic() + SERVER_START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.restart_ended()
            newest = self.newest_leadership()
            if newest is not None and newest.number > after and num_members in (None, len(newest.members)):
                return newest
            time.sleep(_SERVER_POLL_S)
        raise TimeoutError(f"no claim of {num_members} servers. {self.output()}")

    def wait_counters(self) -> dict[str, Any]:
        """Return the leader's counters, once all rings have left it for good and it has ended."""
        deadline_s = time.monotonic() + SERVER_START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            events = telemetry.read_events(self._folder / "events.jsonl")
            last = [each for each in events if each["kind"] == "params_counted" and each["last"]]
            if last:
                return last[-1]
            time.sleep(_SERVER_POLL_S)
        raise TimeoutError(f"no server has ended. {self.output()}")

    def output(self) -> str:
        """Return the output of both servers."""
        return "\n".join(path.read_text(errors="replace") for path in sorted((self._folder / "logs").iterdir()))

    def _save_credentials(self, role: str, name: str) -> Path:
        path = self._folder / f"{role}-{name}"
        self._authority.issue(role, name).save(path)
        return path

    def _start_server(self, index: int) -> ServerProcess:
        argv = ["--host", self._network.address_of(index)]
        argv += ["--port", str(self._ports[index]), "--credentials", str(self._credential_paths["server", str(index)])]
        argv += ["--other", self._address(1 - index), "--index", str(index)]
        argv += ["--claims", str(self._folder / "claims"), "--lease-s", str(self._lease_s)]
        argv += ["--run-dir", str(self._folder), "--node", "here"]
        return self._network.start(index, argv, self._folder / "logs" / f"server-{index}.log")

    def _address(self, index: int) -> str:
        return f"{self._network.address_of(index)}:{self._ports[index]}"


def _two_free_ports() -> list[int]:
    """Return two free ports outside of the kernel's ephemeral range."""
    chance, found = random.SystemRandom(), set()
    while len(found) < 2:
        found.add(free_port(chance))
    return list(found)
