"""What the benches of rings check can fail: rings that hang or stop others, pushes and samples that are missing."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringweave.errors import UsageError
from tests.telemetry.examples import example

BENCH = Path(__file__).parents[3] / "bench" / "faults"
CHECK = "0123456789abcdef"


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import ring_kills

    return ring_kills


@pytest.fixture
def runs(kills: ModuleType) -> ModuleType:
    return kills.ring_runs


def steps(kills: ModuleType, ring: int, *times: float) -> list[Any]:
    return [
        kills.Done(time_s=time_s, ring=ring, num_pushed=number, epoch=0, digest=CHECK)
        for number, time_s in enumerate(times, start=1)
    ]


def every_second(until_s: int = 40) -> list[float]:
    return [float(second) for second in range(until_s)]


def two_rings(kills: ModuleType, **others: list[float]) -> dict[str, list[Any]]:
    """0.0, 1.0 and 2.0 are ring 0, of which 1.0 is killed at 20.5; 3.0 is ring 1. All make a step a second."""
    times = {"0.0": every_second(), "1.0": every_second(21), "2.0": every_second(), "3.0": every_second()}
    times |= {name.replace("w", "").replace("_", "."): each for name, each in others.items()}
    return {name: steps(kills, int(name == "3.0"), *each) for name, each in times.items()}


def test_a_ring_waits_and_the_other_one_does_not(kills: ModuleType) -> None:
    slow = [*every_second(21), *(22.0 + second for second in range(15))]
    found = kills.judge("1.0", True, 20.5, two_rings(kills, w2_0=slow))
    assert (found.ring_s, found.others_s, found.quiet_s, found.step_s) == (1.0, 0.0, 0.0, 1.0)
    assert not found.stopped_others


def test_one_that_hangs_from_the_kill_on_is_not_left_out(kills: ModuleType) -> None:
    assert kills.judge("1.0", True, 20.5, two_rings(kills, w2_0=every_second(21))).ring_s is None
    found = kills.judge("1.0", True, 20.5, two_rings(kills, w3_0=every_second(21)))
    assert (found.ring_s, found.others_s, found.stopped_others) == (0.0, None, True)


def test_another_ring_that_waits_for_a_step_more_than_usual_was_stopped(kills: ModuleType) -> None:
    late = [*every_second(21), *(22.0 + second for second in range(15))]
    found = kills.judge("1.0", True, 20.5, two_rings(kills, w3_0=late))
    assert (found.others_s, found.stopped_others) == (1.0, True)
    noisy = [*every_second(18), *(19.0 + 2 * second for second in range(10))]
    found = kills.judge("1.0", True, 20.5, two_rings(kills, w3_0=noisy))
    assert found.quiet_s == pytest.approx(found.others_s)
    assert not found.stopped_others, "it was as slow before"


def test_what_rings_wait_for_each_other_at_the_end_of_an_epoch_is_said_apart(kills: ModuleType) -> None:
    late = [*every_second(21), *(23.0 + second for second in range(15))]
    times = two_rings(kills, w3_0=late)
    found = kills.judge("1.0", True, 20.5, times)
    assert (found.others_s, found.meeting_s, found.stopped_others) == (2.0, 0.0, True)
    times["3.0"] = [replace(each, epoch=int(each.time_s > 22)) for each in times["3.0"]]
    found = kills.judge("1.0", True, 20.5, times)
    assert (found.others_s, found.meeting_s, found.stopped_others) == (0.0, 2.0, False)
    said = kills.summary([found], times)
    assert (said["kills_as_rings_met"], said["rings_met_for_max_s"]) == (1, 2.0)
    times["3.0"] = [replace(each, epoch=int(each.time_s > 30)) for each in times["3.0"]]
    assert kills.judge("1.0", True, 20.5, times).stopped_others, "no epoch ended then"


def test_those_who_were_killed_before_are_not_waited_for(kills: ModuleType, runs: ModuleType) -> None:
    times = two_rings(kills, w2_0=every_second(10), w2_1=every_second()[12:], w2_2=every_second()[20:])
    assert sorted(runs.alive_at(times, 20.5)) == ["0.0", "1.0", "2.1", "3.0"]


def accounts(runs: ModuleType, folder: Path, *lines: str, num_gone: int = 1) -> tuple[int, int]:
    for number, line in enumerate(lines):
        (folder / f"{number}.0.txt").write_text(f"1.5 0 1 0 {CHECK}\n{line}\n")
    return runs.check_accounts(folder, num_gone)


def test_accounts_add_up_and_are_alike(runs: ModuleType, tmp_path: Path) -> None:
    assert accounts(runs, tmp_path, "account 0 512 500 12", "account 0 512 500 12", "account 1 512 512") == (1, 12)
    assert [len(each) for each in runs.read(tmp_path).values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["account 0 512 500 11"], "epoch 0: 500 counted, 11 lost, expected 512"),
        (["account 0 512 500 12", "account 0 512 499 13"], r"epoch 0: \['512', '499', '13'\] and "),
        (["account 0 512 212 300"], "300 samples lost, though 1 workers were gone"),
        (["account 0 512 356 156", "account 1 512 356 156"], "312 samples lost, though 1 workers were gone"),
    ],
)
def test_accounts_that_do_not_are_found(runs: ModuleType, tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        accounts(runs, tmp_path, *lines)


def test_no_sample_is_lost_where_no_worker_was_gone(runs: ModuleType, tmp_path: Path) -> None:
    assert accounts(runs, tmp_path, "account 0 512 512 0", num_gone=0) == (1, 0)
    with pytest.raises(AssertionError, match="1 samples lost, though 0 workers were gone"):
        accounts(runs, tmp_path, "account 0 512 511 1", num_gone=0)


def test_parameters_of_a_ring_are_compared_and_there_has_to_be_something_to_compare(
    kills: ModuleType, runs: ModuleType
) -> None:
    assert runs.check_alike({"0.0": steps(kills, 0, 1.0, 2.0), "1.0": steps(kills, 0, 1.0)}) == 3
    with pytest.raises(AssertionError, match="parameters: 3 checks of 3 pushes, none to compare with"):
        runs.check_alike({"0.0": steps(kills, 0, 1.0, 2.0), "1.0": steps(kills, 1, 1.0)})
    other = [kills.Done(time_s=1.0, ring=0, num_pushed=1, epoch=0, digest="f" * 16)]
    with pytest.raises(AssertionError, match=r"parameters of 1\.0 after push 1 of ring 0 differ"):
        runs.check_alike({"0.0": steps(kills, 0, 1.0), "1.0": other})


def test_what_is_wrong_in_the_books_is_said_with_the_figures(
    kills: ModuleType, runs: ModuleType, tmp_path: Path
) -> None:
    accounts(runs, tmp_path, "account 0 512 500 12")
    counted = [example("params_counted", version=version) for version in (2, 3, 1)]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in counted))
    of_two = {"0.0": steps(kills, 0, 1.0, 2.0, 3.0), "1.0": steps(kills, 0, 1.0, 2.0, 3.0)}
    found = runs.books(tmp_path, tmp_path, of_two, 1)
    assert (found["wrong"], found["parameters_alike"], found["samples_lost"]) == ([], 6, 12)
    assert runs.missed({**found, "never_went_on": 0}) == []
    found = runs.books(tmp_path, tmp_path, {"0.0": of_two["0.0"]}, 0)
    assert runs.missed({**found, "never_went_on": 0}) == [
        "parameters: 3 checks of 3 pushes, none to compare with",
        "12 samples lost, though 0 workers were gone",
    ]


def test_a_run_without_a_fault_is_refused(runs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ring_kills.py", "--kills", "0"])
    with pytest.raises(UsageError, match=r"--kills: 0, expected at least 1\. Without a fault nothing is shown\."):
        runs.parse("", kills=10)


def test_a_kill_that_nobody_felt_is_none_that_was_survived(kills: ModuleType) -> None:
    times = two_rings(kills)
    found = kills.judge("1.0", True, 20.5, times)
    assert (found.num_peers, found.num_others) == (2, 1)
    alone = kills.judge("1.0", True, 20.5, {name: each for name, each in times.items() if name != "3.0"})
    assert (alone.num_peers, alone.num_others) == (2, 0)
    assert [kills.summary([each], times)["kills_that_nobody_felt"] for each in (found, alone)] == [0, 1]


def test_what_was_missed_is_said(kills: ModuleType, runs: ModuleType) -> None:
    good = {"never_went_on": 0, "pushes_lost": 0, "pushes_of_rings": 9, "versions_of_the_server": 9}
    good |= {"wrong": [], "kills_that_nobody_felt": 0}
    good |= {"epochs_accounted": 2, "kills_that_stopped_other_rings": 0, "ring_stall_p95_s": 1.2}
    good |= {"rings_met_for_max_s": 0.7}
    assert kills.missed(good) == []
    worst = {"never_went_on": 1, "pushes_lost": 2, "pushes_of_rings": 9, "versions_of_the_server": 10}
    worst |= {"wrong": ["12 samples lost"], "kills_that_nobody_felt": 4}
    worst |= {"epochs_accounted": 0, "kills_that_stopped_other_rings": 3, "ring_stall_p95_s": 1.6}
    worst |= {"rings_met_for_max_s": 1.7}
    assert kills.missed(worst) == [
        "12 samples lost",
        "after 1 kills a worker made no step",
        "2 pushes were lost",
        "rings pushed 9 times, the server applied 10",
        "no epoch of the data was complete, nothing was accounted",
        "4 kills without a survivor in the ring, or a worker in another one",
        "3 kills stopped another ring for a step",
        "rings that met waited in s: 1.7, the bar is 1.5",
        "stall of the ring, p95 in s: 1.6, the bar is 1.5",
    ]
    assert runs.num_pushes(two_rings(kills)) == 80
