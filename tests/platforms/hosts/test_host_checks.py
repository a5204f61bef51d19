"""Check of hosts before a run: their facts side by side, and what stops a run."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringweave import environment, lab, telemetry
from ringweave.cli.main import ringweave_group
from ringweave.platforms.hosts import host_checks, host_list, ssh, start
from ringweave.platforms.hosts.host_checks import HostCheck, HostsReport, LinkCheck
from ringweave.platforms.hosts.host_list import HostSpec
from ringweave.topology import cgroups
from tests import demands
from tests.fakes.ssh_program import SshHosts, use_ssh_hosts
from tests.platforms.hosts.conftest import make_hosts_in_namespace

FACTS = {
    "user": "kim",
    "address": "10.0.0.1",
    "python": "3.11.7",
    "ringweave": "0.1.0",
    "torch": "2.13.0",
    "cpus": 8,
    "gpus": 1,
    "memory": 64 * 2**30,
    "memory_limit": None,
    "nics": {"eth0": {"bytes_per_s": 1.25e9, "addresses": ["10.0.0.1"]}, "wifi": {"bytes_per_s": 1.0, "addresses": []}},
    "open_files": 1024,
    "free_disk": 2**40,
}

CLUSTER = """
name: pair
nodes:
- {name: a, devices: 1, nic: 1Gbit/s}
- {name: b, devices: 1, nic: 1Gbit/s}
"""


@pytest.fixture
def ssh_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SshHosts:
    return use_ssh_hosts(tmp_path, monkeypatch)


def check_of(node: str, **changes: object) -> HostCheck:
    host = HostSpec(node=node, destination=node, workers=2)
    return HostCheck(host=host, facts={**FACTS, **changes}, clock_offset_s=0.25, round_trip_s=0.012, is_reachable=True)


def test_what_differs_from_most_hosts_is_marked() -> None:
    odd = check_of("c", torch=None, nics={"ib0": {"bytes_per_s": None, "addresses": ["10.0.0.3"]}}, free_disk=2**41)
    links = LinkCheck(age_s=10.0, rates={"a": (1.25e8, 1.25e8), "b": (1.25e8, 1e8), "c": (1.25e8, 1.25e8)})
    text = host_checks.report_text(HostsReport(checks=(check_of("a"), check_of("b"), odd), problems=(), links=links))
    lines = {line[:14].strip(): line[14:].split("  ") for line in text.splitlines()}
    words = {label: [cell.strip() for cell in cells if cell.strip()] for label, cells in lines.items()}
    assert words["torch"] == ["2.13.0", "2.13.0", "none *"]
    assert words["NICs"] == ["eth0 10Gbit/s", "eth0 10Gbit/s", "ib0 ? *"]
    assert words["clock"] == ["+0.250 s", "+0.250 s", "+0.250 s"]
    assert words["round trip"] == ["12 ms", "12 ms", "12 ms"]
    assert words["memory limit"] == ["none", "none", "none"]
    assert words["free disk"] == ["1024.0 GiB", "1024.0 GiB", "2048.0 GiB"]
    assert words["measured"] == ["1Gbit/s out", "1Gbit/s out", "1Gbit/s out"]
    assert re.search(r"\n +1Gbit/s in +800Mbit/s in +1Gbit/s in\n +10 s ago, for 23 h more +10 s ago", text)
    assert text.endswith("\n\n* differs from most of these hosts\n\nA run on these hosts works.\n")


def test_hosts_that_do_not_fit_beside_others_come_below() -> None:
    checks = tuple(check_of(f"a-host-with-a-name-{index}") for index in range(8))
    links = LinkCheck(reason="a reason that is told " + "at length " * 20)
    text = host_checks.report_text(HostsReport(checks=checks, problems=("x: 1, expected 2. Do it.",), links=links))
    assert max(map(len, text.splitlines())) <= host_checks.TABLE_WIDTH
    assert text.count("\nringweave ") == 3
    assert all(f"a-host-with-a-name-{index}:2" in text for index in range(8))
    assert "\nmeasured      no: a reason that is told at length" in text
    assert text.endswith("at length\n\n1 thing to fix:\nx: 1, expected 2. Do it.\n")


def test_the_fastest_reading_gives_clock_offset_and_round_trip() -> None:
    own = iter([0.0, 4.0, 10.0, 10.2, 20.0, 23.0])
    theirs = iter([1.0, 15.1, 99.0])
    reading = ssh.read_clock(lambda: next(theirs), lambda: next(own))
    assert reading == pytest.approx((0.2, 5.0))


@pytest.mark.slow
def test_two_hosts_are_checked_from_the_command_line(ssh_hosts: SshHosts) -> None:
    for name in ("a", "b"):
        ssh_hosts.add(name)
    done = CliRunner().invoke(ringweave_group, ["doctor", "--hosts", "a,b:3", "--json"], standalone_mode=False)
    assert done.exception is None, done.output
    document = json.loads(done.output)
    assert (done.return_value, document["fit"], document["problems"]) == (0, True, [])
    first, second = document["hosts"]
    assert (first["node"], second["node"], second["workers"]) == ("a", "b", 3)
    assert abs(first["clock_offset_s"]) < 5.0
    assert first["memory"] > first["free_memory"] > 0
    assert set(FACTS) <= set(first)
    assert document["links"] == {"measured": False, "reason": "two of these hosts have the same address"}
    assert re.search(r"/hosts/a/\.local/state/ringweave/hosts-[^/]+$", first["state_folder"])


@pytest.mark.slow
def test_a_host_without_ringweave_and_one_that_is_unknown_stop_a_run(
    ssh_hosts: SshHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh_hosts.add("a")
    arguments = ["--hosts", "a,gone", "--python", "/nowhere"]
    done = CliRunner().invoke(ringweave_group, ["doctor", *arguments], standalone_mode=False)
    assert (done.return_value, done.exception) == (1, None)
    lines = done.output.splitlines()
    assert next(line for line in lines if line.startswith("ssh")).split() == ["ssh", "ok", "no"]
    assert next(line for line in lines if line.startswith("torch")).split() == ["torch", "?", "?"]
    assert "measured      no: no ringweave on a; add --install" in lines
    assert lines[-3] == "2 things to fix:"
    assert lines[-2].startswith("host a: 'no ringweave at /nowhere'")
    assert "or add --install" in lines[-2]
    assert lines[-1].startswith("host gone: 'a name that cannot be resolved'")

    monkeypatch.setattr(start, "MIN_FREE_DISK_BYTES", 2**60)
    done = CliRunner().invoke(ringweave_group, ["doctor", "--hosts", "a"], standalone_mode=False)
    assert done.return_value == 1
    last = done.output.splitlines()[-1]
    assert last.startswith("free disk of host a: '")
    assert "Free space for /" in last


REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("ringweave")
dist.all_reduce(torch.ones(1_000_000))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.thorough  # daily in labs: launcher/test_lab_runs.py measures, test_training_in_lab.py trains by it
def test_the_first_run_after_the_check_finds_the_links_measured(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    demands.need(request.config, demands.LAB, lab.lab_problems())
    addresses = {"a": "10.7.0.1", "b": "10.7.0.2", "c": "10.7.0.3"}
    networks = [f"{address}/32" for address in addresses.values()]
    for hosts in make_hosts_in_namespace(tmp_path, addresses, networks):
        folder = hosts.write_script(REDUCE)
        told = hosts.run("doctor", "--hosts", "a,b,c", "--json")
        assert told.returncode == 0, told.stdout + told.stderr
        links = json.loads(told.stdout)["links"]
        assert links["measured"], links
        assert links["age_s"] + links["expires_in_s"] == pytest.approx(24 * 3600)
        assert all(rates["kind"] == "measured" for rates in links["rates"].values())
        assert [name for name, rates in links["rates"].items() if rates["out_bytes_per_s"] > 0] == ["a", "b", "c"]
        done = hosts.run("run", "--hosts", "a:2,b,c", "--run-dir", "out", "train.py")
        assert done.returncode == 0, done.stderr
        assert "measuring the network" not in done.stdout + done.stderr
        events = [event for path in folder.rglob("events.jsonl") for event in telemetry.read_events(path)]
        found = [event for event in events if event["kind"] == "network_measured"]
        assert [event["rates"]["a->core"] for event in found] == [links["rates"]["a"]["out_bytes_per_s"]]
        assert found[0]["age_s"] > 0


def test_the_reason_for_no_measured_links_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts.yaml"
    file.write_text(CLUSTER, encoding="utf-8")

    def reason(hosts: str, *problems: str) -> str:
        return host_checks.find_reason_for_no_rates(host_list.parse_hosts(hosts), [], problems)

    assert reason("a,b") == ""
    assert reason("a,b", "x") == "a run on these hosts does not work yet"
    assert reason("a:2") == "one host has none"
    assert reason("a,b,join") == "a run measures them once the hosts called join have joined"
    assert reason(str(file)) == "a run takes the rates of the cluster file"
    monkeypatch.setenv(environment.PROBE, "never")
    assert reason("a,b") == "RINGWEAVE_PROBE=never"


def test_options_of_hosts_need_hosts() -> None:
    done = CliRunner().invoke(ringweave_group, ["doctor", "--install"], standalone_mode=False)
    assert str(done.exception) == "--install: 'no --hosts', expected hosts to check. Add --hosts, or leave it out."


@pytest.mark.parametrize(
    ("line", "group", "files", "limit"),
    [
        ("cgroup2 cg rw", "0::/a/b", {"a/memory.max": "4096", "a/b/memory.max": "max"}, 4096),
        ("cgroup2 cg rw", "0::/a", {"a/memory.max": "max"}, None),
        ("cgroup cg rw,memory", "3:memory:/a", {"a/memory.limit_in_bytes": "512"}, 512),
        ("cgroup cg rw,memory", "3:memory:/a", {"a/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("ext4 disk rw", "0::/a", {}, None),
    ],
)
def test_the_smallest_memory_limit_counts(
    tmp_path: Path, line: str, group: str, files: dict[str, str], limit: int | None
) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "self"
    for path, text in {**files, "cgroup.controllers": "cpu memory"}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    process.mkdir()
    (process / "mountinfo").write_text(f"30 20 0:1 / {root} rw - {line}\n", encoding="utf-8")
    (process / "cgroup").write_text(f"{group}\n", encoding="utf-8")
    assert cgroups.memory_limit_bytes(process) == limit
