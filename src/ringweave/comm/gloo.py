"""Gloo groups: how they connect, how their works are waited for, and how they end."""

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import random
import socket
import stat
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Store, Work
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ringweave import relayed_address
from ringweave.comm import peer_data
from ringweave.comm.group_info import GroupInfo, RankInfo
from ringweave.environment import ports_of_environ
from ringweave.relayed_address import is_relayed

if TYPE_CHECKING:
    from ringweave.comm.transport.tunnel import Forwarder, Tunnel

_LOOPBACK = "127.0.0.1"
_ABORT_TAG = 2**31 - 1
"""Tag that no message carries."""
_FIRST_NETWORK, _NUM_ADDRESSES = 0x7F20_0000, 2**21
"""127.32.0.0/11: addresses of loopback from which each listener of Gloo draws its own."""
_TAKEN = "taken"
"""Word of a node on which another program listens at a port of Gloo's, at all addresses."""
_LAZY_INIT = "TORCH_GLOO_LAZY_INIT"
_SO_ATTACH_FILTER, _RETURN_NOTHING = 26, struct.pack("=HBBI", 0x06, 0, 0, 0)
"""Option of a socket, and a program of one instruction that keeps no byte of any packet (packet(7), `BPF_RET`)."""
ABORTED = "the connections of this group were cut"
_POLL_INTERVAL, _NUM_POLLS_AFTER_ABORT = timedelta(milliseconds=100), 10
"""After an abort, a thread that the closed connections wake has finished within this many polls: a millisecond is
enough if it is scheduled. Polls are counted instead of timed, because a stopped process gets no processor."""


class StuckWorkError(RuntimeError):
    """A work does not end although its connections are closed."""


def make_gloo(store: Store, group: GroupInfo, timeout: timedelta) -> ProcessGroupGloo:
    """Make a Gloo group, connected.

    Gloo publishes the address at which it listens, and the greater address calls (`isInitiator` of its TCP device). A
    host that others reach by relays listens at its relayed address, which all others call by the same name. So both
    ends of a pair agree. Where the run is encrypted, each rank listens on loopback, and gates of every other node
    listen at the same address.

    Raises:
        RuntimeError: Ranks cannot be reached.
        LaunchError: The relay of this host does not answer.
    """
    place, address = (group.group_rank, group.group_size), group.own_info.location.address
    forwarders: list[Forwarder] = []
    own_address = ""
    if group.encryption is not None and group.num_nodes > 1:
        own_address, device, forwarders = _open_door_and_gates(store, group, timeout)
        devices = [device]
    elif is_relayed(address):
        devices = _open_relayed_devices(address)
    elif _stays_on_loopback(group):
        own_address, device = _listen_on_loopback()  # torch would take an address of the machine
        devices = [device]
    else:
        return ProcessGroupGloo(store, *place, timeout)
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, devices, 2 * len(devices)
    made = ProcessGroupGloo(store, *place, options)
    if is_relayed(address):
        relayed_address.keep_all_alive()
    if own_address:
        _drop_newcomers(own_address)
    if forwarders:
        forwarders.pop(0).close_soon()  # the door: all ranks that call by it have called
        weakref.finalize(made, _close_all, forwarders)
    return made


def make_single_gloo(store: Store, timeout: timedelta) -> ProcessGroupGloo:
    """Make a Gloo group of this process alone, whose listener is on loopback."""
    gloo: Any = ProcessGroupGloo
    address, device = _listen_on_loopback()
    _drop_newcomers(address)
    options = gloo._Options()
    options._timeout, options._devices, options._threads = timeout, [device], 2
    return gloo(store, 0, 1, options)


def _listen_on_loopback() -> tuple[str, Any]:
    """Return an address of the loopback network that no other listener has, by chance, and Gloo's listener at it."""
    drawn = random.SystemRandom().randrange(1, _NUM_ADDRESSES - 1)
    address = socket.inet_ntoa((_FIRST_NETWORK + drawn).to_bytes(4, "big"))
    return address, ProcessGroupGloo.create_device(hostname=address)


def _drop_newcomers(address: str) -> None:
    """Let the kernel drop what else calls Gloo's listener at this address: all ranks of the group are connected.

    Gloo listens as long as the group lives, takes a descriptor for each caller, and ends its process without one.
    """
    if os.environ.get(_LAZY_INIT):
        return  # ranks connect when they first need each other
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    options = struct.pack("@HP", 1, ctypes.addressof(program))
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            if stat.S_ISSOCK(entry.stat().st_mode):
                with socket.socket(fileno=os.dup(int(entry.name))) as sock:
                    listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if listens and sock.family == socket.AF_INET and sock.getsockname()[0] == address:
                        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, options)


def _close_all(forwarders: "Sequence[Forwarder]") -> None:
    for each in forwarders:
        each.close_soon()


def _stays_on_loopback(group: GroupInfo) -> bool:
    """Return whether all ranks are on this machine, in a run on loopback or an encrypted one."""
    on_loopback = all(member.location.address == _LOOPBACK for member in group.ranks)
    return on_loopback or (group.encryption is not None and group.num_nodes == 1)


def _open_door_and_gates(store: Store, group: GroupInfo, timeout: timedelta) -> "tuple[str, Any, list[Forwarder]]":
    """Return the address of loopback of Gloo's listener, the listener, its door, and the gates of this rank.

    The first rank of each node has the gates of the node, which lead to all listeners elsewhere under their own names.
    A program that listens at all addresses of a node may have the port of one; then all ranks listen anew.

    Raises:
        LaunchError: It is so again and again.
    """
    from ringweave.comm.transport import tunnel  # with asyncio, which a plain run does without

    assert group.encryption is not None, "the run is encrypted"
    ways = tunnel.tunnel_of(group.encryption)
    fingerprints = frozenset(member.fingerprint for member in group.ranks)
    nodes = [member.location.node for member in group.ranks]
    own_node, first_ranks = nodes[group.group_rank], sorted({nodes.index(node) for node in nodes})
    address, port = "", 0
    for attempt in range(relayed_address.MAX_ATTEMPTS):
        address, device = _listen_on_loopback()
        (port,) = relayed_address.find_listeners(address)
        listener = tunnel.listen_at(group.own_info.location.address, ports_of_environ(os.environ))
        door = ways.open_door(listener, (address, port), fingerprints.__contains__)
        doors, gated = ([f"{word}/{attempt}/{rank}" for rank in range(group.group_size)] for word in ("door", "gates"))
        store.set(doors[group.group_rank], json.dumps([address, port, door.port]))
        store.wait(doors, timeout)
        gates: list[Forwarder | None] = []
        if group.group_rank in first_ranks:
            for member, value in zip(group.ranks, store.multi_get(doors), strict=True):
                if member.location.node != own_node:
                    gates += _open_gate(ways, member, *_parse_door(value, member.global_rank))
            store.set(gated[group.group_rank], _TAKEN if None in gates else "open")
        said = [gated[rank] for rank in first_ranks]
        store.wait(said, timeout)
        opened = [door, *(gate for gate in gates if gate is not None)]
        if _TAKEN.encode() not in store.multi_get(said):
            return address, device, opened
        _close_all(opened)
    raise relayed_address.taken_error(address, port)


def _open_gate(ways: "Tunnel", member: RankInfo, address: str, port: int, door_port: int) -> "list[Forwarder | None]":
    """Return the gate to a rank of another node; [None] if another program has its port at all addresses.

    None is needed where Gloo's own listener, or another gate, is at its address: two nodes of the run are on one
    machine.
    """
    from ringweave.comm.transport import tunnel

    try:
        listener = tunnel.listen_on_loopback(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return [] if port in relayed_address.find_listeners(address) else [None]
    return [ways.open_gate(listener, (member.location.address, door_port), lambda found: found == member.fingerprint)]


def _parse_door(value: bytes, global_rank: int) -> tuple[str, int, int]:
    """Parse the address and port of Gloo's listener, and the port of its door.

    Raises:
        DisagreementError: It is none of this version of ringweave.
    """

    def convert(entry: Any) -> tuple[str, int, int]:
        address, port, door_port = entry
        if not ipaddress.ip_address(address).is_loopback:
            raise ValueError(f"{address} is not on loopback")
        return str(address), int(port), int(door_port)

    return peer_data.decode_peer_data(
        value, "door of Gloo", convert, expected="address and ports", max_bytes=256, where=f"rank {global_rank}"
    )


def _open_relayed_devices(address: str) -> list[Any]:
    """Return listeners of Gloo's at a relayed address, as many as the other ranks have, which all others can call."""
    count = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    taken: frozenset[int] = frozenset()
    for _ in range(relayed_address.MAX_ATTEMPTS):
        devices = [ProcessGroupGloo.create_device(hostname=address) for _ in range(count)]
        taken = relayed_address.announce_listeners(address)
        if not taken:
            return devices
        devices.clear()  # torch does not tell their ports, so they may be the taken ones
    raise relayed_address.taken_error(address, *taken)


def wait_for_gloo(work: Work, is_aborted: Callable[[], bool], timeout: timedelta | None = None) -> bool:
    """Wait for a Gloo collective on CPU tensors, but not for one that nothing wakes after an abort.

    When a connection closes, Gloo wakes threads that wait for their turn on it, but not a thread whose message has
    arrived in part (torch 2.13: `Pair::signalException` of its TCP transport leaves out the operation under way). That
    thread would wait as long as the collective may take: a day in an elastic job. It does not touch its tensors any
    more, because the rest of the message never arrives and the first part is already processed.

    Args:
        work: The work to wait for.
        is_aborted: Whether connections were closed by an abort.
        timeout: Limit; None or 0 is the limit of the collective.

    Raises:
        StuckError: It will not end. Leave its tensors and the backend as they are (`leak_backend`).
        RuntimeError: The backend failed, or the limit has passed.
    """
    deadline_s = time.monotonic() + timeout.total_seconds() if timeout else None
    num_polls_left = _NUM_POLLS_AFTER_ABORT
    while deadline_s is None or time.monotonic() < deadline_s:
        try:
            return work.wait(_POLL_INTERVAL)
        except RuntimeError:
            if work.is_completed():  # it has failed, or just finished
                break
        num_polls_left -= is_aborted()
        if num_polls_left < 0:
            raise StuckWorkError(f"{ABORTED}, in the middle of a message")
    return work.wait(timedelta(milliseconds=1))


def leak_backend(backend: Any) -> None:
    """Keep the backend from being destroyed: its destructor waits for all its threads, one of which never wakes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def ends_after_abort(work: Work) -> bool:
    """Return True if Gloo's work ends, with or without an error, shortly after an abort."""
    try:
        wait_for_gloo(work, lambda: True)
    except StuckWorkError:
        return False
    except RuntimeError:
        pass
    return True


def abort_gloo(gloo: Any, group: GroupInfo) -> None:
    """Close Gloo's connections: collectives in flight fail, here and at the peers.

    Gloo's own abort leaves them open (torch 2.13), and they stay open while any message is pending. But a wait that
    times out closes all pairs of its device, so this function waits for a message that never comes, from each peer.

    Cost:
        10 ms for each peer: Gloo's thread takes a turn for each pair.
    """
    for peer in range(group.group_size):
        if peer != group.group_rank:
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
