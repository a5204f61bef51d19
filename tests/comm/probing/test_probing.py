"""Probing among ranks that are threads of this process, over the loopback interface."""

import logging
import random
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed import HashStore

from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation, exchange_group_info
from ringweave.comm.probing import __main__, flows, measure, probe_coordinator
from ringweave.comm.probing.flows import FlowTiming, RankFlows
from ringweave.comm.probing.network_measurement import MeasurementCache, NetworkMeasurement, measurement_from_json
from ringweave.comm.transport.connect import open_listeners
from ringweave.environment import WorkerEnvironment
from ringweave.errors import PeerError, PlacementError, UsageError
from ringweave.topology.inference.infer import SurveyLimits
from ringweave.topology.inference.observations import FlowBatch
from tests.comm.probing.parts import FOUND, TOKEN, at_once, group

BRIEF = FlowTiming(warm_up_s=0.02, window_s=0.05, tail_s=0.02, silence_s=60.0)
HASTY = replace(BRIEF, silence_s=1.0)
SOON = timedelta(seconds=90)


@pytest.fixture
def pair() -> Any:
    """Two probing ranks and their doors."""
    doors = [open_listeners([f"127.0.0.{rank + 1}"], 1)[0] for rank in range(2)]
    ranks = tuple(
        RankInfo(rank, RankLocation(f"n{rank}", f"127.0.0.{rank + 1}"), (door.endpoint,))
        for rank, door in enumerate(doors)
    )
    yield [(GroupInfo(ranks, rank, TOKEN), doors[rank].tcp_sockets) for rank in range(2)]
    for door in doors:
        door.close()


def part(sends_to: list[int], receives_from: list[int], timing: FlowTiming = BRIEF) -> RankFlows:
    return RankFlows(number=7, sends_to=sends_to, receives_from=receives_from, timing=timing)


def test_a_flow_in_both_directions(pair: Any) -> None:
    long = replace(BRIEF, window_s=0.5)
    got = at_once(*(lambda r=r: flows.run_rank_flows(part([1 - r], [1 - r], long), *pair[r]) for r in range(2)))
    assert [list(rates) for rates in got] == [[1], [0]]
    assert all(rate > 1e4 for rates in got for (rate,) in rates.values())


def test_a_flow_that_nobody_sends_is_an_error_in_time(pair: Any) -> None:
    with pytest.raises(TimeoutError, match=r"nothing from rank 1 \(node n1\) for 1 s"):
        flows.run_rank_flows(part([], [1], HASTY), *pair[0])


def test_calls_without_the_token_or_for_something_else_are_hung_up_on(pair: Any) -> None:
    stranger = GroupInfo(pair[1][0].ranks, 1, b"x" * 16)
    for members, number in ((stranger, 7), (pair[1][0], 8)):
        sock = flows.connect_prober(members, 0, flows.ProbeConnectionKind.FLOW, number, 60.0)
        with sock, pytest.raises(TimeoutError):
            flows.run_rank_flows(part([], [1], HASTY), *pair[0])


@pytest.fixture
def strays(pair: Any) -> Any:
    """Connections to both doors by which nobody says anything, made before all others."""
    doors = [door[0].getsockname() for _, door in pair]
    made = [socket.create_connection(address) for address in doors for _ in range(4)]
    yield made
    for sock in made:
        sock.close()


@pytest.mark.usefixtures("strays")
def test_who_calls_and_says_nothing_holds_no_flow_up(pair: Any) -> None:
    started = time.monotonic()
    got = at_once(*(lambda r=r: flows.run_rank_flows(part([1 - r], [1 - r]), *pair[r]) for r in range(2)))
    assert [list(rates) for rates in got] == [[1], [0]]
    assert time.monotonic() - started < 15


@pytest.mark.usefixtures("strays")
def test_who_calls_and_says_nothing_holds_no_message_up(pair: Any) -> None:
    got = at_once(lambda: flows.measure_latency(pair[0][0], 1, 3), lambda: flows.echo_messages(*pair[1], 0, 3))  # pyrefly: ignore[bad-argument-count]
    assert 1e-6 < got[0] < 5


def test_a_message_that_nobody_sends_is_an_error_in_time(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows, "_ECHO_TIMEOUT_S", 0.2)
    with pytest.raises(TimeoutError, match=r"no call of rank 0 \(node n0\) within 0\.2 s"):
        flows.echo_messages(*pair[1], 0, 3)  # pyrefly: ignore[bad-argument-count]


def test_latency(pair: Any) -> None:
    got = at_once(lambda: flows.measure_latency(pair[0][0], 1, 3), lambda: flows.echo_messages(*pair[1], 0, 3))  # pyrefly: ignore[bad-argument-count]
    assert 1e-6 < got[0] < 5
    assert got[1] is None


def test_where_the_ends_are_far_flows_last_longer() -> None:
    assert probe_coordinator.flow_timing(50e-6) == FlowTiming()
    assert probe_coordinator.flow_timing(0.02).warm_up_s == pytest.approx(1.0)


class Ensemble:
    """Alike nodes on one switch, that count what is asked of them."""

    def __init__(self) -> None:
        self.met: list[tuple[int, int]] = []
        self.num_batches = 0

    def measure_latencies(self, pairs: tuple[tuple[int, int], ...]) -> list[float]:
        self.met += pairs
        return [1e-4] * len(pairs)

    def measure_rates(self, batch: FlowBatch, timing: FlowTiming) -> list[float]:
        self.num_batches += 1
        return [1e8] * len(batch.flows)


@pytest.mark.parametrize(("num_nodes", "num_rounds", "num_met"), [(40, 8, 8 * 20), (12, None, 66), (7, 30, 21)])
def test_an_effort_bounds_all_that_is_measured(num_nodes: int, num_rounds: int | None, num_met: int) -> None:
    ensemble, effort = Ensemble(), SurveyLimits(num_rounds=num_rounds, num_trials=3)
    latencies, evidence, _ = probe_coordinator.measure_network(
        ensemble, num_nodes, random.Random(0), effort, lambda what: None
    )
    assert sorted(latencies) == sorted(ensemble.met)
    assert len(set(ensemble.met)) == len(ensemble.met) == num_met
    rounds = effort.limit_rounds(num_nodes - 1 + num_nodes % 2)
    assert evidence.num_batches == ensemble.num_batches <= 3 * rounds + 3


@pytest.mark.slow
def test_the_first_rank_gets_findings_and_one_rank_of_each_node_measures() -> None:
    ranks, store = group(2, ranks_a_node=2), HashStore()
    told: list[str] = []
    got = at_once(*(lambda m=m: measure.probe_group(store, m, SOON, on_progress=told.append) for m in ranks))
    found = got[0]
    assert isinstance(found, NetworkMeasurement)
    assert got[1:] == [None, found, None], "the first rank of each node is told"
    assert [(node.name, node.address, node.num_devices) for node in found.cluster().nodes] == [
        ("n0", "127.0.0.1", 2),
        ("n1", "127.0.0.2", 2),
    ]
    assert told == ["latency of pairs", "pairs, round 1", "pairs, round 1"]
    assert measurement_from_json(found.to_json()) == found
    text = found.to_text()
    assert "measured in" in text
    assert "rate of pairs, measured" in text
    assert "latency of pairs, measured (us)" in text


def test_findings_of_many_nodes_say_what_was_not_looked_for() -> None:
    ranks, effort = group(70), SurveyLimits(num_rounds=2, num_trials=1)
    latencies, evidence, fit = probe_coordinator.measure_network(
        Ensemble(), 70, random.Random(0), effort, lambda what: None
    )
    found = measure._make_measurement(measure.group_hosts(ranks[0]), latencies, evidence, fit, 1.0, {})
    said = "switches were not looked for, as there are more than 64 nodes: all hang on one"
    assert f"\n\n{said}\n\n" in found.to_text()
    assert (found.summary(0.0)["not_searched"], found.summary(0.0)["switches"]) == (said, [])
    assert measurement_from_json(found.to_json()) == found
    assert "switches were not" not in FOUND.to_text()


def test_one_node_has_no_network_to_probe() -> None:
    with pytest.raises(UsageError, match=r"probing the network: '1 node\(s\)', expected two at least, each"):
        measure.probe_group(HashStore(), group(1, 2)[0], SOON)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerError, match=r"rank 1 did not come within 0\.2 s"):
        measure.probe_group(HashStore(), group(2)[0], timedelta(seconds=0.2))


def test_a_rank_that_leaves_is_named(pair: Any) -> None:
    def leave() -> None:
        flows.connect_prober(pair[1][0], 0, flows.ProbeConnectionKind.COMMANDS, 0, 60.0).close()

    def conduct() -> list[float]:
        conductor = probe_coordinator.ProbeCoordinator(*pair[0], timeout_s=60.0)
        try:
            return conductor.measure_latencies(((0, 1),))
        finally:
            conductor.close()

    pair[1][1][0].close()
    error = at_once(conduct, leave)[0]
    assert isinstance(error, PeerError)
    assert "probing the network" in str(error)
    assert "firewall" in str(error)


def test_nothing_is_measured_where_there_is_a_file_or_no_network_or_nobody_wants_it() -> None:
    store, members = HashStore(), group(2)[0]
    for environment in (WorkerEnvironment(cluster_path=Path("x")), WorkerEnvironment(probes=False)):
        assert measure.measurement_for_group(store, members, SOON, environment) is None
    assert measure.measurement_for_group(store, group(1, 2)[0], SOON, WorkerEnvironment()) is None
    assert WorkerEnvironment.from_environ({"RINGWEAVE_PROBE": "never"}).probes is False
    assert WorkerEnvironment(probes=False).to_environ() == {"RINGWEAVE_PROBE": "never"}
    assert WorkerEnvironment(probes_described=True).to_environ() == {"RINGWEAVE_PROBE": "always"}
    assert WorkerEnvironment.from_environ({"RINGWEAVE_PROBE": "always"}).probes_described


def test_a_generation_on_hosts_takes_what_an_earlier_run_has_kept_and_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGWEAVE_FINDINGS", str(tmp_path))
    elastic = WorkerEnvironment(cluster_path=Path("x"), probes_described=True, coordinators=(("127.0.0.1", 9),))
    ranks, store = group(2), HashStore()
    assert measure.measurement_for_group(store, ranks[0], SOON, elastic) is None
    kept = replace(FOUND, time=time.time() - 60)
    MeasurementCache(tmp_path).put(measure.group_hosts(ranks[0]), kept)
    assert [measure.measurement_for_group(store, each, SOON, elastic) for each in ranks] == [kept, None]


@pytest.mark.slow
def test_what_is_measured_is_told_of_and_kept_on_every_node(tmp_path: Path) -> None:
    ranks, store, said = group(2, ranks_a_node=2), HashStore(), []
    caches = [MeasurementCache(tmp_path / member.own_info.location.node) for member in ranks]
    got = at_once(
        *(
            lambda m=member, c=cache: measure.find_or_measure(store, m, SOON, cache=c, report_status=said.append)
            for member, cache in zip(ranks, caches, strict=True)
        )
    )
    found = got[0]
    assert isinstance(found, NetworkMeasurement)
    assert got[1:] == [None, None, None]
    begin, end = said
    assert begin.startswith(
        "measuring the network between 2 nodes, about 1 s; RINGWEAVE_CLUSTER=FILE (a cluster file) or"
    )
    assert end.startswith("measured the network between 2 nodes in ")
    for node in ("n0", "n1"):
        assert MeasurementCache(tmp_path / node).get(measure.group_hosts(ranks[0]), found.time + 1) == found


def test_where_it_is_measured_the_user_is_told_on_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    measure._print_status("measuring")
    assert capsys.readouterr() == ("", "ringweave: measuring\n")


@pytest.mark.parametrize(("num_nodes", "least_s", "most_s"), [(2, 0.5, 2), (8, 12, 25), (16, 25, 60), (5000, 15, 30)])
def test_how_long_measuring_takes_is_known_about(num_nodes: int, least_s: float, most_s: float) -> None:
    effort = measure._FULL_EFFORT if num_nodes <= measure._MAX_NODES_FULL else measure._BRIEF_EFFORT
    assert least_s <= measure.predicted_survey_s(num_nodes, effort) <= most_s


def test_what_is_too_long_for_a_line_stays_with_the_first_rank() -> None:
    assert probe_coordinator.stop_command("short") == {"do": "end", "found": "short"}
    assert probe_coordinator.stop_command("x" * probe_coordinator._MAX_LINE_BYTES) == {"do": "end", "found": ""}


def test_what_is_cached_is_not_measured_again(tmp_path: Path) -> None:
    cache, store = MeasurementCache(tmp_path), HashStore()
    ranks = group(2)
    cache.put(measure.group_hosts(ranks[0]), FOUND)
    got = at_once(
        *(lambda m=m: measure.find_or_measure(store, m, SOON, cache=cache, clock=lambda: 1001.0) for m in ranks)
    )
    assert got == [FOUND, None]


def test_a_job_goes_on_if_its_network_cannot_be_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = measure.find_or_measure(
            HashStore(), group(2)[0], timedelta(seconds=0.2), cache=MeasurementCache(tmp_path)
        )
    assert found is None
    assert "the network was not measured, equal links are assumed" in caplog.text


def test_hosts_of_one_name_are_refused_when_they_meet() -> None:
    ubuntus = [RankLocation("ubuntu", f"127.0.0.{host + 1}", host=str(host)) for host in range(2)]
    store = HashStore()
    got = at_once(
        *(lambda r=r, p=p: exchange_group_info(store, r, range(2), p, [], SOON) for r, p in enumerate(ubuntus))
    )
    for error in got:
        assert isinstance(error, PlacementError)
        assert "rank 0 at 127.0.0.1 and rank 1 at 127.0.0.2" in str(error)


def test_effort_bounds_rounds() -> None:
    assert SurveyLimits(num_rounds=2).limit_rounds(7) == 2
    assert SurveyLimits().limit_rounds(7) == 7


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(__main__, "_find_measurement", lambda *_: pytest.fail("it measured"))
    monkeypatch.setenv("RANK", "0")
    done = CliRunner().invoke(__main__.command, ["--write", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith("ringweave: error: --write: ")
    assert done.stderr.endswith("expected a file that can be written. Is a directory.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_costs_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "_find_measurement", lambda *_: FOUND)
    done = CliRunner().invoke(__main__.command, ["--json", "--write", "/dev/full"])
    assert (done.exit_code, measurement_from_json(done.stdout)) == (2, FOUND)
    assert "--write: '/dev/full', expected a file that can be written. No space left" in done.stderr
