import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import ports
from ringweave.cli.main import main
from ringweave.errors import LaunchError, UsageError
from ringweave.launcher import node_context
from ringweave.launcher.node_context import HostContext
from ringweave.ports import PortRange, parse_ports
from tests.launcher import small_training
from tests.launcher.conftest import Run


def test_ports_that_the_kernel_gives_away_are_no_candidates() -> None:
    assert node_context.non_ephemeral_ports((32_768, 60_999)) == [*range(10_000, 32_768), *range(61_000, 65_536)]
    assert node_context.non_ephemeral_ports((1024, 65_535)) == []


def test_a_free_port_can_be_listened_on() -> None:
    port = node_context.free_port(random.Random())
    assert port not in ports.kernel_ports()
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(node_context, "non_ephemeral_ports", lambda _: [taken.getsockname()[1]])
        with pytest.raises(LaunchError, match=r"no free port between 10000 and 65535\. End listening programs\."):
            node_context.free_port(random.Random())


def test_where_the_kernel_does_not_say_its_default_is_assumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "KERNEL_RANGE", tmp_path / "absent")
    assert not 32_768 <= node_context.free_port(random.Random()) <= 60_999


def free_range(count: int) -> PortRange:
    """Return a range of so many ports on which nothing listens now."""
    rng = random.Random()
    while True:
        low = rng.randrange(12_000, 30_000)
        if all(node_context._is_port_free(port) for port in range(low, low + count)):
            return PortRange(low, low + count - 1)


@pytest.mark.parametrize("text", ["29500", "29599-29500", "80-90", "29500-70000", "a-b", "1-2-3", ""])
def test_what_is_no_range_of_ports_is_refused(text: str) -> None:
    match = rf"^ports: '{text}', expected FIRST-LAST, from 1024 to 65535\. Write .* 29500-29599\. \[--ports\]$"
    with pytest.raises(UsageError, match=match):
        parse_ports(text, where="--ports")


def test_a_range_of_ports_is_printed_as_it_is_written() -> None:
    found = parse_ports("29500-29599", where="--ports")
    assert (str(found), len(found), 29_500 in found, 29_599 in found, 29_600 in found) == (
        "29500-29599",
        100,
        True,
        True,
        False,
    )


def test_a_range_that_is_too_small_says_how_many_ports_are_needed() -> None:
    needed = ports.needed_ports(4, is_elastic=True, num_services=3)
    assert needed == 23
    ports.check_size(PortRange(2000, 2022), needed, "host a")
    match = (
        r"^--ports: '2000-2021, 22 ports', expected at least 23 for host a, "
        r"and 2 more a worker for each further group\. Give a wider range, such as 2000-2043\.$"
    )
    with pytest.raises(UsageError, match=match):
        ports.check_size(PortRange(2000, 2021), needed, "host a")


def test_listeners_stay_in_the_range_and_leave_announced_ports_alone() -> None:
    within = free_range(8)
    context = HostContext(within=within)
    announced = {context.pick_address("a").port for _ in range(4)}
    assert announced == set(range(within.low, within.low + 4))
    servers = [ports.create_server("127.0.0.1", within, backlog=1) for _ in range(4)]
    try:
        assert {each.getsockname()[1] for each in servers} == set(range(within.low + 4, within.high + 1))
    finally:
        for each in servers:
            each.close()


def test_a_range_without_a_free_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        within = PortRange(port, port)
        end = r"'all taken', expected a free one\. Give a wider range with --ports, or end .* \[RINGWEAVE_PORTS\]$"
        with pytest.raises(LaunchError, match=rf"^ports {port}-{port} at 127\.0\.0\.1: {end}"):
            ports.create_server("127.0.0.1", within, backlog=1)
        with pytest.raises(LaunchError, match=rf"^ports {port}-{port} at this machine: {end}"):
            HostContext(within=within).pick_address("a")


def test_listeners_of_torch_are_inside_where_the_kernel_s_range_is() -> None:
    assert ports.outside_text(PortRange(2000, 3000), [PortRange(2000, 2500)]) == ""
    assert ports.outside_text(PortRange(2000, 3000), [PortRange(2000, 2500), PortRange(2999, 3001)]) == (
        "listeners of Gloo and NCCL stay outside of 2000-3000: torch lets the kernel choose their ports, "
        "from 2999-3001 (net.ipv4.ip_local_port_range)"
    )


_LISTEN_SCRIPT = """
import psutil, torch, torch.distributed as dist
dist.init_process_group("ringweave")
dist.all_reduce(torch.ones(1 << 18))
own = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
print("PORTS", *(each.port for each in own))
print("ADDRESSES", *{each.ip for each in own})
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
print("AGAIN")
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_listeners_of_a_run_but_for_gloo_s_stay_in_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    within, script = free_range(20), tmp_path / "listen.py"
    script.write_text(_LISTEN_SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", "--workers", "2", "--ports", str(within), str(script)])
    output, errors = capfd.readouterr()
    assert ended.value.code in (0, None), errors
    lines = [line.partition("PORTS ")[2].split() for line in output.splitlines() if "PORTS " in line]
    found = sorted(sum(int(port) in within for port in line) for line in lines)
    assert found == [ports.LISTENERS_PER_WORKER, ports.LISTENERS_PER_WORKER + 1], lines  # one has the store too
    outside = {int(port) for line in lines for port in line if int(port) not in within}
    assert outside
    assert all(port in ports.kernel_ports() for port in outside), outside
    assert f"listeners of Gloo and NCCL stay outside of {within}" in errors
    addresses = {line.partition("ADDRESSES ")[2] for line in output.splitlines() if "ADDRESSES " in line}
    assert all(each.startswith("127.") for line in addresses for each in line.split()), "torch's store too"
    assert output.count("AGAIN") == 2, "a second store at the same address"


_LISTENERS_SCRIPT = (
    small_training.prepared()
    + small_training.epoch()
    + """
import psutil
deadline, found = time.monotonic() + 20, []
while os.environ["RANK"] == "0" and len({pid for pid, _ in found}) < MIN_PROCESSES and time.monotonic() < deadline:
    processes = [psutil.Process().parent(), *psutil.Process().parent().children(recursive=True)]
    sockets = [(each.pid, end) for each in processes for end in each.net_connections("tcp")]
    found = [(pid, end.laddr.ip) for pid, end in sockets if end.status == "LISTEN"]
for pid, address in found:
    print("LISTENS", pid, address, flush=True)
"""
    + small_training.epoch()
)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "min_processes"),
    [
        pytest.param([], 2, marks=pytest.mark.thorough),
        pytest.param(["--elastic", "1:2"], 4, marks=pytest.mark.thorough),
        (["--mode", "ps-hra", "--standby"], 4),
    ],
    ids=["plain", "elastic", "rings"],
)
def test_no_process_of_a_run_on_one_machine_listens_beyond_loopback(
    start: Callable[..., Run], tmp_path: Path, options: list[str], min_processes: int
) -> None:
    script = tmp_path / "listen.py"
    script.write_text(_LISTENERS_SCRIPT.replace("MIN_PROCESSES", str(min_processes)), encoding="utf-8")
    run = start("--workers", "2", *options, script)
    assert run.wait_ended() == 0, run.stderr
    found = [line.split()[-2:] for line in run.stdout.splitlines() if "LISTENS" in line]
    assert len({pid for pid, _ in found}) >= min_processes, "workers, coordinators or servers"
    assert all(address.startswith("127.") for _, address in found), found


def test_a_range_that_is_too_small_for_a_run_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--workers", "4", "--ports", "29500-29507", __file__])
    assert "'29500-29507, 8 ports', expected at least 9 for this machine" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["run", "--hosts", "a:2,b:4", "--ports", "29500-29508", __file__])
    assert "'29500-29508, 9 ports', expected at least 14 for host b" in capfd.readouterr().err
