"""Losses that a verdict finds in measured steps, and those that it must not find."""

from typing import Any

import pytest

from ringweave.telemetry import verdict
from tests.telemetry.examples import example

STEPS = 100
QUIET = {"throttled_s": 0.0, "collections_s": 0.0, "major_faults": 0, "memory_stall_s": 0.0, "disk_stall_s": 0.0}
DISK = {"disk_stall_s": 3.5, "read_bytes": 4096000}
PREPARED = {"time": 0.0, "kind": "training_prepared", "mode": "sync"}


def window(rank: int, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Ten seconds of a rank: 60 ms of computing and 40 ms of everything else in each of 100 steps."""
    event = {"kind": "steps_measured", "time": 10.0 * number + 0.01 * rank, "rank": rank, "node": f"n{rank}"}
    event |= {"steps": STEPS, "samples": 3200, "wall_s": 10.0, "longest_s": 0.11, "processor_s": 7.0}
    event |= {"input_s": 0.1, "input_processor_s": 0.05, "compute_s": 6.0, "forward_s": 2.0}
    event |= {"exchange_s": 1.5, "update_s": 2.0, "read_bytes": 0, "memory_bytes": 2**30, **QUIET}
    return event | changes


def healthy(num_ranks: int = 4, num_windows: int = 3) -> list[dict[str, Any]]:
    return [PREPARED, *(window(rank, number) for number in range(num_windows) for rank in range(num_ranks))]


def slow(rank: int, part: str, more_s: float, **changes: Any) -> list[dict[str, Any]]:
    """The same for four ranks, one of which needs so many seconds more in ten; the others wait."""
    events = healthy()
    for event in events[1:]:
        event["wall_s"] += more_s
        event["exchange_s" if event["rank"] != rank else part] += more_s
        event.update(changes if event["rank"] == rank else {})
    return events


def test_a_healthy_run_loses_nothing() -> None:
    events = healthy()
    events[3]["compute_s"] += 0.3  # noise
    assert verdict.find_losses(events) == []
    assert verdict.headline([]) == ""
    assert verdict.find_losses([]) == []
    assert verdict.find_losses([PREPARED, window(0)]) == [], "one rank waits for nobody"


def test_a_few_steps_say_nothing() -> None:
    events = slow(2, "compute_s", 4.0)
    for event in events[1:]:
        event["steps"] = 6
    assert verdict.find_losses(events) == []


@pytest.mark.parametrize(
    ("part", "changes", "cause", "text"),
    [
        (
            "compute_s",
            {"forward_s": 4.0},
            "compute",
            "its computing takes 100 ms a step, the others' 60 ms. Use --mode",
        ),
        ("compute_s", {"forward_s": 6.0}, "forward", "its forward pass takes 60 ms a step, the others' 20 ms."),
        ("compute_s", {}, "backward", "its backward pass takes 80 ms a step, the others' 40 ms. Use --mode balanced"),
        ("input_s", {}, "input", "its wait for a batch takes 41 ms a step, the others' 1 ms."),
        ("input_s", {"input_processor_s": 3.0, **DISK}, "input", "Of these the script's thread computes for 30 ms."),
        ("input_s", DISK, "disk", "A disk is waited for 35 ms, for 40 KiB a step. Copy its data to a faster disk"),
        ("input_s", {"disk_stall_s": 3.5}, "input", "wait for a batch"),
        ("input_s", {"read_bytes": 4096000}, "input", "wait for a batch"),
        ("update_s", {}, "update", "its optimizer step takes 60 ms a step, the others' 20 ms."),
        ("compute_s", {"throttled_s": 3.0}, "quota", "30 ms of it are pauses by the CPU quota of its control group."),
        ("compute_s", {"collections_s": 2.5}, "collections", "25 ms of it are Python's garbage collections."),
        ("compute_s", {"major_faults": 5000}, "memory", "It reads 50 pages a step from a disk. Give it more memory"),
    ],
)
def test_the_slow_rank_and_its_cause_are_named(part: str, changes: dict[str, Any], cause: str, text: str) -> None:
    (loss,) = verdict.find_losses(slow(2, part, 4.0, **changes))
    assert (loss.cause, loss.rank) == (cause, 2)
    assert loss.cost == pytest.approx(0.75 * 4.0 / 14.0), "three of four ranks wait for four of fourteen seconds"
    assert loss.text().startswith(
        f"{cause}: 21% of the time is lost (measured). The others wait for rank 2 on node n2: "
    )
    assert text in loss.text()
    assert verdict.headline([loss]) == f"ringweave: {loss.text()}\n"


def test_time_between_steps_that_one_rank_needs_is_its_script_s() -> None:
    events = slow(1, "wall_s", 0.0)
    for event in events[1:]:
        event["wall_s"] += 3.0
        event["exchange_s"] += 3.0 if event["rank"] != 1 else 0.0
    (loss,) = verdict.find_losses(events)
    assert (loss.cause, loss.rank) == ("script", 1)
    assert "its time between steps takes 34 ms a step, the others' 4 ms" in loss.evidence


def test_a_pause_that_came_once_is_no_loss() -> None:
    events = healthy(num_windows=7)
    for event in events[1:]:
        if event["time"] // 10 == 4:
            event["wall_s"] += 8.0
            event["script_s" if event["rank"] == 0 else "exchange_s"] = event["exchange_s"] + 8.0
    assert verdict.find_losses(events) == []


def traffic(rank: int, number: int, links: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Ten seconds of a rank with 100 collectives, and megabytes per second to each peer for half a second."""
    event = {"kind": "traffic_measured", "time": 10.0 * number + 0.01 * rank, "rank": rank, "node": f"n{rank}"}
    event |= {"group": "0", "wall_s": 10.0, "in_flight_s": 2.0, "collectives": STEPS, "bytes": 10**8, **QUIET}
    rows = {peer: {"sent_bytes": int(rate * 5e6), "busy_s": 5.1, "limited_s": 0.1} for peer, rate in links.items()}
    return event | {"links": rows, "read_bytes": 0} | changes


def ring_traffic(slow: dict[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Traffic of a ring of four, 100 MB/s but on the slow links."""
    pairs = [(rank, (rank + 1) % 4) for rank in range(4)]
    return [
        traffic(rank, number, {str(peer): slow.get((rank, peer), 100.0)}) for number in range(3) for rank, peer in pairs
    ]


def with_long_exchanges() -> list[dict[str, Any]]:
    events = healthy()
    for event in events[1:]:
        event |= {"exchange_s": 5.0, "wall_s": 13.5}
    return events


@pytest.mark.parametrize(
    ("slow_links", "cause", "rank", "peer"),
    [
        ({(1, 2): 10.0}, "link", 1, 2),
        ({(1, 2): 10.0, (0, 1): 12.0}, "nic", 1, None),
        ({(1, 2): 10.0, (3, 0): 12.0}, "link", None, None),
        ({(1, 2): 60.0}, "link", None, None),
    ],
)
def test_slow_links_are_told_from_slow_nics(
    slow_links: dict[tuple[int, int], float], cause: str, rank: int | None, peer: int | None
) -> None:
    (loss,) = verdict.find_losses([*with_long_exchanges(), *ring_traffic(slow_links)])
    assert (loss.cause, loss.rank, loss.peer) == (cause, rank, peer)
    if slow_links[1, 2] == 10.0:
        assert loss.cost == pytest.approx(0.9 * 5.0 / 13.5)
        assert "10 MB/s from rank 1 to rank 2" in loss.evidence
        assert "beside 100 MB/s on others" in loss.evidence


def test_links_that_are_idle_or_absent_are_not_blamed() -> None:
    idle = ring_traffic({(1, 2): 10.0})
    for event in idle:
        for link in event["links"].values():
            link |= {"busy_s": link["busy_s"] / 8, "sent_bytes": link["sent_bytes"] // 8, "limited_s": 0.0}
    assert verdict.find_losses([*with_long_exchanges(), *idle]) == [], "want of processors"
    alone = [{**event, "links": {}} for event in ring_traffic({})]
    assert verdict.find_losses([*with_long_exchanges(), *alone]) == [], "all ranks on one node"


def test_scripts_without_prepare_are_judged_by_their_collectives() -> None:
    events = ring_traffic({})
    for event in events:
        event.update({"in_flight_s": 6.0} if event["rank"] != 3 else {"throttled_s": 3.5})
    (loss,) = verdict.find_losses(events)
    assert (loss.cause, loss.rank) == ("quota", 3)
    assert "its own work between collectives takes 80 ms a collective, the others' 40 ms." in loss.evidence
    for event in events:
        event["throttled_s"] = 0.0
    (loss,) = verdict.find_losses(events)
    assert (loss.cause, loss.rank, loss.remedy) == (
        "work",
        3,
        "Call ringweave.prepare in the script, which tells input, computing and updates apart.",
    )


def test_shares_by_speed_are_advised_in_mode_sync_alone_with_what_they_would_give() -> None:
    events = slow(2, "compute_s", 4.0, forward_s=4.0)
    (loss,) = verdict.find_losses(events)
    assert loss.gain == pytest.approx((10.0 - 4 / (3 / 6.0 + 1 / 10.0)) / 14.0)
    assert loss.text().endswith("which gives it fewer samples. Predicted gain: 24% of the time.")
    events[0] = {**PREPARED, "mode": "balanced"}
    (loss,) = verdict.find_losses(events)
    assert loss.gain == pytest.approx(4.0 / 14.0), "as fast as the others"
    assert loss.remedy == "Look for other programs on its node (top), and at its clock and temperature."


def test_bursts_of_several_ranks_are_told_apart() -> None:
    events = healthy(num_windows=7)
    for event in events[1:]:
        number, rank = int(event["time"] // 10), event["rank"]
        whose = {1: (0, "compute_s"), 2: (3, "input_s"), 3: (3, "input_s"), 4: (0, "compute_s"), 5: (3, "input_s")}
        busy, part = whose.get(number, (None, ""))
        if busy is not None:
            event["wall_s"] += 8.0
            event[part if rank == busy else "exchange_s"] += 8.0
    found = [(loss.cause, loss.rank) for loss in verdict.find_losses(events)]
    assert found == [("input", 3), ("backward", 0)], "the larger loss first"


def test_the_first_window_with_its_trials_does_not_count() -> None:
    events = healthy()
    events[1] |= {"wall_s": 30.0, "compute_s": 26.0}
    assert verdict.find_losses(events) == []


def test_losses_of_all_ranks_have_no_rank() -> None:
    events = healthy()
    for event in events[1:]:
        event |= {"exchange_s": 5.0, "input_s": 2.0, "wall_s": 15.4}
    events.append({"kind": "plan_made", "time": 5.0, "binding": "link a->b at 1Gbit/s"})
    link, waits = verdict.find_losses(events)
    assert (link.cause, link.rank, waits.cause, waits.rank) == ("link", None, "input", None)
    assert link.cost == pytest.approx(5.0 / 15.4)
    assert "Transfers of gradients take 32% of a step" in link.evidence
    assert "The plan is bound by: link a->b at 1Gbit/s." in link.evidence
    assert waits.gain == pytest.approx(2.0 / 15.4)


def test_quotas_of_all_ranks_are_named() -> None:
    events = healthy()
    for event in events[1:]:
        event["throttled_s"] = 2.0
    (loss,) = verdict.find_losses(events)
    assert (loss.cause, loss.rank, loss.cost) == ("quota", None, pytest.approx(0.2))


def test_time_after_deaths_is_lost_to_restarts() -> None:
    events = healthy()
    for event in events[1:]:
        event["time"] *= 2.0
    death = {"kind": "worker_exited", "time": 15.0, "rank": 1, "signal": "SIGKILL", "stopped": False}
    assert verdict.find_losses(events) == [], "an evaluation, for instance"
    (loss,) = verdict.find_losses([*events, death])
    assert (loss.cause, loss.rank) == ("restarts", None)
    assert loss.evidence.startswith("Killed workers: 1. Rank 0 made no step for 20 s of 50 s.")


def tuned(rank: int = 0, trials: int = 20, trials_s: float = 5.0, **changes: Any) -> dict[str, Any]:
    """Twenty trials, of which those of one candidate were slow."""
    event = example("schedule_tuned", time=5.0, rank=rank, schedule="ring", bytes=4_000_000, trials=trials)
    return event | {"measured_s": {"native": 0.25, "ring": 0.05}, "trials_s": trials_s} | changes


def test_trials_cost_what_they_took_beyond_the_schedule_that_won() -> None:
    events = [*healthy(), tuned(), tuned(rank=2, trials_s=2.0)]
    (loss,) = verdict.find_losses(events)
    assert (loss.cause, loss.rank) == ("trials", None)
    assert loss.cost == loss.gain == pytest.approx((5.0 - 20 * 0.05) / 30.0), "of the rank that has most of them"
    assert loss.text() == (
        "trials: 13% of the time is lost (measured). 20 trials of schedules took 5 s of 30 s, 4 s more than by the "
        "fastest ones. Of 4 MB: native 250 ms, ring 50 ms. Keep the tuning cache (XDG_CACHE_HOME/ringweave/tuning) "
        "from run to run: what it has is not tried again; or ringweave run --schedule ring. Predicted gain: 13% of the "
        "time."
    )
    (both,) = verdict.find_losses([*events, tuned(schedule="native", measured_s={"native": 0.05, "ring": 0.1})])
    assert both.cost == pytest.approx(8.0 / 30.0)
    assert "--schedule" not in both.text(), "no single schedule has won"


@pytest.mark.parametrize("changes", [{"trials_s": 3.9}, {"trials": 0, "trials_s": 0.0}, {"measured_s": {}}])
def test_trials_that_cost_little_are_not_named(changes: dict[str, Any]) -> None:
    assert verdict.find_losses([*healthy(), tuned(**changes)]) == []


def test_trials_of_a_script_without_prepare_are_known_too() -> None:
    events = [*ring_traffic({}), tuned(trials_s=5.0)]
    assert [loss.cause for loss in verdict.find_losses(events)] == ["trials"]
