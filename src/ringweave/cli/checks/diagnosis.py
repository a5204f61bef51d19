"""From what was seen on a machine to what it means: needed for what, and how to mend it. Pure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]
WIDTH = 120
_STATE, _NAME, _SEEN = 9, 17, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a check saw."""

    state: State
    """`missing`: it is not here. `broken`: it is here and does not work."""
    seen: str
    """A version, or what went wrong, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Why something is looked at, and what to do without it."""

    needed_for: str
    is_required: bool
    """The main job, training a script on workers of this machine, does not work without it."""
    mend_missing: str
    mend_broken: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    seen: str
    needed_for: str
    is_required: bool
    mend: str | None
    """A command, or words if none does it; None if all is well."""


_REINSTALL = "pip install --force-reinstall ringweave   (in a clone: make setup)"
_TRAIN = "pip install 'ringweave[train]'   (in a clone: make setup)"
_ROOT = "run as root: sudo ringweave doctor   (in a container: start it with --cap-add NET_ADMIN --cap-add SYS_ADMIN)"

NEEDS: Mapping[str, Need] = {
    "python": Need(
        needed_for="everything",
        is_required=True,
        mend_missing="install Python 3.11 or newer",
        mend_broken="install Python 3.11 or newer, make a new environment with it",
    ),
    "ringweave": Need(
        needed_for="everything; its entry point makes the backend known to torch",
        is_required=True,
        mend_missing=_REINSTALL,
        mend_broken=_REINSTALL,
    ),
    "autoload": Need(
        needed_for="scripts that do not import ringweave",
        is_required=True,
        mend_missing="unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        mend_broken="unset TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    "torch": Need(needed_for="training", is_required=True, mend_missing=_TRAIN, mend_broken=_TRAIN),
    "backend": Need(
        needed_for='init_process_group("ringweave")',
        is_required=True,
        mend_missing=_REINSTALL,
        mend_broken="see what fails: python -c 'import torch, ringweave.comm.backend'",
    ),
    "gloo": Need(
        needed_for="every collective on CPUs",
        is_required=True,
        mend_missing=_TRAIN,
        mend_broken="check the loopback interface: ip link set lo up; check that a firewall lets it through",
    ),
    "nccl": Need(
        needed_for="collectives on NVIDIA GPUs",
        is_required=False,
        mend_missing="install a CUDA build of torch: https://pytorch.org/get-started/locally",
        mend_broken="install a CUDA build of torch: https://pytorch.org/get-started/locally",
    ),
    "gpus": Need(
        needed_for="training on GPUs",
        is_required=False,
        mend_missing="nothing to do on a machine without GPUs",
        mend_broken="compare driver and CUDA version: nvidia-smi; python -m torch.utils.collect_env",
    ),
    "examples": Need(
        needed_for="the examples: progress bar, TensorBoard, pictures",
        is_required=False,
        mend_missing=_TRAIN,
        mend_broken=_TRAIN,
    ),
    "lab": Need(
        needed_for="ringweave lab: a cluster on one machine",
        is_required=False,
        mend_missing="apt-get install dash iproute2 mount util-linux",
        mend_broken=_ROOT,
    ),
    "cpu-quota": Need(
        needed_for="the lab: devices of unequal speed",
        is_required=False,
        mend_missing="mount it as root: mount -t cgroup2 none /sys/fs/cgroup",
        mend_broken="run as root   (in a container: start it with --privileged or --cgroupns=host)",
    ),
    "mpi": Need(
        needed_for="bench: Open MPI and MPICH beside ours",
        is_required=False,
        mend_missing="apt-get install openmpi-bin libopenmpi-dev",
        mend_broken="apt-get install --reinstall openmpi-bin",
    ),
    "slurm": Need(
        needed_for="jobs on a Slurm cluster",
        is_required=False,
        mend_missing="apt-get install slurm-client   (or log in to a node of the cluster)",
        mend_broken="check the cluster's configuration: scontrol ping",
    ),
    "kubectl": Need(
        needed_for="jobs on Kubernetes",
        is_required=False,
        mend_missing="install it: https://kubernetes.io/docs/tasks/tools",
        mend_broken="kubectl version --client",
    ),
    "hwloc": Need(
        needed_for="discovery of NUMA nodes and NICs",
        is_required=False,
        mend_missing="apt-get install hwloc",
        mend_broken="apt-get install --reinstall hwloc",
    ),
}


def diagnose(observations: Mapping[str, Observation]) -> list[Finding]:
    """What the observations mean, in the order of `NEEDS`.

    Args:
        observations: By name; a name of `NEEDS` that is not in it was not looked at and is left out.
    """
    return [_finding(name, need, observations[name]) for name, need in NEEDS.items() if name in observations]


def is_fit(findings: Sequence[Finding]) -> bool:
    """Whether everything works that the main job needs."""
    return all(finding.state == "ok" for finding in findings if finding.is_required)


def to_json(findings: Sequence[Finding]) -> dict[str, object]:
    """The report as one JSON document."""
    return {"fit": is_fit(findings), "checks": [asdict(finding) for finding in findings]}


def to_table(findings: Sequence[Finding]) -> str:
    """The report for people, at most 120 columns wide."""
    head = _row("", "", "seen", "needed for")
    rows = [row for finding in findings for row in _rows(finding)]
    return "\n".join([head, *rows, "", _verdict(findings)]) + "\n"


def _finding(name: str, need: Need, observation: Observation) -> Finding:
    mends = {"ok": None, "missing": need.mend_missing, "broken": need.mend_broken}
    return Finding(
        name=name,
        state=observation.state,
        seen=observation.seen,
        needed_for=need.needed_for,
        is_required=need.is_required,
        mend=mends[observation.state],
    )


def _rows(finding: Finding) -> list[str]:
    seen = textwrap.wrap(finding.seen, _SEEN - 2) or [""]
    used = textwrap.wrap(finding.needed_for, WIDTH - _STATE - _NAME - _SEEN)
    height = max(len(seen), len(used))
    cells = zip(seen + [""] * (height - len(seen)), used + [""] * (height - len(used)), strict=True)
    lines = [_row("" if i else finding.state, "" if i else finding.name, *pair) for i, pair in enumerate(cells)]
    margin = " " * (_STATE + _NAME)
    mend = textwrap.wrap(finding.mend or "", WIDTH, initial_indent=margin + "-> ", subsequent_indent=margin + "   ")
    return lines + (mend if finding.mend else [])


def _row(state: str, name: str, seen: str, used: str) -> str:
    return f"{state:{_STATE}}{name:{_NAME}}{seen:{_SEEN}}{used}".rstrip()


def _verdict(findings: Sequence[Finding]) -> str:
    bad = [finding.name for finding in findings if finding.is_required and finding.state != "ok"]
    if not bad:
        return "Training on workers of this machine works."
    return f"Training on workers of this machine does not work: mend {', '.join(bad)} first."
