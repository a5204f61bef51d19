"""`ringweave doctor`: tries what ringweave needs on this machine, and says how to fix what does not work."""

import contextlib
import functools
import importlib.metadata
import ipaddress
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from ringweave import environment
from ringweave.cli import torch_trial
from ringweave.cli.echo import echo
from ringweave.errors import UsageError
from ringweave.files import file_io, rotation

CheckState = Literal["ok", "missing", "broken"]
TABLE_WIDTH = 120
_STATE_WIDTH, _NAME_WIDTH, _SEEN_WIDTH = 9, 17, 50


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Result of one check."""

    state: CheckState
    """`missing`: not installed. `broken`: installed, but it does not work."""
    seen: str
    """A version, or the problem, in a few words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """Purpose of a check, and the fix if it fails."""

    needed_for: str
    is_required: bool
    """Training a script on workers of this machine does not work without it."""
    fix_missing: str
    fix_broken: str = ""
    """Empty: the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    state: CheckState
    seen: str
    needed_for: str
    is_required: bool
    fix: str | None
    """A command or words that fix it; None if it works."""


_REINSTALL_FIX = "pip install --force-reinstall ringweave   (in a clone: make setup)"
_TRAIN_FIX = "pip install 'ringweave[train]'   (in a clone: make setup)"
_ROOT_FIX = (
    "run as root: sudo ringweave doctor   (in a container: start it with --cap-add NET_ADMIN --cap-add SYS_ADMIN)"
)

REQUIREMENTS: Mapping[str, Requirement] = {
    "python": Requirement(
        needed_for="everything",
        is_required=True,
        fix_missing="install Python 3.11 or newer",
        fix_broken="install Python 3.11 or newer, make a new environment with it",
    ),
    "ringweave": Requirement(
        needed_for="everything; its entry point makes the backend known to torch",
        is_required=True,
        fix_missing=_REINSTALL_FIX,
    ),
    "autoload": Requirement(
        needed_for="scripts that do not import ringweave",
        is_required=True,
        fix_missing="unset TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    "torch": Requirement(needed_for="training", is_required=True, fix_missing=_TRAIN_FIX),
    "backend": Requirement(
        needed_for='init_process_group("ringweave")',
        is_required=True,
        fix_missing=_REINSTALL_FIX,
        fix_broken="see what fails: python -c 'import torch, ringweave.comm.backend'",
    ),
    "gloo": Requirement(
        needed_for="every collective on CPUs",
        is_required=True,
        fix_missing=_TRAIN_FIX,
        fix_broken="check the loopback interface: ip link set lo up; check that a firewall lets it through",
    ),
    "nccl": Requirement(
        needed_for="collectives on NVIDIA GPUs",
        is_required=False,
        fix_missing="install a CUDA build of torch: https://pytorch.org/get-started/locally",
    ),
    "gpus": Requirement(
        needed_for="training on GPUs",
        is_required=False,
        fix_missing="nothing to do on a machine without GPUs",
        fix_broken="compare driver and CUDA version: nvidia-smi; python -m torch.utils.collect_env",
    ),
    "examples": Requirement(
        needed_for="the examples: progress bar, TensorBoard, pictures",
        is_required=False,
        fix_missing=_TRAIN_FIX,
    ),
    "lab": Requirement(
        needed_for="ringweave lab: a cluster on one machine",
        is_required=False,
        fix_missing="apt-get install dash hostname iproute2 mount util-linux",
        fix_broken=_ROOT_FIX,
    ),
    "cpu-quota": Requirement(
        needed_for="the lab: devices of unequal speed",
        is_required=False,
        fix_missing="as root: mount -t cgroup2 none /sys/fs/cgroup   (as a user: work in a group that is yours, "
        "systemd-run --user --scope -p Delegate=yes bash)",
        fix_broken="run as root   (in a container: start it with --privileged or --cgroupns=host)",
    ),
    "mpi": Requirement(
        needed_for="bench: Open MPI and MPICH beside ours",
        is_required=False,
        fix_missing="apt-get install openmpi-bin libopenmpi-dev",
        fix_broken="apt-get install --reinstall openmpi-bin",
    ),
    "slurm": Requirement(
        needed_for="jobs on a Slurm cluster",
        is_required=False,
        fix_missing="apt-get install slurm-client   (or log in to a node of the cluster)",
        fix_broken="check the cluster's configuration: scontrol ping",
    ),
    "kubectl": Requirement(
        needed_for="jobs on Kubernetes",
        is_required=False,
        fix_missing="install it: https://kubernetes.io/docs/tasks/tools",
        fix_broken="kubectl version --client",
    ),
    "hwloc": Requirement(
        needed_for="discovery of NUMA nodes and NICs",
        is_required=False,
        fix_missing="apt-get install hwloc",
        fix_broken="apt-get install --reinstall hwloc",
    ),
}


def diagnose(observations: Mapping[str, CheckResult]) -> list[Finding]:
    """Return the findings for these results, in the order of `REQUIREMENTS`.

    Args:
        observations: Results by name; a missing name of `REQUIREMENTS` was not checked and is left out.
    """
    return [
        _make_finding(name, need, observations[name]) for name, need in REQUIREMENTS.items() if name in observations
    ]


def is_fit_for_training(findings: Sequence[Finding]) -> bool:
    """Return whether everything works that training on this machine needs."""
    return all(finding.state == "ok" for finding in findings if finding.is_required)


def findings_document(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the report as one JSON document."""
    return {"fit": is_fit_for_training(findings), "checks": [asdict(finding) for finding in findings]}


def findings_table(findings: Sequence[Finding]) -> str:
    """Return the report for people, at most 120 columns wide."""
    head = _table_row("", "", "seen", "needed for")
    rows = [row for finding in findings for row in _finding_rows(finding)]
    return "\n".join([head, *rows, "", _conclusion(findings)]) + "\n"


def _make_finding(name: str, need: Requirement, observation: CheckResult) -> Finding:
    fixes = {"ok": None, "missing": need.fix_missing, "broken": need.fix_broken or need.fix_missing}
    return Finding(
        name=name,
        state=observation.state,
        seen=observation.seen,
        needed_for=need.needed_for,
        is_required=need.is_required,
        fix=fixes[observation.state],
    )


def _finding_rows(finding: Finding) -> list[str]:
    seen = textwrap.wrap(finding.seen, _SEEN_WIDTH - 2) or [""]
    used = textwrap.wrap(finding.needed_for, TABLE_WIDTH - _STATE_WIDTH - _NAME_WIDTH - _SEEN_WIDTH)
    height = max(len(seen), len(used))
    cells = zip(seen + [""] * (height - len(seen)), used + [""] * (height - len(used)), strict=True)
    lines = [_table_row("" if i else finding.state, "" if i else finding.name, *pair) for i, pair in enumerate(cells)]
    margin = " " * (_STATE_WIDTH + _NAME_WIDTH)
    fix_lines = textwrap.wrap(
        finding.fix or "", TABLE_WIDTH, initial_indent=margin + "-> ", subsequent_indent=margin + "   "
    )
    return lines + (fix_lines if finding.fix else [])


def _table_row(state: str, name: str, seen: str, used: str) -> str:
    return f"{state:{_STATE_WIDTH}}{name:{_NAME_WIDTH}}{seen:{_SEEN_WIDTH}}{used}".rstrip()


def _conclusion(findings: Sequence[Finding]) -> str:
    bad = [finding.name for finding in findings if finding.is_required and finding.state != "ok"]
    if not bad:
        return "Training on workers of this machine works."
    return f"Training on workers of this machine does not work: fix {', '.join(bad)} first."


TORCH_TRIAL_TIMEOUT_S = 90
CGROUP_ROOT = Path("/sys/fs/cgroup")
_TORCH_DEPENDENT_CHECKS = ("backend", "gloo", "nccl", "gpus")


def check_torch(timeout_s: float = TORCH_TRIAL_TIMEOUT_S) -> dict[str, CheckResult]:
    """Check torch, and everything that depends on it."""
    command = [sys.executable, "-P", torch_trial.__file__]  # -P: `operator` beside it would hide the standard library's
    try:
        trial = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd="/", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return _same_for_torch(CheckResult(state="broken", seen=f"no answer in {timeout_s:.0f} s"))
    return parse_torch_trial(trial.stdout, trial.stderr, trial.returncode)


def parse_torch_trial(stdout: str, stderr: str, returncode: int) -> dict[str, CheckResult]:
    """Parse the output of the torch trial; a check that it could not make counts as broken."""
    try:
        answer = file_io.parse_json(stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (stderr.strip().splitlines() or ["no output"])[-1]
        return _same_for_torch(CheckResult(state="broken", seen=f"exit code {returncode}: {last}"))
    found = _same_for_torch(CheckResult(state="missing", seen="torch is not installed"))
    return found | {name: CheckResult(state=state, seen=seen) for name, (state, seen) in answer.items()}


def _same_for_torch(observation: CheckResult) -> dict[str, CheckResult]:
    return dict.fromkeys(("torch", *_TORCH_DEPENDENT_CHECKS), observation)


def check_lab() -> CheckResult:
    """Check everything that a lab needs except quotas: namespaces, cables, bridges, links with limited rates."""
    from ringweave import lab  # late, so that the trial of torch starts at once
    from ringweave.lab import tools

    is_user = os.geteuid() != 0
    problems = tools.user_namespace_problems() if is_user else lab.lab_problems()
    if not problems:
        kind = "without root, in a user namespace: " if is_user else ""
        return CheckResult(state="ok", seen=f"{kind}made namespaces, a bridge and a link limited by tbf")
    return CheckResult(state="missing" if problems[0].startswith("programs:") else "broken", seen=" ".join(problems))


def check_cpu_quota(root: Path = CGROUP_ROOT) -> CheckResult:
    """Check CPU quotas in a new control group, which is removed again; a user's is in a group that is the user's."""
    if os.geteuid() != 0:
        return _check_user_quota()
    trials = ((root, "cpu.max", "50000 100000", "cgroup v2"), (root / "cpu", "cpu.cfs_quota_us", "50000", "cgroup v1"))
    for parent, file, quota, version in trials:
        is_here = (parent / "cgroup.controllers").exists() if version == "cgroup v2" else (parent / file).exists()
        if is_here:
            return _try_quota(parent, file, quota, version)
    return CheckResult(state="missing", seen=f"no cpu controller in {root}")


def _check_user_quota() -> CheckResult:
    from ringweave.lab import cpu_quotas

    found = cpu_quotas.find_hierarchy()
    if found is None:
        seen = f"no control group with a cpu controller is this user's; {cpu_quotas.DUTY_CYCLE_NOTE}"
        return CheckResult(state="missing", seen=seen)
    file, quota = ("cpu.max", "50000 100000") if found.version == 2 else ("cpu.cfs_quota_us", "50000")
    return _try_quota(found.root, file, quota, f"{found.kind}, this user's group {found.root}")


def _try_quota(parent: Path, file: str, quota: str, version: str) -> CheckResult:
    group = parent / f"ringweave-doctor-{os.getpid()}"
    try:
        group.mkdir()
        (group / file).write_text(quota, encoding="ascii")
    except OSError as error:
        return CheckResult(state="broken", seen=f"{version}: {error.strerror} ({error.filename})")
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()
    return CheckResult(state="ok", seen=f"{version}, set a quota")


EXAMPLE_PACKAGES = ("matplotlib", "tensorboard", "tqdm", "scikit-learn")
PROGRAM_TIMEOUT_S = 10


def check_python() -> CheckResult:
    """Check the version of the interpreter."""
    state = "ok" if sys.version_info >= (3, 11) else "broken"
    return CheckResult(state=state, seen=f"{platform.python_version()} at {sys.executable}")


def check_ringweave() -> CheckResult:
    """Check the installed package and its entry point."""
    try:
        version = importlib.metadata.version("ringweave")
    except importlib.metadata.PackageNotFoundError:
        return CheckResult(state="missing", seen="imported from a folder, not installed")
    points = importlib.metadata.entry_points(group="torch.backends", name="ringweave")
    if not points:
        return CheckResult(state="broken", seen=f"{version}, but no entry point in group torch.backends")
    return CheckResult(state="ok", seen=f"{version}, entry point {next(iter(points)).value}")


def check_autoload(environ: Mapping[str, str]) -> CheckResult:
    """Check that torch loads backends by itself."""
    value = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    state = "broken" if value == "0" else "ok"
    return CheckResult(state=state, seen="switched off by TORCH_DEVICE_BACKEND_AUTOLOAD=0" if value == "0" else "on")


def check_example_packages() -> CheckResult:
    """Check the packages that only the examples use."""
    found, absent = [], []
    for name in EXAMPLE_PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
    if absent:
        return CheckResult(state="missing", seen=f"not installed: {', '.join(absent)}")
    return CheckResult(state="ok", seen=", ".join(found))


def check_program_version(command: Sequence[str]) -> CheckResult:
    """Check that a program prints its version."""
    path = shutil.which(command[0])
    if path is None:
        return CheckResult(state="missing", seen=f"{command[0]} is not on the PATH")
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return CheckResult(state="broken", seen=f"{path}: {type(error).__name__}")
    lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or [""]
    if answer.returncode != 0:
        return CheckResult(state="broken", seen=f"{path}: exit code {answer.returncode}, {lines[-1]}")
    return CheckResult(state="ok", seen=lines[0])


@click.command
@click.option("--hosts", metavar="A:N,B:M,..", help="Check these hosts for ringweave run --hosts, not this machine.")
@click.option("--python", metavar="PATH", help="Interpreter on the hosts, as for ringweave run.")
@click.option("--install", is_flag=True, help="Install this ringweave on the hosts first.")
@click.option("--listening", metavar="RUN_DIR", help="List the ports of a run's processes on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, hosts: str | None, python: str | None, install: bool, listening: str | None) -> int:
    """Check the requirements of ringweave on this machine, and print a fix for each one that fails.

    Every check uses the real feature and cleans up. Exit code 0 if all requirements of training on this machine work,
    else 1. With --hosts, exit code 1 if something stops a run on these hosts. With --listening, nothing is checked.
    """
    if listening is not None:
        found = find_ports(Path(listening))
        echo(json.dumps([asdict(each) for each in found]) if as_json else ports_table(found), nl=as_json)
        return 0
    if hosts is not None:
        from ringweave.platforms.hosts import host_checks  # brings the platform of jobs

        report = host_checks.check_hosts(hosts, python, installs=install)
        echo(json.dumps(report.document()) if as_json else host_checks.report_text(report), nl=as_json)
        return 0 if report.is_fit else 1
    if python is not None or install:
        do = "Add --hosts, or leave it out"
        name = "--install" if install else "--python"
        raise UsageError(name, got="no --hosts", expected="hosts to check", do=do)
    findings = diagnose(_run_checks())
    echo(json.dumps(findings_document(findings)) if as_json else findings_table(findings), nl=as_json)
    return 0 if is_fit_for_training(findings) else 1


def _run_checks() -> dict[str, CheckResult]:
    """Run the checks side by side: most wait for programs. The trial of torch takes longest and starts first."""
    checks: dict[str, Callable[[], CheckResult]] = {
        "python": check_python,
        "ringweave": check_ringweave,
        "autoload": functools.partial(check_autoload, os.environ),
        "examples": check_example_packages,
        "lab": check_lab,
        "cpu-quota": check_cpu_quota,
        "mpi": functools.partial(check_program_version, ["mpirun", "--version"]),
        "slurm": functools.partial(check_program_version, ["sbatch", "--version"]),
        "kubectl": functools.partial(check_program_version, ["kubectl", "version", "--client"]),
        "hwloc": functools.partial(check_program_version, ["lstopo", "--version"]),
    }
    with ThreadPoolExecutor(1 + len(checks), "ringweave-doctor") as pool:
        torch_checks = pool.submit(check_torch)
        results = {name: pool.submit(check) for name, check in checks.items()}
        return torch_checks.result() | {name: result.result() for name, result in results.items()}


LOOPBACK = "loopback: users of this machine"
CERTIFICATES = "TLS 1.3, certificates of the job"
PLAIN = "plain: a token, or nothing (Gloo, torch's store)"
_LISTENS, _SIDECARS = "0A", {"ringweave.membership.main": "coordinator", "server": "parameter server"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningPort:
    """A port at which a process of a run listens."""

    process: str
    """`rank 3`, `coordinator` or `parameter server`."""
    pid: int
    address: str
    port: int
    protection: str
    """LOOPBACK, CERTIFICATES or PLAIN."""


def find_ports(run_dir: Path) -> list[ListeningPort]:
    """Return the ports at which processes of a run listen now, as the kernel lists them, also in a lab's nodes.

    Raises:
        UsageError: It is no folder of a run.
    """
    from ringweave import telemetry

    root = run_dir.absolute()
    if not rotation.exists(root / "events.jsonl"):
        do = "Give the folder that ringweave run named at its start"
        raise UsageError("run", got=str(run_dir), expected="a folder with events.jsonl", do=do)
    events = telemetry.read_last_attempt(root / "events.jsonl")
    ranks = {each["pid"]: f"rank {each['rank']}" for each in events if each["kind"] == "worker_started"}
    ports: list[ListeningPort] = []
    for pid, name in _processes_of(root, ranks).items():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            ports += _ports_of(pid, name)
    return ports


def _processes_of(root: Path, ranks: Mapping[int, str]) -> dict[int, str]:
    """Return process id -> name of each running process of a run."""
    import psutil  # late, so that the trial of torch starts at once

    found: dict[int, str] = {}
    for process in psutil.process_iter(["cmdline", "environ"]):  # None where it has ended, or is another user's
        pid, words, variables = process.pid, process.info["cmdline"] or (), process.info["environ"] or {}
        if pid in ranks and variables.get(environment.RUN_DIR) == str(root):
            found[pid] = ranks[pid]
        elif "--run-dir" in words and str(root) in words and (known := _SIDECARS.keys() & set(words)):
            found[pid] = _SIDECARS[min(known)]
    return found


def _ports_of(pid: int, name: str) -> list[ListeningPort]:
    folder, inodes = Path(f"/proc/{pid}"), set[str]()
    for descriptor in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(descriptor.readlink().name.removeprefix("socket:[").removesuffix("]"))
    encrypts = f"{environment.ENCRYPT}=on\0".encode() in (folder / "environ").read_bytes()
    ports = []
    for family, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in map(str.split, (folder / "net" / family).read_text(encoding="ascii").splitlines()[1:]):
            if row[3] == _LISTENS and row[9] in inodes:
                host, _, port = row[1].partition(":")
                words = struct.pack(f"={len(host) // 8}I", *(int(host[i : i + 8], 16) for i in range(0, len(host), 8)))
                address = socket.inet_ntop(kind, words)
                protection = _protection(address, is_secured=encrypts or not name.startswith("rank"))
                ports.append(
                    ListeningPort(process=name, pid=pid, address=address, port=int(port, 16), protection=protection)
                )
    return sorted(ports, key=lambda each: (each.address, each.port))


def _protection(address: str, *, is_secured: bool) -> str:
    found = ipaddress.ip_address(address.removeprefix("::ffff:"))
    if is_secured and not found.is_loopback:
        return CERTIFICATES
    return LOOPBACK if found.is_loopback else PLAIN


def ports_table(ports: Sequence[ListeningPort]) -> str:
    """Return a line for each port."""
    rows = [("process", "pid", "address", "protected by")]
    rows += [(each.process, str(each.pid), f"{each.address}:{each.port}", each.protection) for each in ports]
    return "".join(f"{name:18}{pid:9}{address:24}{protection}\n" for name, pid, address, protection in rows)
