"""Relays: connections to hosts that only call out, between real sockets; several hosts are on this machine."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from ringweave import ports, relayed_address
from ringweave.accept_limits import AcceptLimits
from ringweave.errors import LaunchError
from ringweave.platforms.hosts import relay
from ringweave.platforms.hosts.messages import HOST_ROLE
from ringweave.platforms.hosts.relay import FramedStream, Relay
from ringweave.platforms.hosts.run_entry import HostEndpoint
from ringweave.relayed_address import find_listeners
from ringweave.rpc import CertificateAuthority, Credentials, RpcServer, TlsAuthentication
from tests.polling import wait_until

AUTHORITY = CertificateAuthority("train-1")
TIMEOUT_S = 20.0


class Hosts:
    """Hosts a and b that can be called, and hosts x and y that only call out, with a relay each in one thread."""

    def __init__(self, names: str) -> None:
        drawn = [relayed_address.draw_address(_Draws(index)) for index in range(len(names))]
        self.names = names
        self.endpoints = [
            HostEndpoint(
                node=name,
                destination="",
                address="127.0.0.1" if name in "ab" else drawn[index],
                port=1,
                relay_port=free_port() if name in "ab" else 0,
            )
            for index, name in enumerate(names)
        ]
        self.relays: dict[str, Relay] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def start(self, name: str, credentials: Credentials | None = None) -> Relay:
        index = self.names.index(name)

        async def begin() -> Relay:
            made = Relay(
                index,
                credentials or AUTHORITY.issue(HOST_ROLE, name),
                lambda: self.endpoints,
                listen_at=lambda address: self.seen_at(name, address),
            )
            await made.start()
            return made

        self.relays[name] = self.call(begin())
        return self.relays[name]

    def stop(self, name: str) -> None:
        self.call(self.relays.pop(name).close())

    def address(self, name: str) -> str:
        return self.endpoints[self.names.index(name)].address

    def seen_at(self, name: str, address: str) -> str:
        """Address of this machine that stands for another host's relayed address on host `name`."""
        whose = [each.address for each in self.endpoints].index(address)
        return f"127.0.{10 + self.names.index(name)}.{whose + 1}"

    def listen(self, name: str) -> socket.socket:
        """Listen on a host as workers do."""
        return ports.create_server(self.address(name), None, backlog=64)

    def connect(self, source: str, target: str, port: int) -> socket.socket:
        """Connect on one host to the address of another."""
        where = (self.seen_at(source, self.address(target)), port)
        sock = socket.create_connection(where, timeout=TIMEOUT_S)
        sock.settimeout(TIMEOUT_S)
        return sock

    def end(self) -> None:
        for name in list(self.relays):
            self.stop(name)
        self.call(asyncio.sleep(0.1))  # transports close in the next rounds of the loop
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()


class _Draws:
    """Random generator that returns one number, another for each test process."""

    def __init__(self, index: int) -> None:
        self._number = 1 + (time.time_ns() // 1000 * 8 + index) % (relayed_address.NETWORK.num_addresses - 3)

    def randrange(self, low: int, high: int) -> int:
        assert low <= self._number < high
        return self._number


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def make_hosts() -> Iterator[Callable[[str], Hosts]]:
    with contextlib.ExitStack() as stack:

        def make(names: str) -> Hosts:
            hosts = Hosts(names)
            stack.callback(hosts.end)
            for name in names:
                hosts.start(name)
            gateways = sum(name in "ab" for name in names)
            wait_until(lambda: all(hosts.relays[name].num_links == gateways for name in names if name not in "ab"))
            return hosts

        yield make


def accept(listener: socket.socket) -> socket.socket:
    listener.settimeout(TIMEOUT_S)
    sock, _ = listener.accept()
    sock.settimeout(TIMEOUT_S)
    return sock


@contextlib.contextmanager
def connected(hosts: Hosts, source: str, target: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two hosts; the ends at the source and at the target."""
    with hosts.listen(target) as listener:
        port = listener.getsockname()[1]
        with hosts.connect(source, target, port) as caller, accept(listener) as callee:
            yield caller, callee


def read_all(sock: socket.socket) -> bytes:
    content = bytearray()
    while piece := sock.recv(2**20):
        content += piece
    return bytes(content)


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < num_bytes and (piece := sock.recv(num_bytes - len(content))):
        content += piece
    return bytes(content)


def test_an_announced_listener_is_reached_at_its_own_port(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    with connected(hosts, "a", "x") as (caller, callee):
        caller.sendall(b"question")
        assert callee.recv(8) == b"question"
        callee.sendall(b"answer")
        assert caller.recv(6) == b"answer"


def test_each_direction_ends_by_itself(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    with connected(hosts, "a", "x") as (caller, callee):
        caller.sendall(b"all")
        caller.shutdown(socket.SHUT_WR)
        assert read_all(callee) == b"all"
        callee.sendall(b"still open")
        callee.shutdown(socket.SHUT_WR)
        assert read_all(caller) == b"still open"
    wait_until(lambda: not any(each.num_led for each in hosts.relays.values()))


def test_a_reset_goes_through(make_hosts: Callable[[str], Hosts]) -> None:
    with connected(make_hosts("ax"), "a", "x") as (caller, callee):
        caller.sendall(b"half a mess")
        assert callee.recv(11) == b"half a mess"
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
        with pytest.raises(ConnectionResetError):
            callee.recv(1)


def test_a_slow_reader_slows_the_sender(make_hosts: Callable[[str], Hosts]) -> None:
    with connected(make_hosts("ax"), "a", "x") as (caller, callee):
        sent = send_until_it_blocks(caller)
        assert sent < 2**26, "buffers of the kernel and of two relays"
        caller.shutdown(socket.SHUT_WR)
        assert len(read_all(callee)) == sent


def send_until_it_blocks(sock: socket.socket) -> int:
    """Send until nothing goes for a while; return the number of bytes."""
    sock.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 2**30:
            sent += sock.send(bytes(2**16))
    return sent


def test_many_connections_at_once_keep_their_content_apart(make_hosts: Callable[[str], Hosts]) -> None:
    hosts, count = make_hosts("ax"), 64
    with hosts.listen("x") as listener, contextlib.ExitStack() as stack:
        callers = [stack.enter_context(hosts.connect("a", "x", listener.getsockname()[1])) for _ in range(count)]
        for index, caller in enumerate(callers):
            caller.sendall(index.to_bytes(4, "big"))
        for _ in range(count):
            callee = stack.enter_context(accept(listener))
            callee.sendall(read_exactly(callee, 4) * 10_000)
        for index, caller in enumerate(callers):
            assert read_exactly(caller, 40_000) == index.to_bytes(4, "big") * 10_000


def test_two_hosts_that_only_call_out_meet_at_one_that_can_be_called(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("axby")
    with hosts.listen("y") as listener:
        with hosts.connect("x", "y", listener.getsockname()[1]) as caller, accept(listener) as callee:
            caller.sendall(bytes(3_000_000))
            caller.shutdown(socket.SHUT_WR)
            assert len(read_all(callee)) == 3_000_000
            callee.sendall(b"thanks")
            assert caller.recv(6) == b"thanks"
        hosts.stop("a")
        port = listener.getsockname()[1]
        with hosts.connect("x", "y", port) as caller, accept(listener) as callee:
            caller.sendall(b"by the other one")
            assert callee.recv(16) == b"by the other one"


def test_a_port_is_refused_once_nobody_listens(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    with hosts.listen("x") as listener:
        port = listener.getsockname()[1]
        hosts.connect("a", "x", port).close()
    wait_until(lambda: is_refused(hosts, "a", "x", port))


def test_all_ports_are_refused_once_the_host_is_gone(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    with hosts.listen("x") as listener:
        port = listener.getsockname()[1]
        with hosts.connect("a", "x", port) as caller, accept(listener):
            hosts.stop("x")
            with pytest.raises(ConnectionResetError):
                caller.recv(1)
        wait_until(lambda: is_refused(hosts, "a", "x", port))


def test_a_listener_without_announcement_is_found(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    with socket.create_server((hosts.address("x"), 0)) as listener:
        port = listener.getsockname()[1]
        wait_until(lambda: not is_refused(hosts, "a", "x", port))


def is_refused(hosts: Hosts, source: str, target: str, port: int) -> bool:
    try:
        hosts.connect(source, target, port).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        return False  # it ends just now
    return False


def test_a_port_that_another_program_has_there_is_not_used(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ax")
    probe = hosts.listen("x")
    port = probe.getsockname()[1]
    probe.close()
    wait_until(lambda: is_refused(hosts, "a", "x", port))
    with socket.create_server((hosts.seen_at("a", hosts.address("x")), port)):
        server = RpcServer(TlsAuthentication(AUTHORITY.issue(HOST_ROLE, "x")), [], roles=(HOST_ROLE,))
        with pytest.raises(LaunchError, match=f"port {port} of 127.*'taken on another host', expected free ones"):
            server.start(hosts.address("x"), port)
        server.close()


def test_announcing_needs_a_relay_only_at_relayed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert relayed_address.announce_listeners("127.0.0.1") == frozenset()
    monkeypatch.setattr(relayed_address, "START_TIMEOUT_S", 0.1)
    with pytest.raises(LaunchError, match=r"relay of this host, 127\.64\.0\.9: .* expected an answer"):
        relayed_address.announce_listeners("127.64.0.9")


@pytest.mark.parametrize("names", [("train-2", "x"), ("train-1", "z"), ("train-1", "a")])
def test_a_stranger_gets_nothing(
    names: Sequence[str], make_hosts: Callable[[str], Hosts], capsys: pytest.CaptureFixture[str]
) -> None:
    job, name = names
    authority = AUTHORITY if job == AUTHORITY.job else CertificateAuthority(job)
    hosts = make_hosts("ab")
    hosts.names, hosts.endpoints = "abx", [*hosts.endpoints, make_endpoint("x", "127.64.0.7")]
    stranger = hosts.start("x", authority.issue(HOST_ROLE, name))
    with socket.create_server(("127.64.0.7", 0)) as listener:
        port = listener.getsockname()[1]
        if job == AUTHORITY.job:
            wait_until(lambda: "connection refused" in capsys.readouterr().err)
        assert find_listeners("127.64.0.7") == {port}
        time.sleep(3 * relay.SCAN_S)
        assert is_refused(hosts, "a", "x", port)
    assert stranger.num_led == 0


def make_endpoint(node: str, address: str) -> HostEndpoint:
    return HostEndpoint(node=node, destination="", address=address, port=1)


def test_a_host_cannot_take_the_address_of_another(make_hosts: Callable[[str], Hosts]) -> None:
    hosts = make_hosts("ay")
    own = list(hosts.endpoints)
    hosts.names = "ayx"
    hosts.endpoints = [*own, make_endpoint("x", "127.64.0.8")]
    with socket.create_server((hosts.address("y"), 0)) as listener:
        port = listener.getsockname()[1]
        wait_until(lambda: not is_refused(hosts, "a", "y", port))
    hosts.stop("y")
    wait_until(lambda: is_refused(hosts, "a", "y", port))
    with socket.create_server(("127.64.0.8", 0)) as listener:
        made = hosts.start("x")
        made._own_table = lambda: {hosts.address("y"): frozenset({port}), "127.64.0.8": find_listeners("127.64.0.8")}  # type: ignore[method-assign]
        wait_until(lambda: not is_refused(hosts, "a", "x", listener.getsockname()[1]))
        assert is_refused(hosts, "a", "y", port)


TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0709407F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     {uid}        0 1 1 0 100 0 0 10 0
   1: 0709407F:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000 4294967         0 1 1 0 100 0 0 10 0
   2: 0709407F:1F92 0709407F:1F90 01 00000000:00000000 00:00000000 00000000     {uid}        0 1 1 0 100 0 0 10 0
   3: 00000000:1F93 00000000:0000 0A 00000000:00000000 00:00000000 00000000     {uid}        0 1 1 0 100 0 0 10 0
"""


def test_only_listeners_of_this_user_at_exactly_this_address_are_led_to() -> None:
    assert find_listeners("127.64.9.7", TABLE.format(uid=os.geteuid())) == {0x1F90}


def test_relayed_addresses_are_a_part_of_the_loopback_network() -> None:
    rng = random.Random(1)
    drawn = [relayed_address.draw_address(rng) for _ in range(100)]
    assert len(set(drawn)) == 100
    assert all(map(relayed_address.is_relayed, drawn))
    others = ("127.0.0.1", "127.0.1.1", "10.0.0.1", "127.128.0.1", "::1", "n0", "")
    assert not any(map(relayed_address.is_relayed, others))


def test_connections_that_others_have_opened_are_kept_alive() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as caller, accept(listener) as callee:
        relayed_address.keep_all_alive()
        for sock in (caller, callee):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == relayed_address.KEEPALIVE_S


def test_callers_that_get_no_answer_are_few_and_the_others_are_led_on(
    make_hosts: Callable[[str], Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, reached = make_hosts("ax"), Relay._reach
    limits = AcceptLimits(max_pending=3, max_pending_per_source=3, deadline_s=TIMEOUT_S)
    monkeypatch.setattr(relay, "_LOCAL_LIMITS", limits)

    async def never(*_: object) -> FramedStream:
        await asyncio.Event().wait()
        raise AssertionError

    with hosts.listen("x") as listener:
        port = listener.getsockname()[1]
        relayed_address.announce_listeners(hosts.address("x"))
        monkeypatch.setattr(Relay, "_reach", never)
        silent = [hosts.connect("a", "x", port) for _ in range(4)]
        assert silent[0].recv(1) == b"", "the oldest has made room"
        limiter = hosts.relays["a"]._listeners[hosts.address("x"), port].limiter
        wait_until(lambda: limiter.num_pending == limits.max_pending, "as many callers as wait at most")
        wait_until(lambda: hosts.relays["a"].num_led == limits.max_pending, "the end of the task of the oldest")
        monkeypatch.setattr(Relay, "_reach", reached)
        with hosts.connect("a", "x", port) as caller, accept(listener) as led:
            caller.sendall(b"x")
            assert led.recv(1) == b"x"
        for each in silent:
            each.close()


@pytest.mark.parametrize(("names", "source"), [("ax", "a"), ("axy", "y")])
def test_nobody_waits_for_a_host_once_the_caller_or_the_host_is_gone(
    make_hosts: Callable[[str], Hosts], monkeypatch: pytest.MonkeyPatch, names: str, source: str
) -> None:
    monkeypatch.setattr(relay, "CONNECT_TIMEOUT_S", 600.0)
    monkeypatch.setattr(relay, "_LOCAL_LIMITS", AcceptLimits(deadline_s=600.0))
    hosts = make_hosts(names)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Relay, "_carry", never)
    with hosts.listen("x") as listener, contextlib.ExitStack() as callers:
        port = listener.getsockname()[1]
        gone, ended, patient = (callers.enter_context(hosts.connect(source, "x", port)) for _ in range(3))
        gateway = hosts.relays["a"]
        wait_until(lambda: gateway.num_led == len(gateway._carried) == 3)
        ended.shutdown(socket.SHUT_WR)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        wait_until(
            lambda: gateway.num_led == len(gateway._carried) == 2, "the end of the task of a caller that is gone"
        )
        hosts.stop("x")
        for each in (ended, patient):
            with pytest.raises(ConnectionResetError):
                each.recv(1)
        wait_until(lambda: gateway.num_led == len(gateway._carried) == 0)
