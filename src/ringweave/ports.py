"""Range of ports that the listeners of a run stay in, for firewalls (`--ports`, RINGWEAVE_PORTS)."""

import errno
import random
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ringweave import relayed_address
from ringweave.errors import LaunchError, UsageError

KERNEL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Range from which the kernel takes ports that nobody has chosen, in a network namespace."""
LISTENERS_PER_WORKER = 2
"""Listeners of a worker for one process group: one for each of its channels, at one address."""
ENCRYPTED_LISTENERS_PER_WORKER = 1
"""Further listener of a worker whose run encrypts: it leads to Gloo's, which is on loopback."""
LISTENERS_PER_MEMBER = 3
"""Further listeners of a worker of an elastic run: its state, and the stores of this generation and the next."""
_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_LOWEST, _HIGHEST = 1024, 65_535


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"

    def __contains__(self, port: int) -> bool:
        return self.low <= port <= self.high

    def __len__(self) -> int:
        return self.high - self.low + 1

    def shuffled(self, rng: random.Random, *, begins_low: bool) -> list[int]:
        """Return all ports in random order, those of one half first.

        Ports that are announced before somebody listens come from the lower half, all others from the upper one, so
        that a listener does not take an announced port.
        """
        middle = self.low + len(self) // 2
        halves = [list(range(self.low, middle)), list(range(middle, self.high + 1))]
        for half in halves:
            rng.shuffle(half)
        low, high = halves
        return low + high if begins_low else high + low


def parse_ports(text: str, *, where: str) -> PortRange:
    """Parse `29500-29599`.

    Raises:
        UsageError: It is no range of ports that a user may take.
    """
    matched = _RANGE.fullmatch(text.strip())
    found = PortRange(int(matched[1]), int(matched[2])) if matched else None
    if found is None or not _LOWEST <= found.low <= found.high <= _HIGHEST:
        do = "Write the first and the last port: 29500-29599"
        expected = f"FIRST-LAST, from {_LOWEST} to {_HIGHEST}"
        raise UsageError("ports", got=text, expected=expected, do=do, where=where)
    return found


def needed_ports(num_workers: int, *, is_elastic: bool, num_services: int) -> int:
    """Return the number of ports that a run takes on one machine with one process group and one address.

    Args:
        num_workers: Workers on the machine, with those that may come later.
        is_elastic: Members hand their state over, and form a new group in each generation.
        num_services: Other processes that listen there, with the store of the process group.
    """
    return num_workers * (LISTENERS_PER_WORKER + (LISTENERS_PER_MEMBER if is_elastic else 0)) + num_services


def check_size(ports: PortRange, needed: int, machine: str) -> None:
    """Refuse a range that is too small for a machine.

    Raises:
        UsageError: It has fewer ports than needed.
    """
    if len(ports) < needed:
        do = f"Give a wider range, such as {ports.low}-{min(_HIGHEST, ports.low + needed + 20)}"
        expected = f"at least {needed} for {machine}, and {LISTENERS_PER_WORKER} more a worker for each further group"
        raise UsageError("--ports", got=f"{ports}, {len(ports)} ports", expected=expected, do=do)


def create_server(address: str, ports: PortRange | None, *, backlog: int) -> socket.socket:
    """Listen at an address, on any free port or on one of the range.

    At the address of a host that others reach by relays, any port serves: no firewall is in between. It is known to
    the relays when this returns.

    Raises:
        LaunchError: All ports of the range are taken, or the relay of this host does not answer.
        OSError: The address is not available.
    """
    if relayed_address.is_relayed(address):
        return relayed_address.create_server(address, backlog=backlog)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if ports is None:
        return socket.create_server((address, 0), family=family, backlog=backlog)
    for port in ports.shuffled(random.SystemRandom(), begins_low=False):
        try:
            return socket.create_server((address, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise all_taken_error(ports, address)


def listen_on_all(port: int, *, backlog: int) -> socket.socket:
    """Listen on a port at all addresses of this machine, IPv4 and IPv6; at those of IPv4 where the kernel has no other.

    Raises:
        OSError: The port is taken.
    """
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=backlog)
    return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)


def defer_accept(listener: socket.socket) -> socket.socket:
    """Let the kernel hand over connections only once their other end has said something; return the listener.

    It is for torch's stores, whose clients speak first. Without it a store keeps the descriptors of connections that
    were reset before it took them (torch 2.13), and of all that are idle.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S)
    return listener


_DEFER_S = 60


def all_taken_error(ports: PortRange, address: str) -> LaunchError:
    """Return the error of a range without a free port."""
    do = "Give a wider range with --ports, or end what listens there: ss -ltn"
    what = f"ports {ports} at {address}"
    return LaunchError(what, got="all taken", expected="a free one", do=do, where="RINGWEAVE_PORTS")


def kernel_ports() -> PortRange:
    """Return the kernel's own range; its default where it cannot be read."""
    try:
        low, high = KERNEL_RANGE.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return PortRange(32_768, 60_999)
    return PortRange(int(low), int(high))


def outside_text(ports: PortRange, kernel: Collection[PortRange]) -> str:
    """Return the notice about listeners that stay outside of the range; empty if the kernel's ranges lie in it."""
    outside = next((each for each in kernel if each.low not in ports or each.high not in ports), None)
    if outside is None:
        return ""
    return (
        f"listeners of Gloo and NCCL stay outside of {ports}: torch lets the kernel choose their ports, from {outside} "
        "(net.ipv4.ip_local_port_range)"
    )
