from pathlib import Path

import pytest

from ringweave.errors import LabError
from ringweave.lab import cpu_quotas
from ringweave.lab.cpu_quotas import CgroupHierarchy

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
