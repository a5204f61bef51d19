"""External programs that build a lab (ip, tc, nsenter, ...), and checks that this machine can host one."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ringweave.errors import LabError, explain
from ringweave.lab import cpu_quotas

DEBIAN_PACKAGES: Mapping[str, str] = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mountpoint": "util-linux",
    "hostname": "hostname",
    "mount": "mount",
    "umount": "mount",
    "sh": "dash",
}
"""Program -> Debian package that contains it."""
TOOL_TIMEOUT_S = 30
_TRIAL_SCRIPT = """exec 2>&1
echo veth; ip link add name rw-t0 type veth peer name rw-t1 || exit 1
echo bridge; ip link add name rw-t2 type bridge || exit 1
echo tbf; tc qdisc add dev rw-t0 root tbf rate 1mbit burst 80kb limit 1mb || exit 1
echo mounts; mount -t tmpfs rw-t3 /run || exit 1
mount -t sysfs rw-t4 /sys || exit 1
"""
"""Shell script that prints each operation before it tries it."""
_TRIAL_STEPS = ("veth", "bridge", "tbf", "mounts")
RUN_IN_FOLDER_SCRIPT = 'cd "$1" && shift && exec "$@"'
"""Shell script: its first argument is the folder, the others are a command."""
_USER_NAMESPACE_SETTINGS: Mapping[str, tuple[str, str]] = {
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl -w user.max_user_namespaces=10000"),
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""Setting of the kernel -> its value that keeps ordinary users from having namespaces, and the command of root that
lets them."""
_KERNEL_MODULES = {"veth": "veth", "bridge": "bridge", "tbf": "sch_tbf"}


def lab_problems(*, needs_quotas: bool = False) -> list[str]:
    """Return the reasons why this process cannot make a lab, each with its fix; empty if it can.

    Every operation is really tried. An ordinary user has to enter a user namespace first (`user_namespace.enter`).

    Args:
        needs_quotas: The lab is to limit CPU time as well.
    """
    if absent := _absent_programs():
        return absent
    if os.geteuid() != 0:
        return user_namespace_problems() or [_not_root_text()]
    found = _try_kernel([])
    if needs_quotas and cpu_quotas.find_hierarchy() is None and not cpu_quotas.has_duty_cycle():
        do = "mount -t cgroup2 none /sys/fs/cgroup, or bring the lab up with --quotas never"
        found.append(_problem_text("CPU quotas", "no cgroup with the cpu controller", "one that is mounted", do))
    return found


def user_namespace_problems() -> list[str]:
    """Return the reasons why this user cannot have labs in a user namespace, each with its fix; empty if it can."""
    return _absent_programs() or _try_kernel(["--user", "--map-root-user"])


def raise_lab_problems(found: Iterable[str]) -> None:
    """Raise an error with the problems that `lab_problems` found.

    Raises:
        LabError: There is at least one.
    """
    text = "\n".join(found)
    if text:
        raise LabError(text)


def require_root() -> None:
    """Raise an error unless this process is root.

    Raises:
        LabError: This process is not root.
    """
    if os.geteuid() != 0:
        raise LabError(_not_root_text())


def find_program(name: str) -> str | None:
    """Return the path of a program; users' PATH often lacks the folders of ip and tc."""
    return shutil.which(name, path=_search_path())


@contextlib.contextmanager
def run_on_first_cpu() -> Iterator[None]:
    """Keep this thread, and what it starts, on the first of its processors.

    A mount namespace can be kept by a file only in an older one. Linux 6.18 tells their age by numbers that grow on
    each processor, but not among processors, so both must be made on the same one.
    """
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def run_tool(argv: Sequence[str], *, lines: Sequence[str] = (), may_fail: bool = False, lock: int | None = None) -> str:
    """Run a program and return its output.

    Args:
        argv: The command line.
        lines: Lines for its standard input.
        may_fail: A failure is as good as success.
        lock: Descriptor that the program inherits, so that the lab stays locked while it runs, even if we are killed.

    Raises:
        LabError: The program failed.
    """
    try:
        done = subprocess.run(
            list(argv),
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            timeout=TOOL_TIMEOUT_S,
            env=tool_environ(),
            pass_fds=() if lock is None else (lock,),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(_failure_text(argv, str(error))) from error
    if done.returncode != 0 and not may_fail:
        raise LabError(_failure_text(argv, " ".join(done.stderr.split()) or f"exit code {done.returncode}"))
    return done.stdout


def tool_environ() -> dict[str, str]:
    """Return the environment of a program of the lab: its messages are in English."""
    return {**os.environ, "PATH": _search_path(), "LC_ALL": "C"}


def _absent_programs() -> list[str]:
    absent = [name for name in DEBIAN_PACKAGES if find_program(name) is None]
    if not absent:
        return []
    do = f"apt install {' '.join(sorted({DEBIAN_PACKAGES[name] for name in absent}))}"
    return [_problem_text("programs", f"{', '.join(absent)} not found", ", ".join(DEBIAN_PACKAGES), do)]


def _not_root_text() -> str:
    do = "Put ringweave lab unshare -- in front of the command, or sudo"
    return _problem_text("user", f"id {os.geteuid()}", "root, or a user namespace of this user", do)


def _try_kernel(options: Sequence[str]) -> list[str]:
    """Try every operation in new namespaces; `options` of unshare make further ones."""
    command = ["unshare", *options, "--net", "--uts", "--mount", "--propagation", "private", "sh", "-c", _TRIAL_SCRIPT]
    trial = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
        env=tool_environ(),
    )
    if trial.returncode == 0:
        return []
    tried = [line for line in trial.stdout.splitlines() if line in _TRIAL_STEPS]
    said = " ".join((trial.stderr or trial.stdout).strip().splitlines()[-1:])
    if tried and tried[-1] in _KERNEL_MODULES:
        kind = tried[-1]
        return [
            _problem_text(f"links ({kind})", said, "a kernel that has it", f"Load it: modprobe {_KERNEL_MODULES[kind]}")
        ]
    if options and not tried:
        return [_problem_text("user namespaces", said, "a kernel that gives them to ordinary users", _kernel_setting())]
    do = "Run as root outside of a container, or in one with --privileged"
    return [_problem_text("namespaces", said, "namespaces for network, host name and mounts", do)]


def _kernel_setting() -> str:
    """Return the command that lets ordinary users have namespaces, by the settings of this kernel."""
    for path, (refusing, command) in _USER_NAMESPACE_SETTINGS.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text(encoding="ascii").strip() == refusing:
                return f"Let root run {command}; or put sudo in front"
    return "Put sudo in front; in a container, start it with --privileged"


def _failure_text(argv: Sequence[str], said: str) -> str:
    do = "See what the kernel says (dmesg), and bring the lab up again"
    return _problem_text("command of the lab", said, f"{argv[0]} to succeed", do, where=" ".join(argv[:6]))


def _problem_text(what: str, got: str, expected: str, do: str, where: str = "lab") -> str:
    return explain(what, got=got, expected=expected, do=do, where=where)


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
