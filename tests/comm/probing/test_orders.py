"""What probing ranks tell each other: whoever has the token, which goes over the wire as it is, can say anything."""

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.probing import flows, probe_coordinator
from ringweave.comm.probing.flows import FlowTiming, ProbeConnectionKind, RankFlows
from ringweave.comm.probing.probe_coordinator import JsonConnection, ProbeCoordinator
from ringweave.comm.transport.connect import ChannelListener, open_listeners
from ringweave.errors import PeerError
from ringweave.topology.inference.observations import Flow, FlowBatch
from tests.comm.probing.parts import TOKEN, at_once
from tests.rpc.mutations import mutated

PART = RankFlows(number=3, sends_to=[1], receives_from=[1], timing=FlowTiming(), rails=[0])
FLOW = probe_coordinator.flow_command(PART)


def received(data: bytes) -> dict[str, Any]:
    """What a rank hears of a peer that sends that and hangs up."""
    theirs, ours = socket.socketpair()
    with theirs:
        theirs.sendall(data)
    line = JsonConnection(ours, "rank 0 (node n0)")
    try:
        return line.receive()
    finally:
        line.close()


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"", "it hung up"),
        (b'{"do": "end"}', "it hung up"),
        (b"[" * 900 + b"\n", "Expecting value"),
        (b"[" * 9_000 + b"\n", "brackets in brackets"),
        (b'{"a":' * 1_900 + b"\n", "brackets in brackets"),
        (b"\xff\xfe\n", "Expecting value|truncated"),
        (b'{"found": "\xe9"}\n', "utf-8"),
        (b"null\n", r"something else: b'null"),
        (b"[]\n", r"something else: b'\[\]"),
        (b" " * 50_000 + b"\n", "a line of \\d{5} bytes and more"),
        (b'{"failed": "no route"}\n', "no route"),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_rubbish_is_a_peer_that_is_lost(data: bytes, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_coordinator, "_MAX_LINE_BYTES", 10_000)
    with pytest.raises(PeerError, match=f"probing the network: .*({got}).*, expected rank 0 .node n0. to measure"):
        received(data)


def test_mutated_lines_are_read_or_refused() -> None:
    rng, num_refused = random.Random(8), 0
    good = json.dumps(FLOW).encode() + b"\n"
    assert received(good) == FLOW
    for _ in range(2_000):
        try:
            assert isinstance(received(mutated(rng, good)), dict)
        except PeerError:
            num_refused += 1
    assert num_refused > 1_000


@pytest.fixture
def pair() -> Iterator[list[tuple[GroupInfo, ChannelListener]]]:
    """Two probing ranks and their doors."""
    doors = [open_listeners([f"127.0.0.{rank + 1}"], 1)[0] for rank in range(2)]
    ranks = tuple(
        RankInfo(rank, RankLocation(f"n{rank}", f"127.0.0.{rank + 1}"), (door.endpoint,))
        for rank, door in enumerate(doors)
    )
    yield [(GroupInfo(ranks, rank, TOKEN), door) for rank, door in enumerate(doors)]
    for door in doors:
        door.close()


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"do": []},
        {"do": "ask"},
        {"do": "ask", "peer": "x", "number": 1},
        {"do": "ask", "peer": 7, "number": 1},
        {"do": "ask", "peer": 0, "number": -1},
        {"do": "reach", "peers": 7, "rail": 0},
        {"do": "reach", "peers": [0], "rail": 9},
        FLOW | {"timing": {"window_s": 1.0, "more": 1}},
        FLOW | {"timing": {"window_s": "x"}},
        FLOW | {"number": 2**70, "sends_to": [0]},
        {key: value for key, value in FLOW.items() if key != "rails"},
    ],
    ids=str,
)
def test_what_is_no_order_ends_the_probing_of_a_rank(
    pair: list[tuple[GroupInfo, ChannelListener]], order: dict[str, Any]
) -> None:
    (first, first_door), (second, second_door) = pair

    def lead() -> None:
        calling = flows.incoming_probers(first_door.tcp_sockets)
        while (answered := flows.accept_prober(calling, first, 60.0)) is None:
            pass
        line = JsonConnection(answered[1], "rank 1")
        line.send(order)
        with pytest.raises(PeerError, match="it hung up"):
            line.receive()
        line.close()

    led, obeyed = at_once(lead, lambda: probe_coordinator.follow_coordinator(second, second_door.tcp_sockets))
    assert led is None
    assert isinstance(obeyed, PeerError)
    assert "no order: {" in str(obeyed)


@pytest.mark.parametrize("latency", ["{}", '{"latency_s": NaN}', '{"latency_s": -1}', '{"latency_s": "1"}'])
@pytest.mark.parametrize("rates", ["{}", '{"rates": {"0": [1.0, 1.0]}}', '{"rates": {"0": [1e400]}}', '{"rates": [1]}'])
def test_a_report_that_is_none_is_the_fault_of_who_sent_it(
    pair: list[tuple[GroupInfo, ChannelListener]], latency: str, rates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_coordinator, "execute_command", lambda *_: {})
    (first, first_door), (second, _) = pair

    def say() -> None:
        line = JsonConnection(flows.connect_prober(second, 0, ProbeConnectionKind.COMMANDS, 0, 60.0), "rank 0")
        for text in (latency, rates):
            line.receive()
            line._file.write(text.encode() + b"\n")
            line._file.flush()
        line.close()

    def lead() -> None:
        conductor = ProbeCoordinator(first, first_door.tcp_sockets, 60.0)
        expected = r"probing the network: \{.*\}, expected what rank 1 .node n1. has measured\. Run the same ringweave"
        with pytest.raises(PeerError, match=expected):
            conductor.measure_latencies(((1, 0),))
        with pytest.raises(PeerError, match=expected):
            conductor.measure_rates(FlowBatch((Flow(0, 1),), "pairs"), FlowTiming())
        conductor.close()

    assert at_once(lead, say) == [None, None]
