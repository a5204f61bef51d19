"""What the benches of rings check can fail: rings that hang or stop others, pushes and samples that are missing."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
        kills.Done(time_s=time_s, ring=ring, num_pushed=number, digest=CHECK)
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


def test_those_who_were_killed_before_are_not_waited_for(kills: ModuleType, runs: ModuleType) -> None:
    times = two_rings(kills, w2_0=every_second(10), w2_1=every_second()[12:], w2_2=every_second()[20:])
    assert sorted(runs.alive_at(times, 20.5)) == ["0.0", "1.0", "2.1", "3.0"]


def accounts(runs: ModuleType, folder: Path, *lines: str) -> int:
    for number, line in enumerate(lines):
        (folder / f"{number}.0.txt").write_text(f"1.5 0 1 {CHECK}\n{line}\n")
    return runs.check_accounts(folder, 1)


def test_accounts_add_up_and_are_alike(runs: ModuleType, tmp_path: Path) -> None:
    assert accounts(runs, tmp_path, "account 0 512 500 12", "account 0 512 500 12", "account 1 512 512") == 1
    assert [len(each) for each in runs.read(tmp_path).values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["account 0 512 500 11"], "epoch 0: 500 counted, 11 lost, expected 512"),
        (["account 0 512 500 12", "account 0 512 499 13"], r"epoch 0: \['512', '499', '13'\] and "),
        (["account 0 512 212 300"], "epoch 0: 300 samples lost with 1 kills"),
    ],
)
def test_accounts_that_do_not_are_found(runs: ModuleType, tmp_path: Path, lines: list[str], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        accounts(runs, tmp_path, *lines)


def test_what_was_missed_is_said(kills: ModuleType, runs: ModuleType) -> None:
    good = {"never_went_on": 0, "pushes_lost": 0, "pushes_of_rings": 9, "versions_of_the_server": 9}
    good |= {"epochs_accounted": 2, "kills_that_stopped_other_rings": 0, "ring_stall_p95_s": 1.2}
    assert kills.missed(good) == []
    worst = {"never_went_on": 1, "pushes_lost": 2, "pushes_of_rings": 9, "versions_of_the_server": 10}
    worst |= {"epochs_accounted": 0, "kills_that_stopped_other_rings": 3, "ring_stall_p95_s": 1.6}
    assert kills.missed(worst) == [
        "after 1 kills a worker made no step",
        "2 pushes were lost",
        "rings pushed 9 times, the server applied 10",
        "no epoch of the data was complete, nothing was accounted",
        "3 kills stopped another ring for a step",
        "stall of the ring, p95 in s: 1.6, the bar is 1.5",
    ]
    assert runs.num_pushes(two_rings(kills)) == 80
