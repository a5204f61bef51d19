"""What happens between epochs of rings: one breaks off, or all are formed anew; a real server, real processes."""

from pathlib import Path

import pytest

from ringweave.environment import EVENTS
from ringweave.param_server.messages import ServerStatus
from ringweave.telemetry.events import read_events
from ringweave.testing.ranks import Ranks
from tests.param_server.ring.test_rings import TIMEOUT_S, serving
from tests.training.rings import ring_training

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]


def run(folder: Path, function: object, num_ranks: int, *settings: object) -> tuple[list[dict], ServerStatus]:
    """What was noted, and what the server says of itself; all ranks have the same parameters at the end."""
    environ = {EVENTS: str(folder / "events.jsonl")}
    with (
        serving(folder, num_ranks) as (server, service),
        Ranks(
            function, num_ranks, server.port, str(folder / "keys"), *settings, timeout_s=TIMEOUT_S, environ=environ
        ) as ranks,
    ):
        weights = ranks.values(timeout_s=TIMEOUT_S)
        assert all(each == weights[0] for each in weights)
        return list(read_events(folder / "events.jsonl")), service.status()


def test_a_ring_that_breaks_off_its_epochs_holds_nobody_up(tmp_path: Path) -> None:
    events, _ = run(tmp_path, ring_training.break_off, 2)
    accounts = [event for event in events if event["kind"] == "samples_accounted"]
    assert [(each["epoch"], each["samples"], each["exact"]) for each in accounts] == [(2, 400, True)]


def test_an_epoch_may_be_begun_anew_after_a_look_at_its_first_batch(tmp_path: Path) -> None:
    events, _ = run(tmp_path, ring_training.look_first, 2)
    accounts = [event for event in events if event["kind"] == "samples_accounted"]
    assert [(each["epoch"], each["samples"], each["exact"]) for each in accounts] == [(0, 100, True), (1, 100, True)]


def test_rings_are_formed_anew_when_speeds_drift(tmp_path: Path) -> None:
    speeds = [(1, 4, 1, 4), (1, 1, 4, 4), (4, 4, 1, 1), (4, 4, 1, 1)]
    events, status = run(tmp_path, ring_training.drift, 4, speeds)
    accounts = [event for event in events if event["kind"] == "samples_accounted"]
    assert [(each["samples"], each["exact"]) for each in accounts] == [(480, True)] * 4
    formed = [sorted(map(sorted, event["rings"])) for event in events if event["kind"] == "rings_formed"]
    # The first ones are of equal ranks; from (1, 1, 4, 4) to (4, 4, 1, 1) ranks stay with those who are as fast.
    assert formed[-1] == [[0, 1], [2, 3]]
    assert formed.count([[0, 2], [1, 3]]) == 1
    assert (status.samples, status.most_peers) == (1920, 2), "as many as rings, also while they are formed anew"


def test_with_local_steps_all_rings_push_equally_often_and_ranks_of_a_new_ring_stay_together(tmp_path: Path) -> None:
    """A slow ring's steps are smaller, not fewer; the moments of AdamW come from the new ring's representative."""
    local_steps = 3
    with (
        serving(tmp_path, 4) as (server, service),
        Ranks(
            ring_training.move_with_local_steps,
            4,
            server.port,
            str(tmp_path / "keys"),
            local_steps,
            timeout_s=TIMEOUT_S,
        ) as ranks,
    ):
        found = ranks.values(timeout_s=TIMEOUT_S)
        assert service.status().samples == 960
    for epoch, pairs in enumerate([[(0, 1), (2, 3)], [(0, 2), (1, 3)]]):
        for first, second in pairs:
            one, other = found[first], found[second]
            assert sorted(map(sorted, one["rings"][epoch])) == [list(pair) for pair in pairs]
            assert one["pushes"][epoch] == -(-len(one["steps"][epoch]) // local_steps)
            assert one["steps"][epoch] == other["steps"][epoch]
            assert len(set(one["steps"][epoch])) > 1
