import contextlib
import errno
import socket
from collections.abc import Iterator

import pytest

from ringweave.membership import service


@pytest.fixture
def stuck() -> Iterator[str]:
    """Where the kernel takes no connection any more: as on a node that is cut off, nothing answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        with contextlib.ExitStack() as callers:
            for _ in range(64):
                caller = callers.enter_context(socket.socket())
                caller.settimeout(0.2)
                try:
                    caller.connect(listener.getsockname())
                except TimeoutError:
                    break
            else:
                pytest.fail("a queue of none that takes 64")
            yield "{} {}".format(*listener.getsockname())


@pytest.fixture
def listening() -> Iterator[str]:
    """Where a process listens that is too busy to accept anybody."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield "{} {}".format(*listener.getsockname())


@pytest.fixture
def refusing() -> str:
    """Where a process has listened that has ended."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return "{} {}".format(*bound.getsockname())


def test_whoever_has_ended_or_whose_node_answers_nothing_is_unreachable(
    stuck: str, listening: str, refusing: str
) -> None:
    places = {"0.0": stuck, "1.0": listening, "2.0": refusing, "3.0": stuck}
    assert service.unreachable_members(places) == {"0.0": False, "2.0": True, "3.0": False}


def test_whoever_cannot_be_asked_may_be_there(stuck: str) -> None:
    places = {"0.0": "no-address 4711", "1.0": "127.0.0.1 99999", "2.0": "127.0.0.1 x", "3.0": "", "4.0": stuck}
    assert service.unreachable_members(places) == {"4.0": False}


def test_nobody_is_asked_for() -> None:
    assert service.unreachable_members({}) == {}


def test_a_relay_that_refuses_proves_no_end() -> None:
    with socket.socket() as bound:
        bound.bind(("127.64.0.9", 0))
        relayed = "{} {}".format(*bound.getsockname())
    assert service.unreachable_members({"0.0": relayed}) == {"0.0": False}


@pytest.mark.parametrize(
    ("error", "expected"),
    [(errno.ENETUNREACH, {"0.0": False}), (errno.ECONNREFUSED, {"0.0": True}), (errno.EADDRNOTAVAIL, {})],
)
def test_that_there_is_no_way_may_be_known_at_once(
    monkeypatch: pytest.MonkeyPatch, listening: str, error: int, expected: dict[str, bool]
) -> None:
    monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: error)
    assert service.unreachable_members({"0.0": listening}) == expected


def test_who_answers_the_second_time_is_there(monkeypatch: pytest.MonkeyPatch, listening: str, stuck: str) -> None:
    places = iter([stuck, listening])
    ask = service._start_probe
    monkeypatch.setattr(service, "_start_probe", lambda _: ask(next(places)))
    assert service.unreachable_members({"0.0": stuck}) == {}
