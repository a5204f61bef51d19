import random
import socket
from pathlib import Path

import pytest

from ringweave.errors import LaunchError
from ringweave.launch.local import ports


def test_ports_that_the_kernel_gives_away_are_no_candidates() -> None:
    assert ports.candidates((32_768, 60_999)) == [*range(10_000, 32_768), *range(61_000, 65_536)]
    assert ports.candidates((1024, 65_535)) == []


def test_a_free_port_can_be_listened_on() -> None:
    port = ports.free_port(random.Random())
    low, high = map(int, ports.EPHEMERAL_RANGE.read_text().split())
    assert not low <= port <= high
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(ports, "candidates", lambda _: [taken.getsockname()[1]])
        with pytest.raises(LaunchError, match=r"no free port between 10000 and 65535\. End programs that listen\."):
            ports.free_port(random.Random())


def test_where_the_kernel_does_not_say_its_default_is_assumed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL_RANGE", tmp_path / "absent")
    assert not 32_768 <= ports.free_port(random.Random()) <= 60_999
