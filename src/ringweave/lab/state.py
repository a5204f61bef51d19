"""What is known of the labs of this machine, on disk: written before anything is made, removed after all else.

```text
/run/ringweave/labs/NAME/lab.json    what the lab consists of, and whether it is complete
/run/ringweave/labs/NAME/hosts       /etc/hosts of its nodes
/run/ringweave/labs/NAME/ns/         the nodes' namespaces: host name and mounts
/run/ringweave-findings/NAME         what jobs in the lab found out about its network; nodes see it, as they see no lab
/run/ringweave/locks/NAME            held by whoever makes, changes or removes the lab
/run/ringweave/inside                only seen in a node: this is one
/run/netns/rw-NAME:NODE              the nodes' network namespaces, as `ip netns` has them
```
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ringweave.errors import LabError, UsageError, explain
from ringweave.files import json_text
from ringweave.lab.quotas import Quotas

HOME = Path("/run/ringweave")
NETNS = Path("/run/netns")
LOCK_WAIT_S = 20.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What has to be known of a lab to find, change and remove it."""

    name: str
    cluster_text: str
    """The cluster file, addresses assigned."""
    quotas: Quotas | None
    is_complete: bool
    """False while it is made and while it is removed, and so for ever if that is cut short."""
    boot_id: str
    """The boot of the machine that it belongs to; whatever the kernel had is gone after the next."""


def this_boot() -> str:
    """What tells this boot of the machine from all others."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def folder(name: str) -> Path:
    """The folder of a lab."""
    return HOME / "labs" / name


def namespace_folder(name: str) -> Path:
    """Where a lab's namespaces of host names and mounts are; a mount of its own."""
    return folder(name) / "ns"


def hosts_path(name: str) -> Path:
    """/etc/hosts of the lab's nodes."""
    return folder(name) / "hosts"


def findings_folder(name: str) -> Path:
    """Where jobs in a lab keep what they find out about its network."""
    return HOME.with_name(f"{HOME.name}-findings") / name


def forget_findings(name: str) -> None:
    """Remove what jobs found out: the network is another one now."""
    shutil.rmtree(findings_folder(name), ignore_errors=True)


def names() -> list[str]:
    """All labs, complete or not, by name."""
    return sorted(path.name for path in (HOME / "labs").glob("*") if path.is_dir())


def read(name: str) -> Record | None:
    """What is known of a lab; None if there is none, or nothing that can be read."""
    try:
        content = json_text.load(folder(name) / "lab.json")
        quotas = content.pop("quotas")
        quotas = None if quotas is None else {node: tuple(of_node) for node, of_node in quotas.items()}
        record = Record(**content, quotas=quotas)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record


def write(record: Record) -> None:
    """Put down what is known of a lab, in one go."""
    path = folder(record.name) / "lab.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(".lab.json")
    beside.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def forget(name: str) -> None:
    """Remove the folder of a lab, from which everything is unmounted by now."""
    forget_findings(name)
    shutil.rmtree(folder(name), ignore_errors=True)


def refuse_inside() -> None:
    """Raise an error in a node of a lab, where labs are out of sight.

    Raises:
        UsageError: This process is in one.
    """
    marker = HOME / "inside"
    if marker.exists():
        node = marker.read_text(encoding="utf-8").strip()
        raise UsageError(
            explain("lab", got=f"inside of node {node}", expected="the machine itself", do="Leave the node first")
        )


@contextmanager
def locked(name: str, wait_s: float = LOCK_WAIT_S) -> Iterator[int]:
    """Hold a lab, alone; yields a descriptor that holds it for whoever inherits it.

    Raises:
        LabError: Another process holds it, and did not let go within `wait_s`.
    """
    path = HOME / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while (descriptor := _try_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise LabError(
                explain(
                    "lab",
                    got=name,
                    expected=f"one that no other command works on for {wait_s:g} s",
                    do="Wait for that command, or end it",
                    where=str(path),
                )
            )
        time.sleep(0.02)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def forget_lock(name: str) -> None:
    """Remove the file of a lock; the last thing that its holder does, once the lab is gone."""
    (HOME / "locks" / name).unlink(missing_ok=True)


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not _is_still(path, descriptor):
        os.close(descriptor)
        return None
    return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether the file has not been removed, and perhaps made anew, by whoever held it before."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
