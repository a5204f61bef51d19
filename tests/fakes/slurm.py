"""Real Slurm cluster on one Linux machine: controller, node daemons and munge, with nodes as namespaces of a lab."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ringweave import lab, topology
from ringweave.errors import LabError, explain
from ringweave.lab import Lab
from ringweave.topology import Cluster

CONTROLLER_NODE = "ctl"
"""Node of slurmctld, and login node; it computes nothing."""
CPUS_PER_GPU = 2
MEMORY_MIB = 8192
"""Memory of each node, as Slurm believes; no limit is enforced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmPaths:
    """File locations of a cluster; all nodes see the same."""

    root: Path

    @property
    def conf(self) -> Path:
        """Path of slurm.conf, with gres.conf and cgroup.conf beside it."""
        return self.root / "etc" / "slurm.conf"

    @property
    def key(self) -> Path:
        """Path of munge's key."""
        return self.root / "munge" / "key"

    @property
    def socket(self) -> Path:
        """Path of munge's socket; all nodes reach it, since they share the file system."""
        return self.root / "run" / "munge.sock"

    def log(self, program: str) -> Path:
        """Return the log file of a program."""
        return self.root / "log" / f"{program}.log"


def slurm_conf(cluster: Cluster, gpus: Mapping[str, int], paths: SlurmPaths, *, timeout_s: int) -> str:
    """Return the text of slurm.conf.

    Args:
        cluster: Nodes with their addresses, including the controller.
        gpus: Node -> number of GPUs, without the controller.
        paths: File locations.
        timeout_s: Silence after which a node counts as down.
    """
    lines = [
        f"ClusterName={cluster.name}",
        f"SlurmctldHost={CONTROLLER_NODE}({cluster.node(CONTROLLER_NODE).address})",
        f"AuthInfo=socket={paths.socket},cred_expire=10",
        f"StateSaveLocation={paths.root}/state",
        f"SlurmdSpoolDir={paths.root}/spool/%n",
        f"SlurmctldPidFile={paths.root}/run/slurmctld.pid",
        f"SlurmdPidFile={paths.root}/run/slurmd-%n.pid",
        f"SlurmdTimeout={timeout_s}",
        *_FIXED_SETTINGS,
    ]
    for node, count in gpus.items():
        cpus = max(CPUS_PER_GPU, CPUS_PER_GPU * count)
        gres = f" Gres=gpu:{count}" if count else ""
        address = cluster.node(node).address
        lines.append(f"NodeName={node} NodeAddr={address} CPUs={cpus} RealMemory={MEMORY_MIB} State=UNKNOWN{gres}")
    lines.append(f"PartitionName=main Nodes={','.join(gpus)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join([*lines, ""])


_FIXED_SETTINGS = (
    "SlurmUser=root",
    "SlurmdUser=root",
    "AuthType=auth/munge",
    "CredType=cred/munge",
    "ProctrackType=proctrack/linuxproc",
    "TaskPlugin=task/none",
    "JobAcctGatherType=jobacct_gather/none",
    "AccountingStorageType=accounting_storage/none",
    "MpiDefault=none",
    "SelectType=select/cons_tres",
    "SelectTypeParameters=CR_Core",
    "SchedulerType=sched/backfill",
    "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
    "GresTypes=gpu",
    "ReturnToService=2",
    "KillWait=5",
    "MailProg=/bin/true",
    "PropagateResourceLimits=NONE",
    "SlurmdParameters=config_overrides",  # more CPUs than this machine has
)

CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"
"""No limits; it only keeps Slurm from looking for systemd."""


def gres_conf(gpus: Mapping[str, int], paths: SlurmPaths) -> str:
    """Return the text of gres.conf: each GPU is a name of /dev/null, since Slurm counts only device files."""
    lines = ["AutoDetect=off"]
    for node, count in gpus.items():
        if count:
            numbers = "0" if count == 1 else f"[0-{count - 1}]"
            lines.append(f"NodeName={node} Name=gpu File={paths.root}/dev/gpu{numbers}")
    return "\n".join([*lines, ""])


SLURM_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
"""Program -> its Debian package."""
SLURM_READY_TIMEOUT_S = 250.0
SLURM_POLL_S = 0.1


def slurm_problems() -> list[str]:
    """Return the reasons for which this machine cannot run a Slurm cluster, each with a fix; empty if it can."""
    absent = [program for program in SLURM_PROGRAMS if _find_program(program) is None]
    if absent:
        do = f"apt install --no-install-recommends {' '.join(sorted(set(SLURM_PROGRAMS.values())))}"
        return [explain("Slurm", got=f"{', '.join(absent)} not found", expected="its programs", do=do)]
    return lab.lab_problems()


class FakeGpuSlurmCluster:
    """Slurm cluster with fake GPUs, which are counted and allocated and compute nothing. A context manager.

    Each node is a node of a lab: host name, address, /dev/shm and /sys of its own; the file system is shared, as on a
    real cluster. Nothing is left after closing it, whatever still runs in it.
    """

    def __init__(self, gpus: Mapping[str, int], *, name: str, timeout_s: int = 10) -> None:
        """`gpus` is the number of GPUs of each node; a silent node is down after `timeout_s`."""
        self.gpus, self._name, self._timeout_s = dict(gpus), name, timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._lab: Lab | None = None
        self.paths = SlurmPaths(root=Path(os.devnull))

    @property
    def lab(self) -> Lab:
        """The cluster's lab."""
        assert self._lab is not None, "it is not up"
        return self._lab

    @property
    def environ(self) -> dict[str, str]:
        """Additional environment of clients."""
        return {"SLURM_CONF": str(self.paths.conf)}

    def __enter__(self) -> Self:
        # A short path, for the socket; not a folder of one user, for munge and for other users' jobs.
        self.paths = SlurmPaths(root=Path(tempfile.mkdtemp(prefix="rw-slurm-")))
        try:
            self._start_cluster()
        except BaseException:
            self._remove_cluster()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove_cluster()

    def wrap_command(self, argv: Sequence[str], node: str = CONTROLLER_NODE) -> list[str]:
        """Return the command line that runs another one on the login node, or on a node."""
        return self.lab.command(node, ["env", *(f"{key}={value}" for key, value in self.environ.items()), *argv])

    def run_command(self, *argv: str, node: str = CONTROLLER_NODE) -> str:
        """Run a command there and return its output.

        Raises:
            LabError: The command failed.
        """
        done = subprocess.run(
            self.wrap_command(argv, node), capture_output=True, text=True, check=False, timeout=SLURM_READY_TIMEOUT_S
        )
        if done.returncode:
            raise LabError(f"{' '.join(argv)}: exit code {done.returncode}, expected 0. {done.stderr.strip()}")
        return done.stdout

    def kill_daemon(self, node: str) -> None:
        """Kill slurmd of a node; processes that it started live on."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def cut_power(self, node: str) -> None:
        """Kill all processes of a node."""
        for pid in self.lab.processes()[node]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons[node].wait()

    def revive(self, node: str) -> None:
        """Restart slurmd of a node, and wait until the node accepts work."""
        self._start_daemon(node, ["slurmd", "-D", "-f", str(self.paths.conf)], node)
        self.wait_ready([node])

    def wait_ready(self, nodes: Sequence[str]) -> None:
        """Wait until Slurm gives work to these nodes.

        Raises:
            LabError: Slurm does not.
        """
        deadline = time.monotonic() + SLURM_READY_TIMEOUT_S
        while not set(nodes) <= self._ready_nodes():
            if time.monotonic() > deadline:
                raise LabError(
                    f"nodes of Slurm: {self._describe_nodes()}, expected all of {', '.join(nodes)} to be ready."
                )
            time.sleep(SLURM_POLL_S)

    def _start_cluster(self) -> None:
        root = self.paths.root
        root.chmod(0o755)
        for folder in ("etc", "state", "spool", "run", "log", "munge", "dev"):
            (root / folder).mkdir()
        (root / "munge").chmod(0o700)
        nodes = "".join(f"  - {{name: {node}, nic: 10Gbit/s, devices: 1}}\n" for node in (CONTROLLER_NODE, *self.gpus))
        self._lab = lab.up(topology.loads(f"name: {self._name}\nnodes:\n{nodes}"), self._name)
        self._write_files()
        munged = ["munged", "-F", f"--key-file={self.paths.key}", f"--socket={self.paths.socket}"]
        files = [f"--{kind}-file={root}/munge/{kind}" for kind in ("seed", "pid", "log")]
        self._start_daemon("munged", [*munged, *files], CONTROLLER_NODE)
        self._wait_socket()
        self._start_daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.paths.conf)], CONTROLLER_NODE)
        for node in self.gpus:
            (root / "spool" / node).mkdir()
            self._start_daemon(node, ["slurmd", "-D", "-f", str(self.paths.conf)], node)
        self.wait_ready(list(self.gpus))

    def _write_files(self) -> None:
        paths, cluster = self.paths, self.lab.cluster
        paths.key.touch(mode=0o600)
        paths.key.write_bytes(secrets.token_bytes(1024))
        for number in range(max(self.gpus.values())):
            (paths.root / "dev" / f"gpu{number}").symlink_to(os.devnull)
        text = slurm_conf(cluster, self.gpus, paths, timeout_s=self._timeout_s)
        paths.conf.write_text(text, encoding="utf-8")
        paths.conf.with_name("gres.conf").write_text(gres_conf(self.gpus, paths), encoding="utf-8")
        paths.conf.with_name("cgroup.conf").write_text(CGROUP_CONF, encoding="utf-8")

    def _start_daemon(self, name: str, argv: Sequence[str], node: str) -> None:
        program = _find_program(argv[0])
        assert program is not None, "looked for before"
        with self.paths.log(name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                self.wrap_command([program, *argv[1:]], node),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
            )

    def _wait_socket(self) -> None:
        deadline = time.monotonic() + SLURM_READY_TIMEOUT_S
        while not self.paths.socket.exists():
            if time.monotonic() > deadline or self._daemons["munged"].poll() is not None:
                raise LabError(f"munge: no socket, expected one. {self._log_tail('munged')}")
            time.sleep(SLURM_POLL_S)

    def _ready_nodes(self) -> set[str]:
        with contextlib.suppress(LabError):
            lines = self.run_command("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
            states = dict(line.split() for line in lines)
            return {node for node, state in states.items() if state in ("idle", "mix", "alloc")}
        return set()

    def _describe_nodes(self) -> str:
        with contextlib.suppress(LabError):
            return " ".join(self.run_command("sinfo", "-h", "-N", "-o", "%N is %T (%E);").split())
        return self._log_tail("slurmctld")

    def _log_tail(self, name: str) -> str:
        return " ".join(self.paths.log(name).read_text(encoding="utf-8", errors="replace").splitlines()[-3:])

    def _remove_cluster(self) -> None:
        lab.down(self._name)
        for daemon in self._daemons.values():
            daemon.wait()
        shutil.rmtree(self.paths.root, ignore_errors=True)


def _find_program(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
