"""The files that a small Slurm cluster reads, as text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringweave.topology import Cluster

CONTROLLER = "ctl"
"""The node of slurmctld, where people log in; it computes nothing."""
CPUS_PER_GPU = 2
MEMORY_MIB = 8192
"""Of each node, as Slurm believes; nothing limits it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Where a cluster keeps its files; all nodes see the same."""

    root: Path

    @property
    def conf(self) -> Path:
        """slurm.conf; gres.conf and cgroup.conf lie beside it."""
        return self.root / "etc" / "slurm.conf"

    @property
    def key(self) -> Path:
        """The key of munge."""
        return self.root / "munge" / "key"

    @property
    def socket(self) -> Path:
        """Where munge is reached, from all nodes: they share the file system."""
        return self.root / "run" / "munge.sock"

    def log(self, program: str) -> Path:
        """What a program prints."""
        return self.root / "log" / f"{program}.log"


def slurm_conf(cluster: Cluster, gpus: Mapping[str, int], paths: Paths, *, timeout_s: int) -> str:
    """slurm.conf.

    Args:
        cluster: The nodes with their addresses; the controller is one of them.
        gpus: Node -> its GPUs, controller left out.
        paths: Where everything lies.
        timeout_s: After so long a silence a node counts as down.
    """
    lines = [
        f"ClusterName={cluster.name}",
        f"SlurmctldHost={CONTROLLER}({cluster.node(CONTROLLER).address})",
        f"AuthInfo=socket={paths.socket},cred_expire=10",
        f"StateSaveLocation={paths.root}/state",
        f"SlurmdSpoolDir={paths.root}/spool/%n",
        f"SlurmctldPidFile={paths.root}/run/slurmctld.pid",
        f"SlurmdPidFile={paths.root}/run/slurmd-%n.pid",
        f"SlurmdTimeout={timeout_s}",
        *_FIXED,
    ]
    for node, count in gpus.items():
        cpus = max(CPUS_PER_GPU, CPUS_PER_GPU * count)
        gres = f" Gres=gpu:{count}" if count else ""
        address = cluster.node(node).address
        lines.append(f"NodeName={node} NodeAddr={address} CPUs={cpus} RealMemory={MEMORY_MIB} State=UNKNOWN{gres}")
    lines.append(f"PartitionName=main Nodes={','.join(gpus)} Default=YES MaxTime=INFINITE State=UP")
    return "\n".join([*lines, ""])


_FIXED = (
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
"""Nothing is limited; Slurm must only not look for systemd."""


def gres_conf(gpus: Mapping[str, int], paths: Paths) -> str:
    """gres.conf: each GPU is a name of /dev/null, since Slurm counts nothing but device files."""
    lines = ["AutoDetect=off"]
    for node, count in gpus.items():
        if count:
            numbers = "0" if count == 1 else f"[0-{count - 1}]"
            lines.append(f"NodeName={node} Name=gpu File={paths.root}/dev/gpu{numbers}")
    return "\n".join([*lines, ""])
