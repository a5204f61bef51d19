"""Where sessions are opened: what all of them share, and a place for each one's files and port."""

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringweave import topology
from ringweave.benchmarks.places.place import Place
from ringweave.benchmarks.sessions.channels import Listener
from ringweave.benchmarks.sessions.session import Session
from ringweave.benchmarks.systems.system import Knob, Setup, System
from ringweave.errors import LaunchError, explain
from ringweave.launch.local.ports import free_port

_FIRST_PORT = 21_000
"""In a lab every port is free; this is below those that the kernel gives away."""


class Hall:
    """Opens sessions in a place."""

    def __init__(self, place: Place, listener: Listener, folder: Path, schedule: str | None) -> None:
        self.place = place
        self._listener, self._folder, self._schedule = listener, folder, schedule
        self._cluster_path = folder / "cluster.yaml"
        self._cluster_path.write_text(topology.dumps(place.cluster), encoding="utf-8")
        self._networks = {node.name: _network(place, node.name) for node in place.cluster.nodes}
        self._num_opened = 0

    @contextmanager
    def open(self, system: System, knob: Knob, node_of_rank: tuple[str, ...]) -> Iterator[Session]:
        """A session with all its ranks up; when it is left they are gone.

        Raises:
            LaunchError: They did not come up.
        """
        session = self._started(system, knob, node_of_rank)
        try:
            yield session
        finally:
            session.close()

    def _started(self, system: System, knob: Knob, node_of_rank: tuple[str, ...]) -> Session:
        """A second try is allowed: Open MPI's starter crashes now and then where nodes have unlike NICs."""
        for is_last in (False, True):
            session = Session(system, knob, self._setup(system, node_of_rank))
            try:
                session.start(self._listener, self._networks)
            except LaunchError:
                session.close()
                if is_last:
                    raise
            except BaseException:
                session.close()
                raise
            else:
                return session
        raise AssertionError("the last try returns or raises")

    def _setup(self, system: System, node_of_rank: tuple[str, ...]) -> Setup:
        self._num_opened += 1
        name = f"{self._num_opened}-{system.name}"
        return Setup(
            place=self.place,
            node_of_rank=node_of_rank,
            cluster_path=self._cluster_path,
            control_path=self._listener.path,
            session=name,
            folder=self._folder / name,
            port=self._port(),
            schedule=self._schedule,
        )

    def _port(self) -> int:
        if self.place.is_limited:
            return _FIRST_PORT + self._num_opened
        return free_port(random.SystemRandom())


def _network(place: Place, node: str) -> int:
    """Number of the network namespace of a node."""
    command = place.command(node, ["readlink", "/proc/self/ns/net"])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    number = done.stdout.strip().removeprefix("net:[").removesuffix("]")
    if not number.isdigit():
        raise LaunchError(
            explain(
                f"network of node {node}",
                got=(done.stdout + done.stderr).strip(),
                expected="the number of a namespace",
                do="See whether the lab is up: ringweave lab status",
            )
        )
    return int(number)
