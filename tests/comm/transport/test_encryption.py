"""Connections between nodes under TLS: ranks that prove to be themselves, strangers, and what is on the wire."""

import contextlib
import gc
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ringweave.accept_limits import connection_id
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.transport import tunnel
from ringweave.comm.transport.connect import ConnectionManager, open_listeners
from ringweave.comm.transport.encryption import LinkEncryption
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.transport.sockets import SocketTransport
from ringweave.rpc import CertificateAuthority
from ringweave.rpc.handshake import EventWriter
from tests.polling import wait_until

TOKEN = b"0123456789abcdef"
AUTHORITY = CertificateAuthority("job")
PATTERN = bytes(range(0x30, 0x50))


def encryption(
    name: str, authority: CertificateAuthority = AUTHORITY, write_event: EventWriter | None = None
) -> LinkEncryption:
    return LinkEncryption(authority.issue("worker", name), write_event)


class Wire:
    """A listener that leads each connection on to another one, and keeps what passes."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen = bytearray()
        self._target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with one, contextlib.suppress(OSError):
            while content := one.recv(2**16):
                self.seen += content
                other.sendall(content)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)  # closing it would not wake the thread that reads it

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # its thread waits for a connection
        self.listener.close()


def transports(
    *encryptions: LinkEncryption, claimed: dict[int, str] | None = None, streams: tuple[int, ...] = ()
) -> list[SocketTransport]:
    """A transport for each rank, each on a node of its own; `claimed` replaces fingerprints in the store."""
    doors = [open_listeners(["127.0.0.1"], 1)[0] for _ in encryptions]
    prints = {rank: each.fingerprint for rank, each in enumerate(encryptions)} | (claimed or {})
    ranks = tuple(
        RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), (door.endpoint,), prints[rank])
        for rank, door in enumerate(doors)
    )
    groups = [GroupInfo(ranks, rank, TOKEN, each, streams) for rank, each in enumerate(encryptions)]
    limit = timedelta(seconds=20)
    return [SocketTransport(door, 0, group, limit) for door, group in zip(doors, groups, strict=True)]


@pytest.mark.parametrize("streams", [(), (1, 3, 2)])
@pytest.mark.parametrize("num_bytes", [0, 1, 16_368, 16_369, 3_000_000])
def test_a_ring_of_encrypted_ranks_gets_what_was_sent(num_bytes: int, streams: tuple[int, ...]) -> None:
    made = transports(*(encryption(str(rank)) for rank in range(3)), streams=streams)

    def turn(rank: int) -> torch.Tensor:
        left, right, found = (rank - 1) % 3, (rank + 1) % 3, torch.zeros(2 * num_bytes, dtype=torch.uint8)
        made[rank].connect([left, right])
        own = torch.full((num_bytes,), rank + 1, dtype=torch.uint8)
        view = made[rank].expose(found)
        sent = [made[rank].send(made[rank].expose(own)[:], right, 7 + number) for number in range(2)]
        time.sleep(0.05 * rank)  # both messages may be decrypted before the second one is expected
        made[rank].wait(made[rank].receive(view[:num_bytes], left, 7), 20)
        made[rank].wait(made[rank].receive(view[num_bytes:], left, 8), 20)
        for each in sent:
            made[rank].wait(each, 20)
        return found

    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(turn, range(3)))
    for each in made:
        each.close()
    for rank, found in enumerate(results):
        assert bool((found == (rank - 1) % 3 + 1).all())


def test_a_rank_with_anothers_certificate_is_refused_by_both_ends() -> None:
    caller, callee = transports(encryption("0"), encryption("1"), claimed={0: "ab" * 32, 1: "cd" * 32})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(callee.connect, [0], 1.0)
        with pytest.raises(TransferFailedError, match=r"another process answers: its certificate is .* expected cdcd"):
            caller.connect([1], 1.0)
        with pytest.raises(TransferFailedError, match="it did not connect"):
            waiting.result()
    for each in (caller, callee):
        each.close()


def test_a_process_of_another_job_is_refused() -> None:
    foreign = encryption("0", CertificateAuthority("other"))
    caller, callee = transports(foreign, encryption("1"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(callee.connect, [0], 1.0)
        with pytest.raises(TransferFailedError, match=r"cannot be encrypted: .*CERTIFICATE_VERIFY_FAILED"):
            caller.connect([1], 1.0)
        with pytest.raises(TransferFailedError, match="it did not connect"):
            waiting.result()
    for each in (caller, callee):
        each.close()


def test_a_plain_hello_with_the_right_token_is_refused() -> None:
    (door,) = open_listeners(["127.0.0.1"], 1)
    own = encryption("1")
    ranks = tuple(RankInfo(r, RankLocation(f"n{r}", "127.0.0.1"), (door.endpoint,), own.fingerprint) for r in range(2))
    manager = ConnectionManager(door, 0, GroupInfo(ranks, 1, TOKEN, own), 5.0, time.monotonic)
    with socket.create_connection(door.tcp_sockets[0].getsockname()) as stranger:
        stranger.sendall(TOKEN + bytes(8))
        assert [manager.accept_peer(0, float("inf")) for _ in range(3)] == [None] * 3
        assert manager._incoming.pending_sockets() == []
    manager.close()


def test_silent_strangers_are_cut_although_no_rank_is_waited_for() -> None:
    (listener,), now_s = open_listeners(["127.0.0.1"], 1), [0.0]
    own = encryption("1")
    ranks = tuple(
        RankInfo(r, RankLocation(f"n{r}", "127.0.0.1"), (listener.endpoint,), own.fingerprint) for r in (0, 1)
    )
    manager = ConnectionManager(listener, 0, GroupInfo(ranks, 1, TOKEN, own), 5.0, lambda: now_s[0])
    with socket.create_connection(listener.tcp_sockets[0].getsockname(), timeout=20) as stranger:
        while not manager._incoming.pending_sockets():
            assert manager.accept_peer(0, 1e9) is None
        assert manager.accept_early() is None
        assert manager._incoming.pending_sockets()
        now_s[0] = 11.0
        while manager._incoming.pending_sockets():
            assert manager.accept_early() is None
        assert stranger.recv(1) == b""
    manager.close()


def test_a_stranger_who_is_gone_before_it_is_accepted_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: warned.append(found.exc_value))
    (listener,) = open_listeners(["127.0.0.1"], 1)
    own = encryption("1")
    ranks = tuple(
        RankInfo(r, RankLocation(f"n{r}", "127.0.0.1"), (listener.endpoint,), own.fingerprint) for r in (0, 1)
    )
    manager = ConnectionManager(listener, 0, GroupInfo(ranks, 1, TOKEN, own), 5.0, time.monotonic)
    with socket.create_connection(listener.tcp_sockets[0].getsockname()) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert manager.accept_peer(0, float("inf")) is None
    gc.collect()
    assert (warned, manager._incoming._limiter.num_pending, manager._incoming.pending_sockets()) == ([], 0, [])
    manager.close()


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A plain service on loopback that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    def answer(sock: socket.socket) -> None:
        with sock:
            while content := sock.recv(2**16):
                sock.sendall(content)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_tunnel_leads_plain_connections_and_nothing_of_them_is_on_the_wire(echo: tuple[str, int]) -> None:
    one, other = tunnel.Tunnel(encryption("0")), tunnel.Tunnel(encryption("1"))
    door = one.open_door(tunnel.listen_at("127.0.0.1", None), echo)
    wire = Wire(("127.0.0.1", door.port))
    gate = other.open_gate(tunnel.listen_on_loopback(), wire.listener.getsockname())
    sent = PATTERN * 40_000
    with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as sock:
        threading.Thread(target=sock.sendall, args=(sent,), daemon=True).start()
        found = bytearray()
        while len(found) < len(sent):
            found += sock.recv(2**16)
    assert found == sent
    assert len(wire.seen) > 2 * len(sent)
    assert all(PATTERN[start : start + 8] not in wire.seen for start in range(len(PATTERN) - 8))
    for each in (door, gate):
        each.close_soon()
    wire.close()


def test_a_forked_child_releases_connections_and_not_what_has_the_descriptor_of_one_that_has_ended() -> None:
    made, (sock, other) = tunnel.Tunnel(encryption("0")), socket.socketpair()
    made._connections[connection_id(sock)] = descriptor = sock.fileno()
    with Path(__file__).open("rb") as source:
        os.dup2(source.fileno(), sock.detach())  # as closing the one and opening the other does
    with os.fdopen(descriptor, "rb") as file:
        made._connections[connection_id(other)] = other.fileno()
        made._close_inherited()
        assert file.read() == Path(__file__).read_bytes()
    with pytest.raises(OSError, match="Socket operation on non-socket"):
        other.recv(1)
    other.close()


def end_of(sock: socket.socket) -> bytes:
    """The next bytes; none where the connection has ended, with or without a word."""
    try:
        return sock.recv(5)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(("name", "reason"), [("0.1", ""), ("1.0", "revoked"), ("foreign", "certificate")])
def test_a_door_admits_only_members_of_its_job_and_logs_others(echo: tuple[str, int], name: str, reason: str) -> None:
    refusals: list[Any] = []
    authority = CertificateAuthority("other") if name == "foreign" else AUTHORITY
    one = tunnel.Tunnel(encryption("0", write_event=lambda kind, **fields: refusals.append(fields["reason"])))
    caller = encryption(name, authority)
    caller.client_context.verify_mode = ssl.CERT_NONE  # a stranger minds nothing
    other = tunnel.Tunnel(caller)
    door = one.open_door(tunnel.listen_at("127.0.0.1", None), echo, revokes=lambda found: found == "1.0")
    gate = other.open_gate(tunnel.listen_on_loopback(), ("127.0.0.1", door.port))
    socket.create_connection(("127.0.0.1", door.port)).close()  # says nothing, and is not worth a line
    with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as sock:
        sock.sendall(b"hello")
        assert end_of(sock) == (b"" if reason else b"hello")
    wait_until(lambda: refusals == ([reason] if reason else []), lambda: refusals)
    door.close_soon()
    gate.close_soon()


def test_a_gate_admits_only_the_wanted_process(echo: tuple[str, int]) -> None:
    one, other = tunnel.Tunnel(encryption("0")), tunnel.Tunnel(encryption("1"))
    door = one.open_door(tunnel.listen_at("127.0.0.1", None), echo)
    gate = other.open_gate(tunnel.listen_on_loopback(), ("127.0.0.1", door.port), lambda found: found == "ab" * 32)
    with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as sock:
        sock.sendall(b"hello")
        assert end_of(sock) == b""
    door.close_soon()
    gate.close_soon()


def test_a_door_whose_service_has_ended_ends_its_callers_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: warned.append(found.exc_value))
    with tunnel.listen_on_loopback() as ended:
        target = ended.getsockname()
    one, other = tunnel.Tunnel(encryption("0")), tunnel.Tunnel(encryption("1"))
    door = one.open_door(tunnel.listen_at("127.0.0.1", None), target)
    gate = other.open_gate(tunnel.listen_on_loopback(), ("127.0.0.1", door.port))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as sock:
            assert end_of(sock) == b""
        wait_until(lambda: not one._connections and not other._connections)
    gc.collect()  # a connection that the loop has lost is found when another one has its descriptor
    assert warned == []
    for each in (door, gate):
        each.close_soon()


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:9C40 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 1 1 0 100 0 0 10 0
   1: 0100007F:9C40 0100007F:1F91 01 00000000:00000000 00:00000000 00000000 65534        0 1 1 0 100 0 0 10 0
   2: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1001        0 1 1 0 100 0 0 10 0
"""
MAPPED = "0000000000000000FFFF00000100007F"


@pytest.mark.parametrize("table", [TABLE, TABLE.replace("0100007F", MAPPED)])
def test_the_user_of_a_connection_is_not_that_of_another_one_from_the_same_port(table: str) -> None:
    local = ("127.0.0.1", 40_000)
    assert tunnel.connection_users(table, local, ("127.0.0.1", 8080)) == {1000}
    assert tunnel.connection_users(table, local, ("127.0.0.1", 8081)) == {65534}
    assert tunnel.connection_users(table, local, ("127.0.0.1", 8082)) == set()
