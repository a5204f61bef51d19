"""Range of ports of a run on hosts: its services, workers and announced ports stay in it."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave import ports
from ringweave.ports import PortRange
from tests.fakes.ssh_program import SshHosts

_SCRIPT = """
import psutil, torch, torch.distributed as dist
dist.init_process_group("ringweave")
dist.all_reduce(torch.ones(1 << 18))
own = {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}
services = [p for p in psutil.process_iter(["cmdline"]) if HOSTS in str(p.info["cmdline"])]
mine = [p for p in services if "ringweave.platforms.hosts.service" in p.info["cmdline"]]
service = {each.laddr.port for p in mine for each in p.net_connections("tcp") if each.status == "LISTEN"}
print("PORTS", *sorted(own))
print("SERVICE", *sorted(service))
dist.barrier()
dist.destroy_process_group()
"""


def free_range(count: int) -> PortRange:
    """Return a range of so many ports below the kernel's, on which nothing listens now."""
    for low in random.Random().sample(range(12_000, 30_000, count), 100):
        try:
            for port in range(low, low + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return PortRange(low, low + count - 1)
    raise AssertionError("no free range")


@pytest.mark.slow
@pytest.mark.distributed
def test_listeners_of_a_run_on_hosts_stay_in_the_range(tmp_path: Path) -> None:
    hosts, within, script = SshHosts(tmp_path), free_range(40), tmp_path / "job/train.py"
    for name in ("a", "b"):
        hosts.add(name)
    script.parent.mkdir()
    script.write_text(f"HOSTS = {str(tmp_path)!r}\n{_SCRIPT}", encoding="utf-8")
    environ = {"PATH": hosts.path, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "ringweave", "run", "--hosts", "a,b", "--ports", str(within), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    own = [line.partition("PORTS ")[2].split() for line in done.stdout.splitlines() if "PORTS " in line]
    found = sorted(sum(int(port) in within for port in line) for line in own)
    each = ports.LISTENERS_PER_WORKER + ports.ENCRYPTED_LISTENERS_PER_WORKER
    assert found == [each, each + 1], own  # one has the store too
    assert all(int(port) in within or int(port) in ports.kernel_ports() for line in own for port in line), own
    services = [line.partition("SERVICE ")[2].split() for line in done.stdout.splitlines() if "SERVICE " in line]
    assert all(len(line) == 2 and all(int(port) in within for port in line) for line in services), services
    assert f"listeners of Gloo and NCCL stay outside of {within}" in done.stderr
