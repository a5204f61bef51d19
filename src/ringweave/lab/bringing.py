"""Labs made and removed. Whatever cuts this short, even kill -9, can be cleared away by doing it again."""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ringweave import topology
from ringweave.errors import LabError, UsageError, explain
from ringweave.lab import batches, cgroups, layout, processes, quotas, state, tools
from ringweave.lab.layout import PREFIX, Layout, Port
from ringweave.lab.quotas import Mode
from ringweave.lab.state import Record
from ringweave.topology import Cluster, rules

Progress = Callable[[str], None]
MOUNTS = Path("/proc/self/mountinfo")


def make(cluster: Cluster, name: str, mode: Mode, progress: Progress) -> None:
    """Bring a cluster up under a name, after clearing away what a broken attempt has left.

    Raises:
        ClusterError: The cluster cannot be a lab.
        LabError: This machine cannot have it, or it is up already. Nothing of it is left.
    """
    state.refuse_inside()
    planned = layout.lay_out(cluster, name)
    chosen = quotas.choose(cluster, mode, len(os.sched_getaffinity(0)))
    tools.refuse_problems(tools.problems(needs_quotas=chosen is not None))
    record = Record(
        name=name,
        cluster_text=topology.dumps(planned.cluster),
        quotas=chosen,
        is_complete=False,
        boot_id=state.this_boot(),
    )
    with state.locked(name) as lock:
        if is_up(state.read(name)):
            raise LabError(
                explain(
                    "name of the lab",
                    got=name,
                    expected="one that no lab has",
                    do=f"Take that one down first: ringweave lab down --lab {name}, or give another --name",
                )
            )
        if _is_there(name):
            progress("clearing away what an earlier attempt has left")
            _remove(name, lock)
        try:
            _make(planned, record, progress, lock)
        except BaseException:
            _remove(name, lock)
            state.forget_lock(name)
            raise
        state.write(replace(record, is_complete=True))


def remove(name: str) -> bool:
    """Take a lab down, complete or not, with all that runs in it; whether there was anything.

    Raises:
        LabError: Something of it could not be removed.
    """
    state.refuse_inside()
    if not _is_there(name):
        return False
    tools.refuse_others()
    with state.locked(name) as lock:
        was_there = _is_there(name)
        _remove(name, lock)
        state.forget_lock(name)
    return was_there


def is_up(record: Record | None) -> bool:
    """Whether a lab is complete, and of this boot."""
    return record is not None and record.is_complete and record.boot_id == state.this_boot()


def namespace_paths(name: str) -> list[Path]:
    """Every file that holds a namespace of the lab."""
    return [*state.NETNS.glob(layout.namespace(name, "*")), *state.namespace_folder(name).glob("*")]


def check_name(name: str) -> None:
    """Refuse a name that no cluster could have either.

    Raises:
        UsageError: It is not allowed.
    """
    if next(rules.name_problems((), "name", name), None):
        raise UsageError(
            explain(
                "name of the lab",
                got=name,
                expected="at most 63 letters, digits, dots, hyphens and underscores, beginning with a letter or digit",
                do="Give another --name",
            )
        )


def _make(planned: Layout, record: Record, progress: Progress, lock: int) -> None:
    name = planned.name
    state.write(record)
    state.forget_findings(name)
    progress("namespaces")
    state.hosts_path(name).write_text(batches.hosts_file(planned), encoding="utf-8")
    _make_namespace_folder(name, lock)
    tools.run(["ip", "-batch", "-"], lines=batches.make_namespaces(planned), lock=lock)
    for node, namespace in planned.namespaces.items():
        _make_node(name, node, namespace, lock)
    enter = ["nsenter", f"--net={state.NETNS / planned.switch_namespace}"]
    tools.run([*enter, "sh", "-ec", batches.SYSCTLS], lock=lock)
    progress("links")
    tools.run(["ip", "-n", planned.switch_namespace, "-batch", "-"], lines=batches.make_switches(planned), lock=lock)
    for node, namespace in planned.namespaces.items():
        tools.run(["ip", "-n", namespace, "-batch", "-"], lines=batches.make_node(planned, node), lock=lock)
    limit("add", planned.ports(), lock)
    if record.quotas is not None:
        progress("CPU quotas")
        hierarchy = cgroups.find()
        assert hierarchy is not None, "looked for before"
        cgroups.make(hierarchy, name, record.quotas)


def limit(verb: str, ports: list[Port], lock: int) -> None:
    """Limit what ports send, with one `tc` for each namespace. The verb is `add`, or `change` for a new rate."""
    by_namespace: dict[str, list[Port]] = defaultdict(list)
    for port in ports:
        by_namespace[port.namespace].append(port)
    for namespace, own in by_namespace.items():
        tools.run(["tc", "-n", namespace, "-batch", "-"], lines=batches.limit(verb, own), lock=lock)


def _make_namespace_folder(name: str, lock: int) -> None:
    folder = state.namespace_folder(name)
    folder.mkdir()
    (state.HOME / "sys").mkdir(exist_ok=True)
    tools.run(["mount", "-t", "tmpfs", "-o", "mode=0700,size=1m", f"{PREFIX}{name}", str(folder)], lock=lock)
    tools.run(["mount", "--make-private", str(folder)], lock=lock)  # the kernel keeps namespaces of mounts in no other


def _make_node(lab: str, node: str, namespace: str, lock: int) -> None:
    files = {kind: state.namespace_folder(lab) / f"{node}.{kind}" for kind in ("uts", "mnt")}
    for path in files.values():
        path.touch()
    net = ["nsenter", f"--net={state.NETNS / namespace}"]
    apart = ["unshare", f"--uts={files['uts']}", f"--mount={files['mnt']}", "--propagation", "private"]
    arguments = [node, str(state.hosts_path(lab)), str(state.HOME), str(state.NETNS)]
    tools.run([*net, *apart, "sh", "-c", batches.NODE_SETUP, "rw-setup", *arguments], lock=lock)


def _remove(name: str, lock: int) -> None:
    record = state.read(name)
    if record is not None and record.is_complete:
        state.write(replace(record, is_complete=False))
    hierarchy = cgroups.find()
    others = (lambda: cgroups.members(hierarchy, name)) if hierarchy else tuple
    processes.end(processes.identify(namespace_paths(name)), others=others)
    if hierarchy is not None:
        cgroups.remove(hierarchy, name)
    present = [path.name for path in state.NETNS.glob(layout.namespace(name, "*"))]
    if record is not None:
        planned = layout.lay_out(topology.loads(record.cluster_text), name)
        if planned.switch_namespace in present:
            command = ["ip", "-force", "-n", planned.switch_namespace, "-batch", "-"]
            tools.run(command, lines=batches.remove(planned), may_fail=True, lock=lock)
    if present:
        lines = [f"netns delete {namespace}" for namespace in present]
        tools.run(["ip", "-force", "-batch", "-"], lines=lines, may_fail=True, lock=lock)
    _unmount(state.namespace_folder(name), lock)
    left = [str(path) for path in state.NETNS.glob(layout.namespace(name, "*"))]
    if left:
        raise LabError(f"network namespaces: {', '.join(left)} still there, expected none. Remove them by ip netns.")
    state.forget(name)


def _is_there(name: str) -> bool:
    return state.folder(name).exists() or bool(namespace_paths(name))


def _unmount(folder: Path, lock: int) -> None:
    while any(line.split()[4] == str(folder) for line in MOUNTS.read_text(encoding="utf-8").splitlines()):
        tools.run(["umount", "--recursive", "--lazy", str(folder)], lock=lock)
