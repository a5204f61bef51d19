import os
from pathlib import Path

import pytest

from ringweave.errors import LabError
from ringweave.lab import cpu_quotas
from ringweave.lab.cpu_quotas import CgroupHierarchy
from ringweave.topology import cgroups
from ringweave.topology.cgroups import CgroupMount

V1 = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
OTHER_V1 = "33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"


def v2(root: Path) -> str:
    return f"33 31 0:30 / {str(root).replace(' ', chr(92) + '040')} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_1_is_found_by_its_controller() -> None:
    assert cpu_quotas.find_hierarchy(OTHER_V1 + V1) == CgroupHierarchy(
        version=1, root=Path("/sys/fs/cgroup/cpu,cpuacct")
    )


def test_version_2_is_found_if_it_has_the_controller(tmp_path: Path) -> None:
    root = tmp_path / "a b"
    root.mkdir()
    (root / "cgroup.controllers").write_text("memory pids\n")
    assert cpu_quotas.find_hierarchy(OTHER_V1 + v2(root)) is None
    (root / "cgroup.controllers").write_text("cpuset cpu memory\n")
    assert cpu_quotas.find_hierarchy(OTHER_V1 + v2(root)) == CgroupHierarchy(version=2, root=root)


def test_version_2_gets_controller_and_quota(tmp_path: Path) -> None:
    cpu_quotas.make_groups(CgroupHierarchy(version=2, root=tmp_path), "one", {"a": (4_000, 1_000)})
    group = tmp_path / "rw-one"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "rw-a:1" / "cpu.max").read_text() == "1000 40000"


def test_members_are_those_of_all_groups_of_the_lab(tmp_path: Path) -> None:
    hierarchy = CgroupHierarchy(version=1, root=tmp_path)
    cpu_quotas.make_groups(hierarchy, "one", {"a": (4_000,), "b": (4_000,)})
    (hierarchy.device_folder("one", "a", 0) / "cgroup.procs").write_text("3\n5\n")
    (hierarchy.device_folder("one", "b", 0) / "cgroup.procs").write_text("8\n")
    assert cpu_quotas.group_pids(hierarchy, "one") == {3, 5, 8}
    assert cpu_quotas.group_pids(hierarchy, "two") == set()


def test_a_kernel_that_refuses_is_told_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    expected = r"CPU quotas by cgroup v1: 'Not a directory', expected control groups .* --quotas never\. \[.*/rw-one\]"
    with pytest.raises(LabError, match=expected):
        cpu_quotas.make_groups(CgroupHierarchy(version=1, root=tmp_path / "file"), "one", {"a": (4_000,)})


def test_a_group_that_does_not_empty_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_quotas, "EMPTY_TIMEOUT_S", 0)
    (tmp_path / "rw-one" / "rw-a:0" / "kept").mkdir(parents=True)
    with pytest.raises(LabError, match=r"control group .*/rw-one: still in use, expected it to be empty\. See its cgr"):
        cpu_quotas.remove_groups(CgroupHierarchy(version=1, root=tmp_path), "one")


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    cpu_quotas.remove_groups(CgroupHierarchy(version=1, root=tmp_path), "one")


def delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, own: str, writable: list[str]
) -> Path | None:
    """The group that a user may make groups in, whose own group is `own` and who may write to those in `writable`."""
    process = tmp_path / "self"
    process.mkdir()
    (process / "cgroup").write_text(f"0::/{own}\n" if version == 2 else f"4:cpu:/{own}\n")
    allowed = {str(tmp_path / each) for each in writable}
    files = ("cgroup.procs", "cgroup.subtree_control")
    may = allowed | {f"{each}/{file}" for each in allowed for file in files}
    monkeypatch.setattr(cgroups.os, "access", lambda path, mode: str(path) in may)
    return cgroups.find_delegated_group(CgroupMount(version=version, point=tmp_path, root="/"), process)


def test_a_users_group_of_version_1_is_the_highest_that_is_the_users(tmp_path: Path, monkeypatch) -> None:
    found = delegated(tmp_path, monkeypatch, 1, "theirs/mine/below", ["theirs/mine", "theirs/mine/below"])
    assert found == tmp_path / "theirs" / "mine"


@pytest.mark.parametrize(
    ("controllers", "children", "processes", "is_usable"),
    [
        ("cpu memory", "", "", True),
        ("cpu memory", "cpu", "12", True),
        ("cpu memory", "memory", "12", False),
        ("memory", "", "", False),
    ],
)
def test_a_users_group_of_version_2_has_to_give_the_controller_on(
    tmp_path: Path, monkeypatch, controllers: str, children: str, processes: str, is_usable: bool
) -> None:
    group = tmp_path / "mine"
    group.mkdir()
    for name, text in (
        ("cgroup.controllers", controllers),
        ("cgroup.subtree_control", children),
        ("cgroup.procs", processes),
    ):
        (group / name).write_text(text)
    assert (delegated(tmp_path, monkeypatch, 2, "mine/scope", ["mine"]) == group) is is_usable


def test_a_user_without_a_group_has_a_duty_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "PROC_SELF", tmp_path)
    (tmp_path / "mountinfo").write_text(V1)
    (tmp_path / "cgroup").write_text("4:cpu:/\n")
    monkeypatch.setattr(cgroups.os, "access", lambda path, mode: False)
    assert cpu_quotas.find_hierarchy() is not None
    monkeypatch.setattr(cpu_quotas, "_UID_MAP", tmp_path / "uid_map")
    (tmp_path / "uid_map").write_text("         0       1000          1\n")
    assert cpu_quotas.has_duty_cycle()
    assert cpu_quotas.find_hierarchy() is None
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    assert cpu_quotas.has_duty_cycle() is (os.geteuid() != 0)
