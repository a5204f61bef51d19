"""A Slurm cluster brought up in a lab, broken on purpose, and taken down."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ringweave import lab, topology
from ringweave.errors import LabError, explain
from ringweave.lab import Lab
from ringweave.testing.slurm import configuration
from ringweave.testing.slurm.configuration import CONTROLLER, Paths

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
"""Program -> Debian package that has it."""
READY_S = 250.0
POLL_S = 0.1


def problems() -> list[str]:
    """Why this machine cannot have a Slurm cluster, each with what mends it; empty if it can."""
    absent = [program for program in PROGRAMS if _find(program) is None]
    if absent:
        do = f"apt install --no-install-recommends {' '.join(sorted(set(PROGRAMS.values())))}"
        return [explain("Slurm", got=f"{', '.join(absent)} not found", expected="its programs", do=do)]
    return lab.problems()


class SlurmCluster:
    """Nodes with pretended GPUs, which are counted and given out and compute nothing. A context manager.

    Every node is a node of a lab: host name, address, /dev/shm and /sys of its own; the file system is shared, as it is
    on a real cluster. Nothing of it is left when it is closed, whatever still runs in it.
    """

    def __init__(self, gpus: Mapping[str, int], *, name: str, timeout_s: int = 10) -> None:
        """`gpus` says how many each node has, 0 for none; `timeout_s` after how long a silent node is down."""
        self.gpus, self._name, self._timeout_s = dict(gpus), name, timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._lab: Lab | None = None
        self.paths = Paths(root=Path(os.devnull))

    @property
    def lab(self) -> Lab:
        """The lab that it runs in."""
        assert self._lab is not None, "it is not up"
        return self._lab

    @property
    def environ(self) -> dict[str, str]:
        """What clients need on top of their environment."""
        return {"SLURM_CONF": str(self.paths.conf)}

    def __enter__(self) -> Self:
        # Short, for the socket; not a folder of one user, for munge and for jobs of others.
        self.paths = Paths(root=Path(tempfile.mkdtemp(prefix="rw-slurm-")))
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, argv: Sequence[str], node: str = CONTROLLER) -> list[str]:
        """The command line that runs another one where people log in, or on a node."""
        return self.lab.command(node, ["env", *(f"{key}={value}" for key, value in self.environ.items()), *argv])

    def call(self, *argv: str, node: str = CONTROLLER) -> str:
        """What a command prints there.

        Raises:
            LabError: It failed.
        """
        done = subprocess.run(self.command(argv, node), capture_output=True, text=True, check=False, timeout=READY_S)
        if done.returncode:
            raise LabError(f"{' '.join(argv)}: exit code {done.returncode}, expected 0. {done.stderr.strip()}")
        return done.stdout

    def kill_daemon(self, node: str) -> None:
        """Kill slurmd of a node; what it started goes on."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def cut_power(self, node: str) -> None:
        """Kill everything on a node."""
        for pid in self.lab.processes()[node]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].wait()

    def revive(self, node: str) -> None:
        """Start slurmd of a node again, and wait until the node takes work."""
        self._start(node, ["slurmd", "-D", "-f", str(self.paths.conf)], node)
        self.wait_ready([node])

    def wait_ready(self, nodes: Sequence[str]) -> None:
        """Wait until Slurm gives work to these nodes.

        Raises:
            LabError: It does not.
        """
        deadline = time.monotonic() + READY_S
        while not set(nodes) <= self._ready():
            if time.monotonic() > deadline:
                raise LabError(f"nodes of Slurm: {self._say()}, expected all of {', '.join(nodes)} to be ready.")
            time.sleep(POLL_S)

    def _make(self) -> None:
        root = self.paths.root
        root.chmod(0o755)
        for folder in ("etc", "state", "spool", "run", "log", "munge", "dev"):
            (root / folder).mkdir()
        (root / "munge").chmod(0o700)
        nodes = "".join(f"  - {{name: {node}, nic: 10Gbit/s, devices: 1}}\n" for node in (CONTROLLER, *self.gpus))
        self._lab = lab.up(topology.loads(f"name: {self._name}\nnodes:\n{nodes}"), self._name)
        self._write()
        munged = ["munged", "-F", f"--key-file={self.paths.key}", f"--socket={self.paths.socket}"]
        files = [f"--{kind}-file={root}/munge/{kind}" for kind in ("seed", "pid", "log")]
        self._start("munged", [*munged, *files], CONTROLLER)
        self._wait_socket()
        self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.paths.conf)], CONTROLLER)
        for node in self.gpus:
            (root / "spool" / node).mkdir()
            self._start(node, ["slurmd", "-D", "-f", str(self.paths.conf)], node)
        self.wait_ready(list(self.gpus))

    def _write(self) -> None:
        paths, cluster = self.paths, self.lab.cluster
        paths.key.touch(mode=0o600)
        paths.key.write_bytes(secrets.token_bytes(1024))
        for number in range(max(self.gpus.values())):
            (paths.root / "dev" / f"gpu{number}").symlink_to(os.devnull)
        text = configuration.slurm_conf(cluster, self.gpus, paths, timeout_s=self._timeout_s)
        paths.conf.write_text(text, encoding="utf-8")
        paths.conf.with_name("gres.conf").write_text(configuration.gres_conf(self.gpus, paths), encoding="utf-8")
        paths.conf.with_name("cgroup.conf").write_text(configuration.CGROUP_CONF, encoding="utf-8")

    def _start(self, name: str, argv: Sequence[str], node: str) -> None:
        program = _find(argv[0])
        assert program is not None, "looked for before"
        with self.paths.log(name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self.command([program, *argv[1:]], node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def _wait_socket(self) -> None:
        deadline = time.monotonic() + READY_S
        while not self.paths.socket.exists():
            if time.monotonic() > deadline or self._daemons["munged"].poll() is not None:
                raise LabError(f"munge: no socket, expected one. {self._tail('munged')}")
            time.sleep(POLL_S)

    def _ready(self) -> set[str]:
        with contextlib.suppress(LabError):
            lines = self.call("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
            states = dict(line.split() for line in lines)
            return {node for node, state in states.items() if state in ("idle", "mix", "alloc")}
        return set()

    def _say(self) -> str:
        with contextlib.suppress(LabError):
            return " ".join(self.call("sinfo", "-h", "-N", "-o", "%N is %T (%E);").split())
        return self._tail("slurmctld")

    def _tail(self, name: str) -> str:
        return " ".join(self.paths.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-3:])

    def _remove(self) -> None:
        lab.down(self._name)
        for daemon in self._daemons.values():
            daemon.wait()
        shutil.rmtree(self.paths.root, ignore_errors=True)


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
