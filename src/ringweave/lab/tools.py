"""The programs that make a lab, found and run; and whether this machine can have one at all."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence

from ringweave.errors import LabError, explain
from ringweave.lab import cgroups

PACKAGES: Mapping[str, str] = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mountpoint": "util-linux",
    "mount": "mount",
    "umount": "mount",
    "sh": "dash",
}
"""Program -> Debian package that has it."""
TIMEOUT_S = 30
_TRIAL = """exec 2>&1
echo veth; ip link add name rw-t0 type veth peer name rw-t1 || exit 1
echo bridge; ip link add name rw-t2 type bridge || exit 1
echo tbf; tc qdisc add dev rw-t0 root tbf rate 1mbit burst 80kb limit 1mb || exit 1
echo mounts; mount -t tmpfs rw-t3 /run || exit 1
"""
"""Says what it tries before it tries it."""
_TRIED = ("veth", "bridge", "tbf", "mounts")
_MODULES = {"veth": "veth", "bridge": "bridge", "tbf": "sch_tbf"}


def problems(*, needs_quotas: bool = False) -> list[str]:
    """Why this machine cannot have a lab, each with what mends it; empty if it can. Everything is really tried.

    Args:
        needs_quotas: The lab shall limit CPU time as well.
    """
    absent = [name for name in PACKAGES if find(name) is None]
    if absent:
        packages = " ".join(sorted({PACKAGES[name] for name in absent}))
        return [_text("programs", f"{', '.join(absent)} not found", ", ".join(PACKAGES), f"apt install {packages}")]
    if os.geteuid() != 0:
        return [_not_root()]
    found = _try_kernel()
    if needs_quotas and cgroups.find() is None:
        do = "mount -t cgroup2 none /sys/fs/cgroup, or bring the lab up with --quotas never"
        found.append(_text("CPU quotas", "no cgroup with the cpu controller", "one that is mounted", do))
    return found


def refuse_problems(found: Iterable[str]) -> None:
    """Raise what `problems` found.

    Raises:
        LabError: Something was found.
    """
    text = "\n".join(found)
    if text:
        raise LabError(text)


def refuse_others() -> None:
    """Raise an error unless this is root.

    Raises:
        LabError: It is not.
    """
    if os.geteuid() != 0:
        raise LabError(_not_root())


def find(name: str) -> str | None:
    """Path of a program; users' PATH often lacks the folders with ip and tc."""
    return shutil.which(name, path=_path())


def run(argv: Sequence[str], *, lines: Sequence[str] = (), may_fail: bool = False, lock: int | None = None) -> str:
    """What a program prints.

    Args:
        argv: The command line.
        lines: What it reads from its standard input.
        may_fail: Whether a failure is as good as success.
        lock: Descriptor that it shall hold, so that the lab stays locked while it runs, even if we are killed.

    Raises:
        LabError: It failed.
    """
    try:
        done = subprocess.run(
            list(argv),
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            timeout=TIMEOUT_S,
            env={**os.environ, "PATH": _path(), "LC_ALL": "C"},
            pass_fds=() if lock is None else (lock,),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(_failure(argv, str(error))) from error
    if done.returncode != 0 and not may_fail:
        raise LabError(_failure(argv, " ".join(done.stderr.split()) or f"exit code {done.returncode}"))
    return done.stdout


def _not_root() -> str:
    return _text("user", f"id {os.geteuid()}", "root, who may make and enter namespaces", "Put sudo in front")


def _try_kernel() -> list[str]:
    command = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", _TRIAL]
    trial = subprocess.run(
        command, capture_output=True, text=True, check=False, errors="replace", env={**os.environ, "PATH": _path()}
    )
    if trial.returncode == 0:
        return []
    tried = [line for line in trial.stdout.splitlines() if line in _TRIED]
    said = " ".join((trial.stderr or trial.stdout).strip().splitlines()[-1:])
    if tried and tried[-1] in _MODULES:
        kind = tried[-1]
        return [_text(f"links ({kind})", said, "a kernel that has it", f"Load it: modprobe {_MODULES[kind]}")]
    do = "Run as root outside of a container, or in one with --privileged"
    return [_text("namespaces", said, "namespaces for network, host name and mounts", do)]


def _failure(argv: Sequence[str], said: str) -> str:
    do = "See what the kernel says (dmesg), and bring the lab up again"
    return _text("command of the lab", said, f"{argv[0]} to succeed", do, where=" ".join(argv[:6]))


def _text(what: str, got: str, expected: str, do: str, where: str = "lab") -> str:
    return explain(what, got=got, expected=expected, do=do, where=where)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
