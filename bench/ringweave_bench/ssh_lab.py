"""A lab whose nodes run Debian's sshd, each with a user, home, host key and processes of its own.

Nodes share no folder in which they could write. The network is a lab of `ringweave.lab`; the nodes see this machine's
root file system read-only, so this Python is at the same path in all of them.

```python
with ssh_lab(num_nodes=3) as lab:
    lab.nodes[0].run(["ssh", "n1", "hostname"]).stdout.strip()  # n1
```
"""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ringweave import lab, topology
from ringweave.errors import explain
from ringweave.lab import Lab, lab_layout, tools
from ringweave_bench.ssh_node import NodeDisks, SshNode

PACKAGES = {"sshd": "openssh-server", "ssh": "openssh-client", "nft": "nftables", "setpriv": "util-linux"}
"""Program -> Debian package that contains it, beside those of a lab."""
_NAME = re.compile(r"ssh-(\d+)-\w+")
_TAKE_DOWN = 'cat > /dev/null; exec "$1" -m ringweave lab down --lab "$2" > /dev/null 2>&1'
_FORWARD_SCRIPT = """set -e
echo 1 > /proc/sys/net/ipv4/ip_forward
for name in all default eth0; do echo 0 > /proc/sys/net/ipv4/conf/$name/send_redirects; done
"""
_ROUTE_SCRIPT = """set -e
ip route add "$1/32" dev eth0 src "$2"
ip route replace "$3" via "$1" dev eth0 src "$2"
"""


def problems() -> list[str]:
    """Return the reasons why this machine cannot host an SSH lab, each with its fix; empty if it can."""
    absent = [name for name in PACKAGES if tools.find_program(name) is None]
    packages = " ".join(sorted({PACKAGES[name] for name in absent}))
    text = explain(
        "programs", got=f"{', '.join(absent)} not found", expected=", ".join(PACKAGES), do=f"apt install {packages}"
    )
    return [*lab.lab_problems(), *([text] if absent else [])]


class SshLab:
    """An SSH lab that is up: its nodes, and faults of the network between them."""

    def __init__(self, network: Lab) -> None:
        self.network = network
        self.nodes = [SshNode(network, index) for index in range(network.cluster.num_nodes)]

    def begin(self, disks: NodeDisks) -> None:
        """Start all nodes, and wait until their sshds listen."""
        for node in self.nodes:
            node.begin_start(disks)
        keys = "".join(node.user_key.public_text for node in self.nodes)
        hosts = "".join(f"{node.name},{node.address} {node.host_key.public_text}" for node in self.nodes)
        for node in self.nodes:
            node.finish_start(hosts, keys)
        for node in self.nodes:
            node.wait_sshd()

    def end(self) -> None:
        """Kill everything in all nodes."""
        for node in self.nodes:
            node.kill_init()

    def node(self, name: str) -> SshNode:
        """Return the node of that name."""
        return self.nodes[self.network.cluster.nodes.index(self.network.cluster.node(name))]

    def cut(self, name: str, direction: str = "both") -> None:
        """Cut a node off silently, see `ringweave.lab.Lab.cut`."""
        self.network.cut(name, direction)

    def mend(self, name: str) -> None:
        """Reconnect a node."""
        self.network.reconnect(name)

    def block_port(self, source: str, destination: str, port: int) -> None:
        """Drop TCP packets from one node to a port of another, silently; the other direction stays open."""
        address, target = self.node(source).address, self.node(destination)
        target.nft(
            "add table ip lab_block",
            "add chain ip lab_block input { type filter hook input priority 0; }",
            f"add rule ip lab_block input ip saddr {address} tcp dport {port} drop",
        )

    def unblock_ports(self, destination: str) -> None:
        """Open all ports of a node that `block_port` has blocked."""
        self.node(destination).nft("add table ip lab_block", "delete table ip lab_block")

    def put_behind(self, inner: str, gateway: str) -> None:
        """Put a node behind another one's address translation for good: only connections that it opens work."""
        outer, node = self.node(gateway), self.node(inner)
        outer.run(["sh", "-c", _FORWARD_SCRIPT], user="root")
        outer.nft(
            "add table ip lab_nat",
            "add chain ip lab_nat postrouting { type nat hook postrouting priority srcnat; }",
            f"add rule ip lab_nat postrouting ip saddr {node.address} masquerade",
        )
        networks = [network for network, _ in lab_layout.address_networks(self.network.addresses)]
        for network in networks:
            node.run(["sh", "-c", _ROUTE_SCRIPT, "lab-route", outer.address, node.address, network], user="root")
        node.nft(
            "table ip lab_nat { chain input { type filter hook input priority 0; policy drop;",
            'iifname "lo" accept; ct state established,related accept; meta l4proto icmp accept; }',
            "}",
        )


@contextmanager
def ssh_lab(
    num_nodes: int = 2,
    *,
    rate: str = "1Gbit/s",
    cluster_text: str = "",
    home_bytes: int = 2**28,
    tmp_bytes: int = 2**28,
) -> Iterator[SshLab]:
    """Bring an SSH lab up; afterwards it is gone with all its processes and files, also if this process is killed.

    Use it and its nodes in one thread: the processes of a node die with the thread that has started them.

    Args:
        num_nodes: Nodes n0, n1, ... on one switch, unless `cluster_text` is given.
        rate: Rate of their NICs.
        cluster_text: A cluster file instead.
        home_bytes: Size of the file system of /home, in memory.
        tmp_bytes: Size of each of /tmp, /var/tmp and /dev/shm, in memory.

    Raises:
        UsageError: The cluster cannot be a lab.
        LabError: This machine does not support it.
    """
    tools.raise_lab_problems(problems())
    _remove_orphans()
    name = f"ssh-{os.getpid()}-{secrets.token_hex(3)}"
    cluster = topology.loads(cluster_text or _star_text(num_nodes, rate))
    with ExitStack() as stack:
        stack.enter_context(_taken_down_at_death(name))
        network = lab.up(cluster, name)
        stack.callback(lab.down, name)
        found = SshLab(network)
        stack.callback(found.end)
        found.begin(NodeDisks(home_bytes=home_bytes, tmp_bytes=tmp_bytes))
        yield found


def _star_text(num_nodes: int, rate: str) -> str:
    nodes = "".join(f"  - {{name: n{index}, nic: {rate}, devices: 1}}\n" for index in range(num_nodes))
    return f"name: ssh\nnodes:\n{nodes}"


@contextmanager
def _taken_down_at_death(name: str) -> Iterator[None]:
    """Take the lab down even if this process is killed: a shell waits for the end of a pipe that it holds."""
    command = ["/bin/sh", "-c", _TAKE_DOWN, "lab-end", sys.executable, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/") as shell:
        try:
            yield
        finally:
            shell.kill()


def _remove_orphans() -> None:
    """Take down labs of processes that are gone; their shells may have been killed with them."""
    for name in lab.names():
        owner = _NAME.fullmatch(name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            lab.down(name)
