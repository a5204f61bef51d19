"""Two parameter servers in real processes, one of them the standby of the other, that can be killed and stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ringweave import telemetry, wire
from ringweave.errors import WireError
from ringweave.launch.local.ports import free_port
from ringweave.params.messages import Enter, Entered
from ringweave.params.ring.client import RingClient
from ringweave.params.rules.succession import Claim
from ringweave.params.standby.claims import Claims

_LOOK_S = 0.02
LIMIT_S = 600.0
"""For servers to start: a process that loads torch takes minutes where dozens of others do so, too."""


class Network:
    """Where servers and rings are: on this machine, all of them."""

    def host(self, index: int) -> str:
        """Address of a server."""
        del index
        return "127.0.0.1"

    def command(self, index: int, argv: list[str]) -> list[str]:
        """The command line that starts a server."""
        del index
        return argv

    def connect(self, ring: int, connect: Callable[[], wire.Client]) -> wire.Client:
        """Connect from where that ring is."""
        del ring
        return connect()


class PairOfServers:
    """What `ringweave run` does with servers: starts two, and starts again, by `look`, those that have ended."""

    def __init__(
        self,
        folder: Path,
        num_rings: int,
        *,
        lease_s: float = 60.0,
        authority: wire.Authority | None = None,
        network: Network | None = None,
    ) -> None:
        """`lease_s` is long unless silence is what is tried: a busy machine is silent for seconds.

        `authority` is the job's, if it has one already. `network` is where all of them are; None: on this machine.
        """
        self._folder, self._lease_s, self._network = folder, lease_s, network or Network()
        self._authority = authority or wire.Authority("test")
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self._ports = _two_free_ports()
        self._trust = {
            (role, name): self._keep(role, name)
            for role, name in [("server", "0"), ("server", "1"), *(("worker", str(each)) for each in range(num_rings))]
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.processes = [self._start(index) for index in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def address(self) -> str:
        """For workers: `host:port` of both, with a comma between."""
        return ",".join(self._address(index) for index in range(2))

    def look(self) -> None:
        """Start again what has ended."""
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                self.processes[index] = self._start(index)

    def signal(self, index: int, how: signal.Signals) -> None:
        """Send a real signal to a server."""
        os.kill(self.processes[index].pid, how)

    def client(self, ring: int) -> RingClient:
        """The representative of a ring, which looks for servers as long as these may take to start."""
        connects = [lambda at=at: self.connect(at, ring) for at in range(2)]
        return RingClient(connects, ring, reconnect_s=LIMIT_S)

    def connect(self, index: int, ring: int) -> wire.Client:
        """A connection of that ring to that server."""
        trust = wire.Tls(wire.Credentials.load(self._trust["worker", str(ring)]))
        host, port = self._network.host(index), self._ports[index]
        return self._network.connect(ring, lambda: wire.Client.connect(host, port, trust, role="server"))

    def entered(self, index: int) -> Entered | None:
        """What that server says of itself; None if it does not answer."""
        try:
            with self.connect(index, 0) as client:
                found = client.call(Enter(), timeout_s=2.0).message
        except WireError:
            return None
        assert isinstance(found, Entered), "the class of the reply"
        return found

    def wait_leader(self, *, besides: int | None = None) -> int:
        """Index of the server that leads, other than `besides`."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            for index in {0, 1} - {besides}:
                found = self.entered(index)
                if found is not None and found.leads:
                    return index
            time.sleep(_LOOK_S)
        raise TimeoutError(f"no server leads. {self.said()}")

    def newest(self) -> Claim | None:
        """The newest claim."""
        return Claims(self._folder / "claims").newest()

    def wait_claim(self, num_members: int | None = None, *, after: int = -1) -> Claim:
        """The newest claim, once that comes after another one and names so many members; meanwhile `look`."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            self.look()
            newest = self.newest()
            if newest is not None and newest.number > after and num_members in (None, len(newest.members)):
                return newest
            time.sleep(_LOOK_S)
        raise TimeoutError(f"no claim of {num_members} servers. {self.said()}")

    def wait_counted(self) -> dict[str, Any]:
        """What the server that leads has counted, once all rings have left it for good and it has ended."""
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            events = telemetry.read(self._folder / "events.jsonl")
            last = [each for each in events if each["kind"] == "params_counted" and each["last"]]
            if last:
                return last[-1]
            time.sleep(_LOOK_S)
        raise TimeoutError(f"no server has ended. {self.said()}")

    def said(self) -> str:
        """What both have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted((self._folder / "logs").iterdir()))

    def _keep(self, role: str, name: str) -> Path:
        path = self._folder / f"{role}-{name}"
        self._authority.issue(role, name).save(path)
        return path

    def _start(self, index: int) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", "ringweave.params.serving.main", "--host", self._network.host(index)]
        argv += ["--port", str(self._ports[index]), "--credentials", str(self._trust["server", str(index)])]
        argv += ["--other", self._address(1 - index), "--index", str(index)]
        argv += ["--claims", str(self._folder / "claims"), "--lease-s", str(self._lease_s)]
        argv += ["--run-dir", str(self._folder), "--node", "here"]
        with (self._folder / "logs" / f"server-{index}.log").open("ab") as output:
            command = self._network.command(index, argv)
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def _address(self, index: int) -> str:
        return f"{self._network.host(index)}:{self._ports[index]}"


def _two_free_ports() -> list[int]:
    """None of those that the kernel gives to others meanwhile."""
    chance, found = random.SystemRandom(), set()
    while len(found) < 2:
        found.add(free_port(chance))
    return list(found)
