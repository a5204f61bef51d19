import threading

import pytest

from ringweave.errors import DeadlineError
from ringweave.wire.pacing import CHUNK_BYTES, WINDOW, FullSpeed, GivingWay

MEGABYTE = 1_000_000


def giving_way(haste: float = 0.0) -> GivingWay:
    return GivingWay(lambda: haste, threading.Event())


def test_at_full_speed_chunks_are_large_and_the_next_is_asked_for_before_the_last_is_there() -> None:
    pace = FullSpeed()
    assert (pace.window, pace.chunk_bytes) == (WINDOW, CHUNK_BYTES)
    pace.wait(CHUNK_BYTES, 10.0)


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
    assert pace.chunk_bytes == CHUNK_BYTES


@pytest.mark.parametrize(("haste", "pause_s"), [(0.0, 0.75), (0.5, 0.375), (1.0, 0.0), (3.0, 0.0)])
def test_where_others_use_the_link_it_pauses_unless_there_is_haste(haste: float, pause_s: float) -> None:
    pace = giving_way(haste)
    pace.pause_s(MEGABYTE, 0.1)
    assert pace.pause_s(MEGABYTE, 0.25) == pytest.approx(pause_s)
    assert pace.pause_s(MEGABYTE, 0.1) == 0.0


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
    pace = GivingWay(lambda: 0.0, ended)
    pace.wait(MEGABYTE, 0.1)
    ended.set()
    with pytest.raises(DeadlineError, match=r"^state: 'unfinished', expected all of it\. It was given up\.$"):
        pace.wait(MEGABYTE, 0.1)
