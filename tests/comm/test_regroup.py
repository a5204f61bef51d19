"""Aborting a group in the middle of a collective, and going on without the rank that is to blame."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import regroup
from ringweave.testing.ranks import Ranks
from tests.comm import aborting_functions, fault_functions

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NODES = ["a0", "b0"]
LIMIT_S = 3.0
FAILING = """
import torch, torch.distributed as dist
dist.init_process_group("ringweave")
dist.all_reduce(torch.ones(1_000_000))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1_000_000), async_op=True)
    raise ValueError("enough")
dist.distributed_c10d._get_default_store().wait(["never"])
"""


@pytest.mark.parametrize("nodes", regroup.NODES.values(), ids=regroup.NODES)
def test_survivors_regroup_and_the_buffer_of_the_aborted_collective_is_theirs(nodes: list[str]) -> None:
    for taken in regroup.measure(nodes, num_elements=2_000_000):  # values are checked on the ranks
        assert set(taken) == {"ended_s", "group_s", "result_s"}  # the first collective has ended with an error


def test_what_waits_for_a_first_use_that_never_runs_ends_with_the_group() -> None:
    untried = {"RINGWEAVE_TUNING": "0"}  # trials run alone, and would wait for the stalled one
    with Ranks(
        aborting_functions.abort_while_a_first_use_waits, 2, timeout_s=200, nodes=NODES, environ=untried
    ) as ranks:
        (outcome,) = ranks.outcomes([0], timeout_s=200)
        assert not outcome.error
        assert len(outcome.value) == 3
        assert all("this process group has failed before: process group: aborted" in text for text in outcome.value)


@pytest.mark.parametrize("nodes", [NODES, ["a0", "a0"]], ids=["two nodes", "one node"])
def test_who_waits_for_a_rank_that_aborts_before_its_first_use_hears_of_it(nodes: list[str]) -> None:
    with Ranks(aborting_functions.abort_before_the_first_use, 2, timeout_s=300, nodes=nodes) as ranks:
        (outcome,) = ranks.outcomes([1], timeout_s=200)
    assert "rank 0 (node a0) is gone" in outcome.value
    assert "it does not listen any more" in outcome.value


def test_an_abort_ends_the_search_for_who_is_to_blame() -> None:
    with Ranks(aborting_functions.explain_to_one_that_aborts, 2, timeout_s=200, nodes=NODES) as ranks:
        ranks.wait_for("reducing/0")
        ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.outcomes([0], timeout_s=200)
    assert "allreduce #2" in outcome.value


def test_closing_gives_all_lanes_one_limit_together() -> None:
    with Ranks(aborting_functions.close_while_both_lanes_wait, 2, LIMIT_S, timeout_s=200, nodes=NODES) as ranks:
        taken_s, limits_s = ranks.values(timeout_s=200)[0]
    assert taken_s >= LIMIT_S
    assert sum(limits_s) <= LIMIT_S, "each lane has its own"


def test_a_script_that_fails_with_a_collective_under_way_ends_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    command = [str(Path(sys.executable).with_name("ringweave")), "run", "--workers", "2", "failing.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=False
    )
    text = ended.stdout + ended.stderr
    assert "ValueError: enough" in text
    assert "SIGABRT" not in text
    assert "terminate called" not in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_of_the_same_node_is_named_by_all_others(number: signal.Signals) -> None:
    arguments = (fault_functions.reduce_until_failure, 4, 2_000_000, number == signal.SIGSTOP)
    with Ranks(*arguments, timeout_s=300, nodes=["a0"] * 4) as ranks:
        ranks.wait_for(*(f"reducing/{rank}" for rank in range(4)))
        ranks.signal(2, number)
        text = "is gone" if number == signal.SIGKILL else "does not answer"
        for outcome in ranks.outcomes([0, 1, 3], timeout_s=200):
            assert f"rank 2 (node a0) {text}, expected every rank of the group to take part" in outcome.error
