import random
import socket
from pathlib import Path

import pytest

from ringweave.errors import LaunchError
from ringweave.launcher import node_context


def test_ports_that_the_kernel_gives_away_are_no_candidates() -> None:
    assert node_context.non_ephemeral_ports((32_768, 60_999)) == [*range(10_000, 32_768), *range(61_000, 65_536)]
    assert node_context.non_ephemeral_ports((1024, 65_535)) == []


def test_a_free_port_can_be_listened_on() -> None:
    port = node_context.free_port(random.Random())
    low, high = map(int, node_context.EPHEMERAL_RANGE.read_text().split())
    assert not low <= port <= high
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(node_context, "non_ephemeral_ports", lambda _: [taken.getsockname()[1]])
        with pytest.raises(LaunchError, match=r"no free port between 10000 and 65535\. End listening programs\."):
            node_context.free_port(random.Random())


def test_where_the_kernel_does_not_say_its_default_is_assumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node_context, "EPHEMERAL_RANGE", tmp_path / "absent")
    assert not 32_768 <= node_context.free_port(random.Random()) <= 60_999
