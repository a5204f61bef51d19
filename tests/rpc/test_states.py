import threading
from collections.abc import Mapping

import numpy as np
import pytest

from ringweave import rpc
from ringweave.errors import DeadlineError, MessageError, RemoteError, RpcError
from ringweave.rpc import state_transfer
from tests.rpc.parts import connect, serving, trust


def model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.random((1100, 1000)),
        "bias": rng.random(3, dtype=np.float32),
        "steps": np.array(7),
        "empty": np.zeros((0, 4)),
    }


def assert_same(received: Mapping[str, memoryview], source: Mapping[str, np.ndarray]) -> None:
    assert {name: bytes(each) for name, each in received.items()} == {
        name: each.tobytes() for name, each in source.items()
    }


def serving_states(authority: rpc.CertificateAuthority, shelf: state_transfer.StateServer):
    return serving(trust(authority, "worker", "0"), *shelf.handlers())


def connected(authority: rpc.CertificateAuthority, server: rpc.RpcServer) -> rpc.RpcClient:
    return rpc.RpcClient.connect("127.0.0.1", server.port, trust(authority, "worker", "1"), role="worker")


def test_state_arrives_whole(authority: rpc.CertificateAuthority) -> None:
    shelf, source = state_transfer.StateServer(), model()
    shelf.publish("model", source)
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        assert_same(state_transfer.fetch_state(client, "model", timeout_s=60), source)


def test_state_that_changes_while_it_is_read_is_found_out(authority: rpc.CertificateAuthority) -> None:
    shelf, source = state_transfer.StateServer(), model()

    def change(description: state_transfer.StateDescription) -> None:
        source["bias"][1] += 1

    shelf.publish("model", source)
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(MessageError, match=r"state model, bias: 'another check', .*It changed while it was read"),
    ):
        state_transfer.fetch_state(client, "model", timeout_s=60, check=change)


def test_state_that_is_replaced_while_it_is_read_is_not_mixed(authority: rpc.CertificateAuthority) -> None:
    shelf, source = state_transfer.StateServer(), model()

    def replace(description: state_transfer.StateDescription) -> None:
        shelf.publish("model", model())

    shelf.publish("model", source)
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(RemoteError, match=r"published state model: 1, expected the newest, 2\. Begin again"),
    ):
        state_transfer.fetch_state(client, "model", timeout_s=60, check=replace)


def test_a_description_may_be_refused_before_anything_is_sent(authority: rpc.CertificateAuthority) -> None:
    shelf = state_transfer.StateServer()
    shelf.publish("model", model())

    def refuse(description: state_transfer.StateDescription) -> None:
        sizes = {piece.name: piece.num_bytes for piece in description.pieces}
        raise ValueError(f"bias of {sizes['bias']} bytes")

    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        with pytest.raises(ValueError, match="bias of 12 bytes"):
            state_transfer.fetch_state(client, "model", timeout_s=60, check=refuse)
        assert server.peers()[0].traffic["messages_received"] == 2


def test_a_state_that_nobody_offers_is_named(authority: rpc.CertificateAuthority) -> None:
    shelf = state_transfer.StateServer()
    shelf.publish("model", {})
    shelf.publish("old", {})
    shelf.unpublish("old")
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(RemoteError, match=r"state: 'old', expected one of model\. Ask a peer that has it\."),
    ):
        state_transfer.fetch_state(client, "old", timeout_s=60)


@pytest.mark.parametrize(
    ("piece", "first", "size"), [(0, -1, 1), (0, 0, 101), (0, 100, 1), (1, 0, 1), (-1, 0, 1), (0, 5, -1)]
)
def test_no_byte_outside_a_state_is_read(
    authority: rpc.CertificateAuthority, piece: int, first: int, size: int
) -> None:
    shelf = state_transfer.StateServer()
    shelf.publish("model", {"a": bytes(100)})
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        read = state_transfer.ReadState(name="model", offer=1, piece=piece, first_byte=first, num_bytes=size)
        with pytest.raises(RemoteError, match=r"slice of state model: .*expected one that lies within a buffer"):
            client.call(read, timeout_s=60)


@pytest.mark.slow
def test_a_transfer_that_takes_too_long_ends(authority: rpc.CertificateAuthority) -> None:
    slow, stop = (
        rpc.RpcHandler(
            message=state_transfer.ReadState, handle=lambda call: stop.wait(20) and state_transfer.StateChunk()
        ),
        threading.Event(),
    )
    shelf = state_transfer.StateServer()
    shelf.publish("model", {"a": np.ones(50_000_000, np.uint8)})
    describe = shelf.handlers()[0]
    with serving(trust(authority, "server", "0"), describe, slow) as server:
        with (
            connect(server, trust(authority, "worker", "1")) as client,
            pytest.raises(DeadlineError, match=r"state\.read"),
        ):
            state_transfer.fetch_state(client, "model", timeout_s=3.0)  # enough for the description
        stop.set()


def test_a_lost_peer_ends_the_transfer(authority: rpc.CertificateAuthority) -> None:
    shelf = state_transfer.StateServer()
    shelf.publish("model", {"a": np.ones(50_000_000, np.uint8)})
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(RpcError, match="connection"),
    ):
        state_transfer.fetch_state(client, "model", timeout_s=60, check=lambda _: server.close())


def test_a_state_that_is_not_offered_yet_is_waited_for(authority: rpc.CertificateAuthority) -> None:
    shelf, source = state_transfer.StateServer(), model()
    asked = threading.Event()
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        with pytest.raises(RemoteError, match="state: 'model', expected one of none"):
            state_transfer.fetch_state(client, "model", timeout_s=60, check=lambda _: asked.set())
        assert not asked.is_set()
        later = threading.Timer(0.05, shelf.publish, ("model", source))
        later.start()
        received = state_transfer.fetch_state(client, "model", timeout_s=120, wait_s=60)
        later.join()
    assert_same(received, source)


def test_a_state_is_read_whole_at_any_pace(authority: rpc.CertificateAuthority) -> None:
    shelf, source = state_transfer.StateServer(), model()
    told: list[int] = []

    class Steps:
        """Chunks that grow."""

        window = 2

        @property
        def chunk_bytes(self) -> int:
            return 100_000 * (1 + len(told))

        def wait_after_chunk(self, num_bytes: int, seconds: float) -> None:
            assert seconds >= 0
            told.append(num_bytes)

    shelf.publish("model", source)
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        received = state_transfer.fetch_state(client, "model", timeout_s=60, throttle=Steps())
    assert sum(told) == sum(array.nbytes for array in source.values())
    assert len(set(told)) > 3
    assert_same(received, source)
