"""The CPU quota of a process, from files as the kernel writes them."""

from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.topology.cgroups import CpuQuota, ProcessCpuQuota, ProcessMemory, cores_per_process


class Kernel:
    """Files of a process and of its control groups."""

    def __init__(self, folder: Path, version: int, *, group: str, inside: str = "/") -> None:
        self.process, self.point = folder / "self", folder / "cgroup"
        self.process.mkdir()
        self.point.mkdir()
        kind, options = ("cgroup", "rw,cpu") if version == 1 else ("cgroup2", "rw")
        (self.process / "mountinfo").write_text(f"33 31 0:30 {inside} {self.point} rw - {kind} cgroup {options}\n")
        (self.process / "cgroup").write_text(
            "5:memory:/other\n" + (f"3:cpu:{group}" if version == 1 else f"0::{group}")
        )
        if version == 2:
            (self.point / "cgroup.controllers").write_text("cpuset cpu\n")

    def group(self, below: str, **files: str) -> None:
        folder = self.point / below
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")


STAT = "nr_periods 9\nnr_throttled 4\nthrottled_time 12000000"
STAT_2 = "usage_usec 5\nnr_periods 9\nnr_throttled 4\nthrottled_usec 3000"
THROTTLED, THROTTLED_2 = pytest.approx(0.012), pytest.approx(0.003)


def test_version_1(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 1, group="/lab/n0")
    kernel.group("lab/n0", cpu__cfs_quota_us="7000", cpu__cfs_period_us="40000", cpu__stat=STAT)
    quota = ProcessCpuQuota(kernel.process)
    assert quota.read() == CpuQuota(
        cores=pytest.approx(0.175), period_s=pytest.approx(0.04), num_throttled=4, throttled_s=THROTTLED
    )
    kernel.group("lab/n0", cpu__cfs_quota_us="2000")
    assert quota.read() == CpuQuota(
        cores=pytest.approx(0.05), period_s=pytest.approx(0.04), num_throttled=4, throttled_s=THROTTLED
    ), "as it is now"
    kernel.group("lab/n0", cpu__cfs_quota_us="-1")
    assert quota.read() is None


def test_the_least_of_a_group_and_those_above_it_binds(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, group="/pods/one")
    kernel.group("", cpu__stat=STAT_2)
    kernel.group("pods", cpu__max="150000 100000", cpu__stat=STAT_2)
    kernel.group("pods/one", cpu__max="max 100000", cpu__stat="usage_usec 5")
    quota = ProcessCpuQuota(kernel.process)
    assert quota.read() == CpuQuota(
        cores=pytest.approx(1.5), period_s=pytest.approx(0.1), num_throttled=4, throttled_s=THROTTLED_2
    )
    kernel.group("pods/one", cpu__max="50000 100000")
    assert quota.read() == CpuQuota(cores=pytest.approx(0.5), period_s=pytest.approx(0.1), num_throttled=0)


@pytest.mark.parametrize("inside", ["/docker/1f", "/elsewhere"])
def test_in_a_container_the_mount_point_is_its_group(tmp_path: Path, inside: str) -> None:
    """Without a namespace of its own the process is told where its group is on the host; with one that is not below."""
    kernel = Kernel(tmp_path, 2, group="/docker/1f", inside=inside)
    kernel.group("", cpu__max="25000 100000", cpu__stat=STAT_2)
    assert ProcessCpuQuota(kernel.process).read() == CpuQuota(
        cores=pytest.approx(0.25), period_s=pytest.approx(0.1), num_throttled=4, throttled_s=THROTTLED_2
    )


def test_no_quota_where_nobody_says(tmp_path: Path) -> None:
    assert ProcessCpuQuota(tmp_path).read() is None
    kernel = Kernel(tmp_path, 1, group="/gone")
    assert ProcessCpuQuota(kernel.process).read() is None
    (kernel.process / "cgroup").write_text("5:memory:/other\n")
    assert ProcessCpuQuota(kernel.process).read() is None


def test_who_shares_a_quota_with_the_parent_shares_it_with_its_siblings(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, group="/pods/one")
    kernel.group("pods/one", cpu__max="300000 100000", cpu__stat=STAT)
    (kernel.process / "stat").write_text("12 (a b) c) S 77 1 1 0\n")
    parent = tmp_path / "77"
    parent.mkdir()
    (parent / "cgroup").write_text((kernel.process / "cgroup").read_text())
    assert cores_per_process(4, kernel.process) == pytest.approx(0.75)
    (parent / "cgroup").write_text("0::/pods\n")
    assert cores_per_process(4, kernel.process) == pytest.approx(3.0), "a group of its own, as in a lab"
    kernel.group("pods/one", cpu__max="max 100000")
    assert cores_per_process(4, kernel.process) is None


def test_a_lab_may_tell_a_quota_that_no_control_group_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGWEAVE_CPU_QUOTA", "0.07")
    assert cores_per_process(4, tmp_path) == pytest.approx(0.07)
    for wrong in ("none", "0", "inf", "nan"):
        monkeypatch.setenv("RINGWEAVE_CPU_QUOTA", wrong)
        with pytest.raises(UsageError, match=rf"RINGWEAVE_CPU_QUOTA: .*'{wrong}'.*, expected a positive number"):
            cores_per_process(4, tmp_path)


def test_this_process_can_ask() -> None:
    quota = ProcessCpuQuota().read()
    assert quota is None or quota.cores > 0


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_process_is_its_groups_without_that_of_others(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version, group="/pods/one")
    mounts = (kernel.process / "mountinfo").read_text().replace("rw,cpu", "rw,memory")
    (kernel.process / "mountinfo").write_text(mounts)
    (kernel.process / "cgroup").write_text("4:memory:/pods/one\n" if version == 1 else "0::/pods/one\n")
    mib = 2**20
    files = {
        1: {"memory__limit_in_bytes": f"{900 * mib}", "memory__oom_control": "under_oom 0\noom_kill 2"},
        2: {"memory__max": f"{900 * mib}", "memory__events": "oom 5\noom_kill 2"},
    }
    in_group = {1: f"rss 7\ntotal_rss {500 * mib}", 2: f"anon {500 * mib}\nfile 9"}
    kernel.group("pods/one", **files[version], memory__stat=in_group[version])
    if version == 2:
        (kernel.point / "cgroup.controllers").write_text("cpu memory\n")
    status = "VmHWM:\t  409600 kB\nRssAnon:\t  307200 kB\nRssFile:\t  102400 kB\n"
    (kernel.process / "status").write_text(status)
    (kernel.process / "stat").write_text("12 (a) S 77 1 1 0\n")
    parent = tmp_path / "77"
    parent.mkdir()
    memory = ProcessMemory(4, kernel.process)
    assert memory.limit_bytes() == 700 * mib, "200 MiB are others'"
    assert memory.peak_bytes() == 300 * mib
    assert memory.num_oom_kills() == 2
    memory.reset_peak()
    assert (kernel.process / "clear_refs").read_text() == "5"
    (parent / "cgroup").write_text((kernel.process / "cgroup").read_text())
    assert ProcessMemory(4, kernel.process).limit_bytes() == 225 * mib, "a quarter each"
    kernel.group("pods/one", **{"memory__limit_in_bytes" if version == 1 else "memory__max": "max"})
    assert ProcessMemory(4, kernel.process).limit_bytes() is None


def test_pauses_by_a_quota_that_is_lifted_since_count(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 2, group="/job")
    kernel.group("job", cpu__max="max 100000", cpu__stat="nr_throttled 3\nthrottled_usec 250000")
    quota = ProcessCpuQuota(kernel.process)
    assert (quota.read(), quota.throttled_s()) == (None, 0.25)
