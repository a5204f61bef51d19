import threading
from collections.abc import Mapping

import numpy as np
import pytest

from ringweave import wire
from ringweave.errors import DeadlineError, MessageError, RemoteError, WireError
from ringweave.wire import states
from tests.wire.parts import connect, serving, trust


def model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "weight": rng.random((1100, 1000)),
        "bias": rng.random(3, dtype=np.float32),
        "steps": np.array(7),
        "empty": np.zeros((0, 4)),
    }


def like(source: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.full_like(array, 1) for name, array in source.items()}


def serving_states(authority: wire.Authority, shelf: states.Shelf):
    return serving(trust(authority, "worker", "0"), *shelf.handlers())


def connected(authority: wire.Authority, server: wire.Server) -> wire.Client:
    return wire.Client.connect("127.0.0.1", server.port, trust(authority, "worker", "1"), role="worker")


def test_state_arrives_whole_in_place(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()
    room = like(source)
    shelf.offer("model", source)
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        states.pull(client, "model", lambda description: room, timeout_s=60)
    for name, array in source.items():
        assert np.array_equal(room[name], array), name


def test_the_description_says_what_memory_is_needed(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()
    rooms: dict[str, bytearray] = {}

    def place(description: states.Description) -> dict[str, bytearray]:
        rooms.update({piece.name: bytearray(piece.num_bytes) for piece in description.pieces})
        return rooms

    shelf.offer("model", source)
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        states.pull(client, "model", place, timeout_s=60)
    assert {name: bytes(room) for name, room in rooms.items()} == {
        name: each.tobytes() for name, each in source.items()
    }


def test_state_that_changes_while_it_is_read_is_found_out(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()

    def place(description: states.Description) -> dict[str, np.ndarray]:
        source["bias"][1] += 1
        return like(source)

    shelf.offer("model", source)
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(MessageError, match=r"state model, bias: 'another check', .*It changed while it was read"),
    ):
        states.pull(client, "model", place, timeout_s=60)


def test_state_that_is_replaced_while_it_is_read_is_not_mixed(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()

    def place(description: states.Description) -> dict[str, np.ndarray]:
        shelf.offer("model", model())
        return like(source)

    shelf.offer("model", source)
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(RemoteError, match=r"offer of state model: 1, expected the newest, 2\. Begin again"),
    ):
        states.pull(client, "model", place, timeout_s=60)


def test_memory_of_another_model_is_refused_before_anything_is_sent(authority: wire.Authority) -> None:
    shelf = states.Shelf()
    shelf.offer("model", model())
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        with pytest.raises(MessageError, match=r"memory for a state: .*'bias', 8.*Load it into the same model"):
            states.pull(client, "model", lambda _: model() | {"bias": np.zeros(1)}, timeout_s=60)
        assert server.peers()[0].traffic["messages_received"] == 2


def test_a_state_that_nobody_offers_is_named(authority: wire.Authority) -> None:
    shelf = states.Shelf()
    shelf.offer("model", {})
    shelf.offer("old", {})
    shelf.withdraw("old")
    with (
        serving_states(authority, shelf) as server,
        connected(authority, server) as client,
        pytest.raises(RemoteError, match=r"state: 'old', expected one of model\. Ask a peer that has it\."),
    ):
        states.pull(client, "old", lambda _: {}, timeout_s=60)


@pytest.mark.parametrize(
    ("piece", "first", "size"), [(0, -1, 1), (0, 0, 101), (0, 100, 1), (1, 0, 1), (-1, 0, 1), (0, 5, -1)]
)
def test_no_byte_outside_a_state_is_read(authority: wire.Authority, piece: int, first: int, size: int) -> None:
    shelf = states.Shelf()
    shelf.offer("model", {"a": bytes(100)})
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        read = states.Read(name="model", offer=1, piece=piece, first_byte=first, num_bytes=size)
        with pytest.raises(RemoteError, match=r"slice of state model: .*expected one that lies within a buffer"):
            client.call(read, timeout_s=60)


@pytest.mark.slow
def test_a_transfer_that_takes_too_long_ends_and_leaves_the_memory_alone(authority: wire.Authority) -> None:
    slow, stop = (
        wire.Handler(message=states.Read, handle=lambda call: stop.wait(20) and states.Chunk()),
        threading.Event(),
    )
    shelf = states.Shelf()
    shelf.offer("model", {"a": np.ones(50_000_000, np.uint8)})
    describe = shelf.handlers()[0]
    room = np.zeros(50_000_000, np.uint8)
    with serving(trust(authority, "server", "0"), describe, slow) as server:
        with (
            connect(server, trust(authority, "worker", "1")) as client,
            pytest.raises(DeadlineError, match=r"state\.read"),
        ):
            states.pull(client, "model", lambda _: {"a": room}, timeout_s=3.0)  # enough for the description
        stop.set()
    assert not room.any()


def test_a_lost_peer_ends_the_transfer(authority: wire.Authority) -> None:
    shelf = states.Shelf()
    shelf.offer("model", {"a": np.ones(50_000_000, np.uint8)})
    with serving_states(authority, shelf) as server, connected(authority, server) as client:

        def place(description: states.Description) -> dict[str, np.ndarray]:
            server.close()
            return {"a": np.zeros(50_000_000, np.uint8)}

        with pytest.raises(WireError, match="connection"):
            states.pull(client, "model", place, timeout_s=60)


def test_a_state_that_is_not_offered_yet_is_waited_for(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()
    room = like(source)
    asked = threading.Event()

    def place(_: states.Description) -> dict[str, np.ndarray]:
        asked.set()
        return room

    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        with pytest.raises(RemoteError, match="state: 'model', expected one of none"):
            states.pull(client, "model", place, timeout_s=60)
        assert not asked.is_set()
        later = threading.Timer(0.05, shelf.offer, ("model", source))
        later.start()
        states.pull(client, "model", place, timeout_s=120, wait_s=60)
        later.join()
    assert np.array_equal(room["weight"], source["weight"])


def test_a_state_is_read_whole_at_any_pace(authority: wire.Authority) -> None:
    shelf, source = states.Shelf(), model()
    room, told = like(source), []

    class Steps:
        """Chunks that grow."""

        window = 2

        @property
        def chunk_bytes(self) -> int:
            return 100_000 * (1 + len(told))

        def wait(self, num_bytes: int, seconds: float) -> None:
            assert seconds >= 0
            told.append(num_bytes)

    shelf.offer("model", source)
    with serving_states(authority, shelf) as server, connected(authority, server) as client:
        states.pull(client, "model", lambda _: room, timeout_s=60, pace=Steps())
    assert sum(told) == sum(array.nbytes for array in source.values())
    assert len(set(told)) > 3
    for name, array in source.items():
        assert np.array_equal(room[name], array), name
