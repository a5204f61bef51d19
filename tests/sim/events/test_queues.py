"""Links that serve bursts in turn, looked at one by one: times that can be computed by hand."""

import itertools
import math

import pytest

from ringweave.sim.scenario import HostModel
from ringweave.sim.streams import BurstyStream, QueuedNetwork, VirtualClock, normal_scores

FAST, SLOW = 100.0, 50.0


def queues(*rates: float, **settings: float) -> tuple[VirtualClock, QueuedNetwork]:
    clock = VirtualClock()
    return clock, QueuedNetwork(clock, rates, 0.5, HostModel(**({"burst_bytes": 10.0} | settings)))


def sent(net: QueuedNetwork, route: tuple[int, ...], *sizes: float, posted: float | None = None) -> BurstyStream:
    """A stream on which these messages are sent now; all of them are posted, or so many bytes."""
    stream = net.open_stream(route, nobody)
    net.post_receive(stream, sum(sizes) if posted is None else posted)
    for size in sizes:
        net.send_message(stream, size)
    return stream


def nobody() -> None:
    """Wants to know of bursts."""


def test_who_receives_is_told_of_every_burst_but_those_that_it_waits_for() -> None:
    clock, net = queues(FAST, FAST)
    times, arrived = list[float](), list[float]()
    stream = net.open_stream((0, 1), lambda: times.append(clock.now_s))
    net.post_receive(stream, 30)
    net.send_message(stream, 30)
    net.when_arrived(stream, 0, arrived.append)
    clock.run(net.settle)
    assert times == pytest.approx([20 / FAST, 30 / FAST]), "the third burst ends the message, which is told otherwise"
    assert arrived == pytest.approx([40 / FAST + 0.5])


def test_a_burst_is_forwarded_when_it_is_there_as_a_whole() -> None:
    clock, net = queues(FAST, FAST)
    stream = sent(net, (0, 1), 100, 50)
    clock.run(net.settle)
    assert stream.arrivals == pytest.approx([(100 + 10) / FAST + 0.5, (150 + 10) / FAST + 0.5])
    assert net.carried == [150, 150]


def test_a_switch_keeps_what_the_next_link_is_too_slow_for_up_to_a_window() -> None:
    """Links of 0 and 2 are busy with two streams each: with a queue between them neither waits for the other."""
    times = {}
    for window in (10.0, 1000.0):
        clock, net = queues(FAST, SLOW, FAST, window_bytes=window)
        slow, quick = sent(net, (0, 1), 200), sent(net, (0, 2), 300)
        clock.run(net.settle)
        times[window] = slow.arrivals[0], quick.arrivals[0]
        assert net.carried == [500, 200, 300]
    assert times[1000.0][0] == pytest.approx(0.5 + 10 / FAST + 200 / SLOW)  # its slow link is never idle
    assert times[1000.0][1] < times[10.0][1]
    assert max(times[1000.0]) < max(times[10.0])


def test_streams_of_a_node_take_turns_and_those_that_meet_get_alike() -> None:
    clock, net = queues(FAST, SLOW)
    first, second = sent(net, (0, 1), 500), sent(net, (0, 1), 500)
    clock.run(net.settle)
    assert abs(first.arrivals[0] - second.arrivals[0]) <= 2 * 10 / SLOW
    assert max(first.arrivals[0], second.arrivals[0]) == pytest.approx(0.5 + 10 / FAST + 1000 / SLOW)


def at_half_time(*, unevenness: float, num_senders: int) -> list[float]:
    """Delivered of each stream into one slow link, when half of all should be there."""
    clock, net = queues(*[FAST] * num_senders, SLOW, window_bytes=200.0, unevenness=unevenness)
    streams = [net.open_stream((sender, num_senders), nobody) for sender in range(num_senders)]
    for stream in streams:
        net.post_receive(stream, 10_000)
    for stream in streams:
        net.send_message(stream, 10_000)
    found = list[float]()
    clock.call_at(num_senders * 10_000 / SLOW / 2, lambda: found.extend(stream.delivered for stream in streams))
    clock.run(net.settle)
    assert all(stream.arrivals for stream in streams)
    assert sum(found) == pytest.approx(num_senders * 5_000, abs=30)  # the link was never idle
    return found


def test_streams_that_meet_get_what_their_windows_are_of_all_windows() -> None:
    assert max(at_half_time(unevenness=0.0, num_senders=2)) <= 5_010
    got = at_half_time(unevenness=0.5, num_senders=2)
    wanted = [math.exp(0.5 * score) for score in normal_scores(2)]
    assert max(got) / min(got) == pytest.approx(max(wanted) / min(wanted), rel=0.1)
    assert got == at_half_time(unevenness=0.5, num_senders=2)
    many = at_half_time(unevenness=0.5, num_senders=7)
    assert max(many) / min(many) > max(got) / min(got) * 1.5


def test_streams_of_one_node_stay_even_whatever_their_windows_are() -> None:
    """Its own link, as fast as the one behind it, lets them take turns."""
    clock, net = queues(SLOW, FAST, window_bytes=200.0, unevenness=1.0)
    streams = [net.open_stream((0, 1), nobody) for _ in range(4)]
    for stream in streams:
        net.post_receive(stream, 1_000)
    for stream in streams:
        net.send_message(stream, 1_000)
    clock.run(net.settle)
    ends_s = [stream.arrivals[0] for stream in streams]
    assert max(ends_s) - min(ends_s) <= len(streams) * 2 * 10 / SLOW


def left_at_half_time(*to: float, redeal_s: float = math.inf) -> list[float]:
    """Delivered of each stream from one slow node into links of these rates, when half of all should be there."""
    clock, net = queues(SLOW, *to, uneven_turns=0.65, redeal_s=redeal_s)
    streams = [net.open_stream((0, 1 + receiver), nobody) for receiver in range(len(to))]
    for stream in streams:
        net.post_receive(stream, 10_000)
    for stream in streams:
        net.send_message(stream, 10_000)
    found = list[float]()
    clock.call_at(len(to) * 10_000 / SLOW / 2, lambda: found.extend(stream.delivered for stream in streams))
    clock.run(net.settle)
    assert sum(found) == pytest.approx(len(to) * 5_000, abs=100)  # the link was never idle
    return found


def test_streams_out_of_the_slowest_link_of_their_way_take_uneven_turns() -> None:
    even = left_at_half_time(SLOW, SLOW, SLOW)
    assert max(even) <= min(even) * 1.02
    found = left_at_half_time(FAST, FAST, FAST)
    wanted = [max(1, round(8 * math.exp(0.65 * score))) for score in normal_scores(3)]
    assert max(found) / min(found) == pytest.approx(max(wanted) / min(wanted), rel=0.1)
    dealt_anew = left_at_half_time(FAST, FAST, FAST, redeal_s=10.0)
    assert max(dealt_anew) / min(dealt_anew) < 1.2


def test_scores_are_spread_as_draws_would_be_and_neighbours_are_not_alike() -> None:
    assert normal_scores(1) == (0.0,)
    assert sorted(normal_scores(7)) == pytest.approx([-1.364, -0.758, -0.353, 0, 0.353, 0.758, 1.364], abs=0.01)
    scores = normal_scores(100)
    assert sum(scores) == pytest.approx(0, abs=1e-9)
    assert all(abs(one - next_) > 0.3 for one, next_ in itertools.pairwise(scores))


def test_who_is_not_received_is_stopped() -> None:
    clock, net = queues(FAST, receive_buffer_bytes=20.0)
    stream = sent(net, (0,), 100, posted=30.0)
    clock.run(net.settle)
    assert (stream.arrivals, stream.delivered) == ([], 50)
    net.post_receive(stream, 70)
    clock.run(net.settle)
    assert stream.delivered == 100
    assert len(stream.arrivals) == 1


def test_a_message_has_left_when_the_kernel_has_the_rest_of_it() -> None:
    clock, net = queues(FAST, send_buffer_bytes=40.0)
    stream = sent(net, (0,), 100)
    left = list[float]()
    net.when_sent(stream, 100, left.append)
    net.when_sent(net.open_stream((0,), nobody), 0, left.append)
    assert left == [0.0]
    clock.run(net.settle)
    assert left == [0.0, pytest.approx(60 / FAST)]


def test_a_pause_fills_the_bucket_and_what_it_holds_passes_at_once() -> None:
    clock, net = queues(FAST, bucket_bytes=30.0)
    stream = sent(net, (0,), 100)
    clock.run(net.settle)
    assert stream.arrivals == [pytest.approx(70 / FAST + 0.5)]
    begin_s = clock.now_s = 10.0
    net.post_receive(stream, 20)
    net.send_message(stream, 20)
    clock.run(net.settle)
    assert stream.arrivals[1] == begin_s + 0.5


def test_a_rate_that_changes_counts_from_then_on() -> None:
    clock, net = queues(FAST)
    stream = sent(net, (0,), 100)
    clock.call_at(0.55, lambda: net.set_capacity(0, SLOW))
    clock.run(net.settle)
    assert stream.arrivals == [pytest.approx(0.55 + 45 / SLOW + 0.5)]


def test_a_cut_link_carries_nothing_until_it_is_mended() -> None:
    clock, net = queues(FAST)
    stream = sent(net, (0,), 100)
    clock.call_at(0.35, lambda: net.set_capacity(0, 0.0))
    clock.run(net.settle)
    assert stream.arrivals == []
    clock.now_s = 7.0
    net.set_capacity(0, FAST)
    clock.run(net.settle)
    assert stream.arrivals == [pytest.approx(7.0 + 65 / FAST + 0.5)]


def test_what_is_lost_with_a_stream_holds_up_nobody_for_ever() -> None:
    clock, net = queues(FAST)
    lost, other = sent(net, (0,), 100), sent(net, (0,), 100)
    net.close_stream(lost)
    told = list[float]()
    net.when_arrived(other, 0, told.append)
    clock.run(net.settle)
    assert lost.arrivals == []
    assert told == [pytest.approx((100 + 20) / FAST + 0.5)]  # two bursts of the lost one were under way


def test_loads_are_told_when_a_link_gets_busy_and_idle() -> None:
    clock, net = queues(FAST, SLOW)
    told = list[tuple[int, float]]()
    net.note_rate = lambda link, rate: told.append((link, rate))
    sent(net, (0, 1), 10)
    clock.run(net.settle)
    assert told == [(0, FAST), (0, 0.0), (1, SLOW), (1, 0.0)]


@pytest.mark.parametrize("wrong", [{"burst_bytes": 0.0}, {"window_bytes": -1.0}, {"burst_bytes": math.nan}])
def test_bursts_and_windows_of_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected bursts and windows of more than 0 bytes"):
        HostModel(**wrong)


@pytest.mark.parametrize("wrong", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["unevenness", "uneven_turns"])
def test_an_unevenness_that_is_none(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"{name} {wrong}, expected a finite number, not negative"):
        HostModel(**{name: wrong})


@pytest.mark.parametrize("wrong", [0.0, math.nan])
def test_turns_that_are_never_dealt(wrong: float) -> None:
    with pytest.raises(ValueError, match=f"redeal_s {wrong}, expected more than 0 s"):
        HostModel(redeal_s=wrong)
