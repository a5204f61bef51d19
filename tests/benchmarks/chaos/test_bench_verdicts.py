"""What the benches of faults demand, by results made up: good ones pass, and each bad one is said."""

import argparse
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.member_impacts import FaultImpact

BENCH = Path(__file__).parents[3] / "bench" / "faults"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def said(**other: Any) -> dict[str, Any]:
    """Of a job that did all it had to."""
    none: dict[str, Any] = {"wrong": [], "broken": [], "never_began": [], "at_other_moments": []}
    return {**none, "attempts": 1, "never_back": [], "evicted": 0, "begun": 1, "joins": [], **other}


BAD = {"wrong": ["parameters of 1.0 after step 3 are 4, not 3"], "broken": ["2 train steps were lost"], "attempts": 2}
WORDS = [*BAD["wrong"], *BAD["broken"], "the job was started 2 times"]
"""What every bench has to say of a job that is so."""


def toll(line: str, **other: Any) -> FaultImpact:
    usual = {"victims": (4,), "survivors": 7, "evicted": (), "stall_s": 1.9, "stall_median_s": 1.0, "generation_s": 1.0}
    return FaultImpact(**{"fault": line, **usual, "steps_as_zombie": 0, "back_s": 33.0, "watched_s": 60.0, **other})


PAUSE, CUT = "at 10s pause worker 4 for 30s", "at 60s cut a-0 for 30s"


def standing_said(**other: Any) -> dict[str, Any]:
    return said(**{"coordinators_changed": 1, "strangers": [], **other})


def test_members_that_stood_still_are_survived_within_the_bar(bench: Callable[[str], ModuleType]) -> None:
    standing, happens = bench("standing"), fault_script.parse_faults(f"{PAUSE}\n{CUT}")
    good = [toll(PAUSE), toll(CUT)]
    assert standing.missed(standing_said(), good, happens, 1) == []
    assert standing.missed(standing_said(**BAD), good, happens, 1) == WORDS
    bad = [toll(PAUSE, stall_s=2.1, steps_as_zombie=3), toll(CUT, stall_s=None, back_s=None)]
    stranger = f"{CUT}: the coordinator that decided was that of a-1"
    assert standing.missed(standing_said(coordinators_changed=0, strangers=[stranger]), bad, happens, 1) == [
        stranger,
        f"{PAUSE}: 3 steps as a zombie",
        f"{PAUSE}: stall in s: 2.1, the bar is 2",
        f"{CUT}: the victim never came back",
        f"{CUT}: stall in s: not known, the bar is 2",
        "0 coordinators took over, not 1",
    ]
    assert standing.missed(standing_said(), [], happens, 1) == ["0 faults hit workers, not 2"], "nothing was measured"


def test_a_coordinators_node_that_is_cut_off_is_that_of_the_one_that_decides(
    bench: Callable[[str], ModuleType],
) -> None:
    standing = bench("standing")
    epoch = {"kind": "generation_begun", "term": 1, "number": 1, "part": ""}
    cut = {"kind": "fault_begun", "fault": CUT, "target": "node a-0"}
    other = {"kind": "fault_begun", "fault": "at 70s cut a-5 for 30s", "target": "node a-5"}
    assert standing.strangers([epoch, cut, other]) == []
    assert standing.strangers([epoch, epoch, cut, other]) == [f"{CUT}: the coordinator that decided was that of a-1"]
    assert standing.strangers([cut]) == [f"{CUT}: the coordinator that decided was that of nobody"]


def books(**other: Any) -> dict[str, Any]:
    """Of a run of rings in which all was well."""
    counts = {"pushes_of_rings": 9, "versions_of_the_server": 9, "pushes_lost": 0, "never_went_on": 0}
    return {"wrong": [], **counts, "epochs_accounted": 2, "leaders": [0, 1, 1], **other}


def test_a_server_that_is_cut_off_is_replaced_in_time(bench: Callable[[str], ModuleType]) -> None:
    cut = bench("server_cut")
    assert cut.missed(cut.Stall(victims="in", at_s=1.0, stall_s=3.0), books()) == []
    worst = books(leaders=[0, 0, 0], wrong=["4 samples lost"], pushes_lost=1, versions_of_the_server=8)
    assert cut.missed(cut.Stall(victims="in", at_s=1.0, stall_s=None), worst) == [
        "in: servers [0, 0, 0] led, expected [0, 1, 1]",
        "in: 4 samples lost",
        "in: after 1 kills a worker made no step",
        "in: 1 pushes were lost",
        "in: rings pushed 9 times, the server applied 8",
        "in: stall in s: not known, the bar is 3",
    ]
    late = cut.missed(cut.Stall(victims="out", at_s=1.0, stall_s=3.1), books(epochs_accounted=0))
    assert late == [
        "out: no epoch of the data was complete, nothing was accounted",
        "out: stall in s: 3.1, the bar is 3",
    ]


def test_a_ring_that_is_away_holds_no_other_one_up_and_comes_back(bench: Callable[[str], ModuleType]) -> None:
    away = bench("ring_away")
    there = books(members=["2.0", "3.0"], slots_back=[2, 3])
    assert away.missed(away.Stall(victims="ring stopped", at_s=1.0, stall_s=2.0), there) == []
    worst = {**there, "slots_back": [3], "versions_of_the_server": 8}
    assert away.missed(away.Stall(victims="ring stopped", at_s=1.0, stall_s=29.0), worst) == [
        "ring stopped: 1 workers of the ring do not train again",
        "ring stopped: rings pushed 9 times, the server applied 8",
        "ring stopped: stall in s: 29, the bar is 2",
    ]


def test_servers_and_coordinators_that_die_at_once_are_replaced_in_time(bench: Callable[[str], ModuleType]) -> None:
    servers = bench("ring_servers")
    stalls = [
        servers.Stall(victims="server", at_s=1.0, stall_s=0.5),
        servers.Stall(victims="server and coordinator 0", at_s=9.0, stall_s=2.5, is_replaced=True),
    ]
    assert servers.missed({**servers.summary(stalls), **books()}) == []
    stalls[1] = servers.Stall(victims="server and coordinator 0", at_s=9.0, stall_s=3.1, is_replaced=False)
    assert servers.missed({**servers.summary(stalls), **books()}) == [
        "0 coordinators were replaced, not 1",
        "stall in s: 3.1, the bar is 3",
    ]
    stalls[1] = servers.Stall(victims="server", at_s=9.0, stall_s=0.5)
    found = servers.missed({**servers.summary(stalls), **books()})
    assert found == ["0 coordinators were replaced, not 1"], "none was killed where one had to be"
    nothing = servers.missed({**servers.summary([]), **books(never_went_on=0)})
    assert nothing == ["stall in s: not known, the bar is 3"]


def test_servers_alone_apply_each_push_once_and_in_time(bench: Callable[[str], ModuleType]) -> None:
    kills = bench("server_kills")
    good = {"stalls_s": {"kill leader": [0.4, 3.0]}, "pushes": 90, "fewest_pushes": 20, "version": 90, "error": 0.0}
    assert kills.missed(good, 2) == []
    assert kills.missed({**good, "stalls_s": {"kill leader": [0.4, 3.1]}}, 2) == [
        "longest round in s: 3.1, the bar is 3"
    ]
    once = "90 pushes made 91 versions, parameters off by 1.0e-03"
    assert kills.missed({**good, "version": 91, "error": 1e-3}, 2) == [once]
    assert kills.missed({**good, "fewest_pushes": 0}, 2) == ["a ring pushed nothing"]
    nothing = ["0 faults happened, not 2", "longest round in s: not known, the bar is 3"]
    assert kills.missed({**good, "stalls_s": {}}, 2) == nothing


def join(**other: Any) -> dict[str, Any]:
    return {"newcomers": 1, "peers": 7, "stall_s": 0.4, "usual_s": 0.4, "lost_s": 0.1, "caught_up_s": 3.0, **other}


def test_newcomers_become_level_while_peers_go_on(bench: Callable[[str], ModuleType]) -> None:
    joining = bench("joining")
    assert joining.missed_by_peers(said(joins=[join(), join()]), 2) == []
    assert joining.missed_by_peers(said(joins=[join()], **BAD), 1) == WORDS
    bad = [join(stall_s=0.44), join(caught_up_s=None), join(usual_s=0.0)]
    assert joining.missed_by_peers(said(joins=bad), 4) == [
        "3 times workers joined, not 4",
        "join 1: longest stall of a peer in steps: 1.1, the bar is 1",
        "join 2: the newcomer never caught up",
        "join 3: longest stall of a peer in steps: not known, the bar is 1",
    ]
    assert joining.missed_by_peers(said(), 0) == ["0 times workers joined, not 0"], "nothing was measured"


def test_state_comes_whole_and_as_fast_as_its_link_lets_it(bench: Callable[[str], ModuleType]) -> None:
    joining = bench("joining")
    options = bench("lab_jobs").parser("").parse_args(["--rate", "8Mbit/s"])
    found = {"rounds": [{"bytes": 8e5, "seconds": each} for each in (1.0, 1.0, 2.0)], "alike": True}
    assert joining.fraction_of_link(options, found) == pytest.approx(0.8)
    assert joining.missed_by_state(found, 0.8) == []
    assert joining.missed_by_state({**found, "alike": False}, 0.79) == [
        "the state that was pulled is not that which was offered",
        "state at 0.79 of the link's raw rate, the bar is 0.8",
    ]
    assert joining.fraction_of_link(options, {"rounds": []}) is None
    assert joining.missed_by_state(found, None) == ["state at None of the link's raw rate, the bar is 0.8"]


def test_a_state_that_differs_in_a_moment_of_the_optimizer_is_not_alike(bench: Callable[[str], ModuleType]) -> None:
    joining = bench("joining")
    (_, two), (_, again), (model, other) = (joining.make(0.1, 2) for _ in range(3))
    assert joining.is_alike(two, again)
    other._optimizer.state[next(model.parameters())]["exp_avg"].view(-1)[0] += 1
    assert not joining.is_alike(two, other)


@pytest.mark.parametrize(
    ("goodput", "every_s", "spares", "is_good"),
    [(0.95, 60.0, 0, True), (0.94, 60.0, 0, False), (0.97, 15.0, 0, True), (0.975, 15.0, 1, False)],
)
def test_goodput_is_held_against_the_bar_of_its_interval(
    bench: Callable[[str], ModuleType], goodput: float, every_s: float, spares: int, is_good: bool
) -> None:
    of_goodput = bench("goodput")
    bar = of_goodput.bar_of(argparse.Namespace(every=every_s, spares=spares))
    assert (of_goodput.missed(said(), goodput, bar) == []) is is_good
    unknown = of_goodput.missed(said(), None, bar)
    assert unknown == [f"goodput: None, the bar is {bar}"], "what could not be measured is not good"
    assert of_goodput.missed(said(**BAD), 1.0, bar) == WORDS
    assert of_goodput.missed(said(begun=0), 1.0, bar) == ["nothing was killed"]


def test_steps_that_are_not_there_have_no_length(bench: Callable[[str], ModuleType]) -> None:
    overhead = bench("overhead")
    steps = [{"kind": "train_step_done", "rank": 0, "time": float(number)} for number in range(overhead._WARM_STEPS)]
    assert overhead.step_s(steps) is None
    more = [{"kind": "train_step_done", "rank": 0, "time": overhead._WARM_STEPS + 0.5 * number} for number in range(3)]
    assert overhead.step_s([*steps, *more]) == 0.5


def test_who_was_not_hit_waits_as_long_as_the_slowest_of_them(bench: Callable[[str], ModuleType]) -> None:
    """One that goes on alone does not speak for the others, and who was hit does not count."""
    beside = bench("beside")
    nodes, line = ("a-0", "a-1", "a-2"), "at 20s cut a-2 for 30s"
    events = [{"time": 0.0, "kind": "worker_watched", "rank": rank, "node": node} for rank, node in enumerate(nodes)]
    events += [{"time": 20.0, "kind": "fault_begun", "fault": line, "target": "node a-2"}]
    gone_s = {0: (20, 22), 1: (20, 55), 2: (20, 80)}
    for rank, (first_s, last_s) in gone_s.items():
        times = [float(second) for second in range(1, 100) if not first_s < second < last_s]
        events += [{"time": time_s, "kind": "train_step_done", "rank": rank} for time_s in times]
    in_order = sorted(events, key=lambda event: event["time"])
    assert beside.waits(in_order) == {line: 35.0}
    early = [event for event in in_order if event["time"] < 55 or event.get("rank") != 1]
    assert beside.waits(early) == {line: None}, "one of them makes no step any more"
    killed = "at 20s kill worker 2"
    of_a_worker = [{**event, "fault": killed} if "fault" in event else event for event in in_order]
    assert beside.waits(of_a_worker) == {killed: 35.0}


def test_waits_beside_other_systems_have_a_bar(bench: Callable[[str], ModuleType]) -> None:
    beside = bench("beside")
    good = dict.fromkeys(beside.SCRIPT, 1.9)
    assert beside.missed(said(), good) == []
    assert beside.missed(said(**BAD), good) == WORDS
    assert beside.missed(said(), {**good, beside.SCRIPT[1]: 2.1, beside.SCRIPT[2]: None}) == [
        f"{beside.SCRIPT[1]}: longest wait in s: 2.1, the bar is 2",
        f"{beside.SCRIPT[2]}: longest wait in s: not known, the bar is 2",
    ]


def test_random_faults_of_rings_leave_nothing_lost_and_nobody_behind(bench: Callable[[str], ModuleType]) -> None:
    mixed = bench("ring_mixed")
    good = books(silent=[], never_began=[], attempts=1, outcome="stopped")
    assert mixed.missed(good) == []
    bad = {"versions_of_the_server": 10, "silent": [3], "never_began": [PAUSE], "attempts": 2, "outcome": "done"}
    assert mixed.missed({**good, **bad}) == [
        "rings pushed 9 times, the server applied 10",
        "workers [3] do not train any more",
        f"{PAUSE}: never began",
        "the job was started 2 times",
        "the job ended by itself: done",
    ]


def test_faults_of_rings_leave_the_servers_time_to_recover(bench: Callable[[str], ModuleType]) -> None:
    mixed = bench("ring_mixed")
    options = SimpleNamespace(workers=8, rate="25Mbit/s", kills=60, seed=1)
    happens = mixed.draw_all(options)
    assert happens == mixed.draw_all(options), "the same seed, the same faults"
    assert len(happens) == 60
    assert [fault.at_s for fault in happens] == sorted(fault.at_s for fault in happens)
    killed_s = [fault.at_s for fault in happens if fault.target == fault_script.SERVER]
    assert len(killed_s) > 3
    assert min(after - before for before, after in itertools.pairwise(killed_s)) > 19
    assert not {fault.target for fault in happens if fault.kind == fault_script.CUT} & {"a-0", "a-1"}


def test_who_trains_no_more_at_the_end_is_said(bench: Callable[[str], ModuleType]) -> None:
    mixed = bench("ring_mixed")
    of = {"0.0": 100.0, "1.0": 80.0, "1.1": 99.0, "2.0": 84.0}
    steps = {
        name: [mixed.Done(time_s=at_s, ring=0, num_pushed=1, epoch=0, digest="f" * 16)] for name, at_s in of.items()
    }
    assert mixed.silent(steps, 4) == [2, 3]
