"""State of this machine's labs: files on disk, and the processes inside of the labs' namespaces.

The files are written before a lab is made, and removed after everything else.

```text
/run/ringweave/labs/NAME/lab.json    the lab's cluster file, CPU quotas, and whether it is complete
/run/ringweave/labs/NAME/hosts       /etc/hosts of its nodes
/run/ringweave/labs/NAME/ns/         the nodes' namespaces: host name and mounts; of devices with a duty cycle too
/run/ringweave/labs/NAME/duty-cycle/ a file NODE:DEVICE for each device with a duty cycle: microseconds of each period
/run/ringweave-findings/NAME         probe results of jobs in the lab; visible to nodes, which see no lab
/run/ringweave/locks/NAME            held by the command that makes, changes or removes the lab
/run/ringweave/inside                exists only inside a node
/run/netns/rw-NAME:NODE              the nodes' network namespaces, as `ip netns` names them
```

In an ordinary user's namespaces (`user_namespace.py`), /run is a file system of their own.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ringweave.errors import LabError, UsageError
from ringweave.files import file_io
from ringweave.lab.cpu_quotas import MIN_QUOTA_US, CgroupHierarchy, CpuQuotas

LAB_HOME = Path("/run/ringweave")
NETNS_FOLDER = Path("/run/netns")
LOCK_WAIT_S = 20.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class LabRecord:
    """Record of a lab: everything needed to find, change and remove it."""

    name: str
    cluster_text: str
    """Text of the cluster file, addresses assigned."""
    quotas: CpuQuotas | None
    is_complete: bool
    """False while it is made or removed, and for ever if that is interrupted."""
    boot_id: str
    """Boot of the machine that it belongs to; its kernel objects are gone after the next boot."""
    hierarchy: CgroupHierarchy | None = None
    """Place of its control groups; None: it has no quotas, or a duty cycle stands in for them."""


def current_boot_id() -> str:
    """Return the id of this boot of the machine."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def lab_folder(name: str) -> Path:
    """Return the folder of a lab's state."""
    return LAB_HOME / "labs" / name


def namespace_folder(name: str) -> Path:
    """Return the folder of a lab's namespaces of host names and mounts; a mount of its own."""
    return lab_folder(name) / "ns"


def duty_cycle_folder(name: str) -> Path:
    """Return the folder with the quotas of devices that have a duty cycle."""
    return lab_folder(name) / "duty-cycle"


def device_file_name(node: str, device: int) -> str:
    """Return the name of a device's files, `a-0:1`."""
    return f"{node}:{device}"


def write_duty_cycle(name: str, node: str, device: int, quota_us: int) -> None:
    """Write the quota of a device with a duty cycle, in microseconds of each period.

    Raises:
        LabError: It is less than control groups take, or the lab is gone.
    """
    path = duty_cycle_folder(name) / device_file_name(node, device)
    what, do = f"CPU quota of {path.name}", "Give at least 1 ms of each 40 ms, and see whether the lab is still up"
    if quota_us < MIN_QUOTA_US or not path.exists():
        raise LabError(what, got=quota_us, expected="1000 microseconds or more", do=do, where=str(path))
    temporary = path.parents[1] / f".{path.name}"
    temporary.write_text(str(quota_us), encoding="ascii")
    temporary.replace(path)


def read_duty_cycle(name: str, node: str, device: int) -> int:
    """Return the quota of a device with a duty cycle, in microseconds of each period."""
    return int((duty_cycle_folder(name) / device_file_name(node, device)).read_text(encoding="ascii"))


def hosts_path(name: str) -> Path:
    """Return the path of /etc/hosts for the lab's nodes."""
    return lab_folder(name) / "hosts"


def probe_results_folder(name: str) -> Path:
    """Return the folder in which jobs in a lab keep their measurements of its network."""
    return LAB_HOME.with_name(f"{LAB_HOME.name}-findings") / name


def remove_probe_results(name: str) -> None:
    """Remove the jobs' measurements, since the network has changed."""
    shutil.rmtree(probe_results_folder(name), ignore_errors=True)


def lab_names() -> list[str]:
    """Return the names of all labs, complete or not, sorted."""
    return sorted(path.name for path in (LAB_HOME / "labs").glob("*") if path.is_dir())


def read_record(name: str) -> LabRecord | None:
    """Read a lab's record; None if there is none, or if it cannot be read."""
    try:
        content = file_io.load_json(lab_folder(name) / "lab.json")
        quotas = content.pop("quotas")
        quotas = None if quotas is None else {node: tuple(node_quotas) for node, node_quotas in quotas.items()}
        hierarchy = content.pop("hierarchy")
        hierarchy = hierarchy and CgroupHierarchy(version=hierarchy["version"], root=Path(hierarchy["root"]))
        record = LabRecord(**content, quotas=quotas, hierarchy=hierarchy)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record


def write_record(record: LabRecord) -> None:
    """Write a lab's record atomically."""
    path = lab_folder(record.name) / "lab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    file_io.replace_text(path, json.dumps(asdict(record), indent=2, default=str) + "\n")


def remove_lab_folder(name: str) -> None:
    """Remove a lab's folder; everything in it is unmounted already."""
    remove_probe_results(name)
    shutil.rmtree(lab_folder(name), ignore_errors=True)


def refuse_inside_node() -> None:
    """Raise an error inside a node of a lab, where labs are invisible.

    Raises:
        UsageError: This process is in a node.
    """
    marker = LAB_HOME / "inside"
    if marker.exists():
        node = marker.read_text(encoding="utf-8").strip()
        raise UsageError("lab", got=f"inside of node {node}", expected="the machine itself", do="Leave the node first")


@contextmanager
def hold_lock(name: str, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Hold a lab's lock; yields a descriptor that holds it for every process that inherits it.

    Raises:
        LabError: Another process held it for longer than `wait_s`.
    """
    path = LAB_HOME / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise LabError(
                "lab",
                got=name,
                expected=f"one that no other command works on for {wait_s:g} s",
                do="Wait for that command, or end it",
                where=str(path),
            )
        time.sleep(0.02)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove_lock_file(name: str) -> None:
    """Remove the file of a lock; its holder does that last, once the lab is gone."""
    (LAB_HOME / "locks" / name).unlink(missing_ok=True)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not file_io.is_same_file(path, descriptor):
        os.close(descriptor)
        return None
    return descriptor


# Processes inside a lab: found by their namespaces, signalled through pidfds so that a reused pid is never hit.


NamespaceId = tuple[int, int]
"""Device and inode of a namespace, from stat(2)."""

NAMESPACE_KINDS = ("net", "uts", "mnt")
TERM_WAIT_S = 2.0
KILL_WAIT_S = 3.0


def identify_namespaces(paths: Collection[Path]) -> set[NamespaceId]:
    """Return the namespaces that are mounted at these files, except those that this process is in."""
    own = {found for kind in NAMESPACE_KINDS if (found := namespace_id(Path(f"/proc/self/ns/{kind}")))}
    return {found for path in paths if (found := namespace_id(path))} - own


def pids_inside(namespaces: Collection[NamespaceId]) -> list[int]:
    """Return ids of the running processes that are in at least one of these namespaces."""
    return [pid for pid in all_pids() if _is_inside(pid, namespaces)]


def command_line(pid: int) -> str:
    """Return the command line that started a process; empty if it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")


def end_processes(namespaces: Collection[NamespaceId], *, other_pids: Callable[[], Collection[int]] = tuple) -> None:
    """End all processes in these namespaces: SIGTERM, then SIGKILL.

    Raises:
        LabError: Some processes do not end.
    """
    _signal_all(signal.SIGTERM, namespaces, other_pids, TERM_WAIT_S)
    deadline = time.monotonic() + KILL_WAIT_S
    while left := _signal_all(signal.SIGKILL, namespaces, other_pids, KILL_WAIT_S):  # again, as they may have forked
        if time.monotonic() > deadline:
            raise LabError(
                "processes of the lab",
                got=left,
                expected="them to end when killed",
                do="Look at them with ps; the kernel holds them",
            )


def _signal_all(
    signal_number: signal.Signals,
    namespaces: Collection[NamespaceId],
    other_pids: Callable[[], Collection[int]],
    wait_s: float,
) -> list[int]:
    """Signal all processes and wait for their end; return the ids that the signal went to."""
    with ExitStack() as stack:
        handles: dict[int, int] = {}
        for pid in {*pids_inside(namespaces), *other_pids()}:
            handle = _open_pidfd(pid)
            if handle is None:
                continue
            stack.callback(os.close, handle)
            if _is_inside(pid, namespaces) or pid in other_pids():  # still the same, now that the handle holds it
                handles[pid] = handle
        for handle in handles.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal_number)
        _wait_exited(handles.values(), wait_s)
        return sorted(handles)


def _wait_exited(handles: Collection[int], wait_s: float) -> None:
    poll, left = select.poll(), set(handles)
    for handle in left:
        poll.register(handle, select.POLLIN)
    deadline = time.monotonic() + wait_s
    while left and (rest_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(rest_s * 1000):
            poll.unregister(handle)
            left.discard(handle)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def all_pids() -> Iterator[int]:
    """Yield the ids of all processes that this one sees."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _is_inside(pid: int, namespaces: Collection[NamespaceId]) -> bool:
    return any(namespace_id(Path(f"/proc/{pid}/ns/{kind}")) in namespaces for kind in NAMESPACE_KINDS)


def namespace_id(path: Path) -> NamespaceId | None:
    """Return the namespace of a file, or of an entry in /proc/PID/ns; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
