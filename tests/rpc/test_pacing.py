import threading
from collections.abc import Callable

import pytest

from ringweave.errors import DeadlineError
from ringweave.rpc.state_transfer import FULL_SPEED_WINDOW, STATE_CHUNK_BYTES, BackgroundThrottle, NoThrottle
from tests.rpc.link_model import Link, read

MEGABYTE = 1_000_000
RATE = 25e6 / 8
BURST_BYTES = 80 * 1024
"""What a lab's link lets through at once."""


def fresh(haste: float = 0.0) -> BackgroundThrottle:
    return BackgroundThrottle(lambda: haste, threading.Event())


def giving_way(haste: float = 0.0) -> BackgroundThrottle:
    """After a first chunk, which says nothing of how fast the link is."""
    pace = fresh(haste)
    assert pace.pause_s(MEGABYTE, 0.03) == 0.0
    return pace


def test_at_full_speed_chunks_are_large_and_the_next_is_asked_for_before_the_last_is_there() -> None:
    pace = NoThrottle()
    assert (pace.window, pace.chunk_bytes) == (FULL_SPEED_WINDOW, STATE_CHUNK_BYTES)
    pace.wait_after_chunk(STATE_CHUNK_BYTES, 10.0)


def test_who_gives_way_uses_a_link_that_is_idle_without_a_pause() -> None:
    pace = giving_way()
    assert pace.window == 1
    assert [pace.pause_s(MEGABYTE, 0.1) for _ in range(5)] == [0.0] * 5


def test_chunks_take_a_twentieth_of_a_second_within_bounds() -> None:
    pace = giving_way()
    assert pace.chunk_bytes == 64 << 10
    pace.pause_s(MEGABYTE, 1.0)
    assert pace.chunk_bytes == 64 << 10
    pace.pause_s(MEGABYTE, 0.1)
    assert pace.chunk_bytes == 500_000
    pace.pause_s(MEGABYTE, 1e-4)
    assert pace.chunk_bytes == STATE_CHUNK_BYTES


@pytest.mark.parametrize(("haste", "pause_s"), [(0.0, 0.75), (0.5, 0.375), (1.0, 0.0), (3.0, 0.0)])
def test_where_others_use_the_link_it_pauses_unless_there_is_haste(haste: float, pause_s: float) -> None:
    pace = giving_way(haste)
    pace.pause_s(MEGABYTE, 0.1)
    assert pace.pause_s(MEGABYTE, 0.25) == pytest.approx(pause_s)
    assert pace.pause_s(MEGABYTE, 0.1) == 0.0


@pytest.mark.parametrize("burst_bytes", [0, BURST_BYTES, 300_000])
@pytest.mark.parametrize("rate", [RATE, 40 * RATE])
def test_alone_on_a_link_it_uses_it_though_more_passes_at_once_after_a_rest(rate: float, burst_bytes: float) -> None:
    num_bytes = 5 * rate
    took_s = read(Link(rate, burst_bytes), fresh(), num_bytes)
    assert (num_bytes - burst_bytes) / rate >= 0.9 * took_s


@pytest.mark.parametrize("num_others", [1, 3, 7])
def test_beside_others_it_takes_less_of_a_link_than_they_do(num_others: int) -> None:
    """Which are there after it has seen the link alone for a moment, for as long as it takes."""
    link = Link(RATE, BURST_BYTES, lambda now_s: 0 if now_s < 0.3 else num_others)
    read(link, fresh(), 3e6)
    assert link.taken_s <= 0.45 * link.contended_s / (1 + num_others)


def bursts(num_others: int, idle_s: float, offset_s: float) -> Callable[[float], int]:
    """Collectives of 0.4 s, with so much time in between."""
    return lambda now_s: 0 if (now_s + offset_s) % (0.4 + idle_s) < idle_s else num_others


@pytest.mark.parametrize("num_others", [1, 2, 7])
@pytest.mark.parametrize("offset_s", [0.0, 0.2])
def test_between_bursts_of_others_it_uses_more_of_the_link_than_in_them(num_others: int, offset_s: float) -> None:
    link = Link(RATE, BURST_BYTES, bursts(num_others, 0.15, offset_s))
    took_s = read(link, fresh(), 3e6)
    idle_part = (3e6 / RATE - link.taken_s) / (took_s - link.contended_s)
    assert link.taken_s <= 0.45 * link.contended_s / (1 + num_others)
    assert idle_part > link.taken_s / link.contended_s


def test_small_pieces_are_judged_together() -> None:
    pace = giving_way()
    pace.pause_s(MEGABYTE, 0.1)
    assert pace.pause_s(40_000, 0.02) == 0.0
    assert pace.pause_s(40_000, 0.02) == pytest.approx(0.12)


def test_a_link_that_has_become_slower_is_known_after_a_while() -> None:
    pace = giving_way()
    pace.pause_s(MEGABYTE, 0.1)
    pauses = [pace.pause_s(MEGABYTE, 0.4) for _ in range(60)]
    assert pauses[0] > 0
    assert pauses[-1] == 0.0


def test_what_nobody_needs_any_more_is_given_up() -> None:
    ended = threading.Event()
    pace = BackgroundThrottle(lambda: 0.0, ended)
    pace.wait_after_chunk(MEGABYTE, 0.1)
    ended.set()
    with pytest.raises(DeadlineError, match=r"^state: 'unfinished', expected all of it\. It was given up\.$"):
        pace.wait_after_chunk(MEGABYTE, 0.1)


class Looks(threading.Event):
    """Nobody ends it; it notes what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s.append(timeout or 0.0)
        return False


@pytest.mark.parametrize(("hastes", "waited_s"), [([0.0] * 99, 2.0), ([0.0, 0.0, 0.0, 1.0], 0.3), ([0.5] * 99, 1.0)])
def test_after_a_chunk_that_a_cut_held_up_the_pause_is_short_and_ends_when_others_wait(
    hastes: list[float], waited_s: float
) -> None:
    looks, left = Looks(), iter(hastes)
    pace = BackgroundThrottle(lambda: next(left), looks)
    for seconds in (0.03, 0.1):
        pace.wait_after_chunk(MEGABYTE, seconds)
    assert sum(looks.waited_s) == 0
    pace.wait_after_chunk(MEGABYTE, 6.5)
    assert sum(looks.waited_s) == pytest.approx(waited_s)
