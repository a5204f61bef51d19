"""Losses that a verdict finds in measured steps, and those that it must not find."""

from typing import Any

import pytest

from ringweave.telemetry import verdict

STEPS = 100
QUIET = {"throttled_s": 0.0, "collections_s": 0.0, "major_faults": 0}
PREPARED = {"time": 0.0, "kind": "training_prepared", "mode": "sync"}


def window(rank: int, number: int = 0, **changes: Any) -> dict[str, Any]:
    """Ten seconds of a rank: 60 ms of computing and 40 ms of everything else in each of 100 steps."""
    event = {"kind": "steps_measured", "time": 10.0 * number + 0.01 * rank, "rank": rank, "node": f"n{rank}"}
    event |= {"steps": STEPS, "samples": 3200, "wall_s": 10.0, "longest_s": 0.11, "processor_s": 7.0}
    event |= {"input_s": 0.1, "compute_s": 6.0, "exchange_s": 1.5, "update_s": 2.0, **QUIET}
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
        event["steps"] = 9
    assert verdict.find_losses(events) == []


@pytest.mark.parametrize(
    ("part", "changes", "cause", "text"),
    [
        ("compute_s", {}, "compute", "its computing takes 100 ms a step, the others' 60 ms. Use --mode balanced"),
        ("input_s", {}, "input", "its wait for a batch takes 41 ms a step, the others' 1 ms. Give its DataLoader more"),
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


def test_shares_by_speed_are_advised_in_mode_sync_alone_with_what_they_would_give() -> None:
    events = slow(2, "compute_s", 4.0)
    (loss,) = verdict.find_losses(events)
    assert loss.gain == pytest.approx((10.0 - 4 / (3 / 6.0 + 1 / 10.0)) / 14.0)
    assert loss.text().endswith("which gives it fewer samples. Predicted gain: 24% of the time.")
    events[0] = {**PREPARED, "mode": "balanced"}
    (loss,) = verdict.find_losses(events)
    assert (loss.gain, loss.remedy) == (None, "Look for other programs on its node, and at its clock and temperature.")


def test_bursts_of_several_ranks_are_told_apart() -> None:
    events = healthy(num_windows=7)
    for event in events[1:]:
        number, rank = int(event["time"] // 10), event["rank"]
        busy, part = {1: (0, "compute_s"), 2: (3, "input_s"), 3: (3, "input_s")}.get(number, (None, ""))
        if busy is not None:
            event["wall_s"] += 8.0
            event[part if rank == busy else "exchange_s"] += 8.0
    found = [(loss.cause, loss.rank) for loss in verdict.find_losses(events)]
    assert found == [("input", 3), ("compute", 0)], "the larger loss first"


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
