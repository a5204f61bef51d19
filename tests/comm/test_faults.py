"""Dead, silent and disagreeing peers: errors that name rank and node within the time-out, never a hang."""

import os
import re
import signal
from pathlib import Path

import pytest

from ringweave.telemetry.events import read_events
from ringweave.testing.ranks import RankOutcome, Ranks
from tests.comm import fault_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NODES = ["a0", "a0", "b0", "b1"]
GROUP_S = 300.0
"""The time-out of groups in which nothing may take that long."""
GLOO_S = 20.0
"""The time-out of a group whose collectives are Gloo's, which keep it; a busy machine forms the group within it."""
SOON_S = 200.0
"""A busy machine may take that long until an error is there that did not wait for the time-out."""


def last_line(outcome: RankOutcome) -> str:
    return outcome.error.strip().splitlines()[-1]


@pytest.mark.parametrize("num_elements", [2_000_000, 10], ids=["ring", "host"])
def test_a_killed_peer_is_named_by_all_survivors(num_elements: int) -> None:
    with Ranks(fault_functions.reduce_until_failure, 4, num_elements, timeout_s=GROUP_S, nodes=NODES) as ranks:
        ranks.wait_for(*(f"reducing/{rank}" for rank in range(4)))
        ranks.signal(2, signal.SIGKILL)
        for outcome in ranks.outcomes([0, 1, 3], timeout_s=SOON_S):
            assert "PeerError" in last_line(outcome)
            assert "rank 2 (node b0) is gone, expected every rank of the group to take part" in last_line(outcome)
            assert "Look into the log of that rank first" in last_line(outcome)
        assert ranks.outcomes([2])[0].exit_code == -signal.SIGKILL


def test_a_child_that_outlives_a_killed_peer_does_not_hide_its_death() -> None:
    # By a schedule: the child keeps the sockets of the native backend's trials open, whose death shows at the time-out.
    settings = {"timeout_s": GROUP_S, "nodes": NODES[:3], "environ": {"RINGWEAVE_TUNING": "0"}}
    with Ranks(fault_functions.fork_and_reduce_until_failure, 3, 500_000, **settings) as ranks:
        ranks.wait_for(*(f"{word}/{rank}" for word in ("child", "reducing") for rank in range(3)))
        children = [int(ranks.store.get(f"child/{rank}")) for rank in range(3)]
        ranks.signal(1, signal.SIGKILL)
        try:
            for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
                assert "rank 1 (node a0) is gone" in last_line(outcome)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("num_elements", "limit_s"),
    [pytest.param(2_000_000, GROUP_S, id="ring"), pytest.param(10, GLOO_S, id="host", marks=pytest.mark.thorough)],
)
def test_a_stopped_peer_is_named_within_the_time_out(num_elements: int, limit_s: float) -> None:
    with Ranks(fault_functions.reduce_until_failure, 4, num_elements, True, timeout_s=limit_s, nodes=NODES) as ranks:
        ranks.wait_for(*(f"reducing/{rank}" for rank in range(4)))
        ranks.signal(3, signal.SIGSTOP)
        for outcome in ranks.outcomes([0, 1, 2], timeout_s=SOON_S):
            assert "rank 3 (node b1) does not answer, expected every rank of the group" in last_line(outcome)


def test_a_stopped_peer_is_named_once_with_several_collectives_under_way(tmp_path: Path) -> None:
    settings = {"timeout_s": GROUP_S, "nodes": NODES, "environ": {"RINGWEAVE_RUN_DIR": str(tmp_path)}}
    with Ranks(fault_functions.wait_for_one_that_stops, 4, **settings) as ranks:
        for outcome in ranks.outcomes([0, 1, 2], timeout_s=SOON_S):
            assert len(outcome.value) == 2, outcome.error
            assert all("rank 3 (node b1) does not answer" in text for text in outcome.value)
    failed = [event for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "communication_failed"]
    assert sorted(event["rank"] for event in failed) == [0, 1, 2]


@pytest.mark.parametrize("nodes", [["a0", "b0"], ["a0", "a0"]], ids=["two nodes", "one node"])
def test_a_member_that_is_slow_to_its_first_collective_of_an_epoch_is_waited_for(nodes: list[str]) -> None:
    with Ranks(fault_functions.come_late_in_an_epoch, 2, 1.0, backend="gloo", nodes=nodes) as ranks:
        assert ranks.values(timeout_s=SOON_S) == [4e6, 4e6]


def test_another_size_is_a_disagreement_that_names_both_ranks() -> None:
    with Ranks(fault_functions.reduce_different_sizes, 3, False, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes(timeout_s=SOON_S):
            text = last_line(outcome)
            assert "DisagreementError" in text
            assert re.search(r"100000 x torch.float32 by \S+ [0-9a-f]{12}, num_segments \d+", text)
            assert "200000 x torch.float32 by " in text
            assert "rank 1 (node a0)" in text
            assert "call the same collectives in the same order with the same sizes" in text


def test_another_size_of_known_programs_is_found_at_the_first_message() -> None:
    with Ranks(fault_functions.reduce_different_sizes, 3, True, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes(timeout_s=SOON_S):
            text = last_line(outcome)
            assert "DisagreementError: allreduce #3" in text
            assert "runs something else: a message of " in text
            assert "Make every rank of the group call the same collectives in the same order" in text


def test_an_absent_rank_is_named_within_the_time_out() -> None:
    with Ranks(fault_functions.reduce_without_rank_1, 3, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
            assert "rank 1 (node a0) does not answer" in last_line(outcome)


def test_after_a_failure_the_group_refuses_at_once_and_says_why() -> None:
    with Ranks(fault_functions.leave_and_reduce_twice, 3, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
            first, second = outcome.value
            assert "PeerError: allreduce #2" in first
            assert "rank 1 (node a0) is gone" in first
            assert "allreduce #3" in second
            assert "this process group has failed before: allreduce #2" in second


def test_all_that_is_in_flight_fails_with_the_first_use() -> None:
    with Ranks(fault_functions.fail_at_first_use, 3, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
            assert len(outcome.value) == 2
            assert all("rank 1 (node a0) is gone" in text for text in outcome.value)


def test_a_rank_that_fails_by_itself_is_named_by_the_others_at_once() -> None:
    with Ranks(fault_functions.fail_alone, 3, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        texts = [outcome.value for outcome in ranks.outcomes(timeout_s=SOON_S)]
    assert "CommunicationError: allreduce #2" in texts[1]
    assert "rank 1 (node a0) failed: MemoryError: no room" in texts[1]
    for text in (texts[0], texts[2]):
        assert "PeerError: allreduce #2" in text
        assert "rank 1 (node a0) failed in allreduce #2" in text
        assert "MemoryError: no room" in text


@pytest.mark.parametrize("during", ["backward", "barrier"])
def test_a_death_in_training_is_named(during: str) -> None:
    with Ranks(fault_functions.die_in_training, 3, during, timeout_s=GROUP_S, nodes=NODES[:3]) as ranks:
        for outcome in ranks.outcomes([0, 2], timeout_s=SOON_S):
            assert "rank 1 (node a0) is gone" in outcome.error
