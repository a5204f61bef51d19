import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ringweave.comm import backend, generation_group
from ringweave.comm.generation_group import GenerationGroups
from ringweave.errors import PeerError

HERE = "127.0.0.1"


def test_an_epoch_that_was_ordered_before_an_abort_is_not_formed() -> None:
    groups = GenerationGroups(HERE)
    num_aborts, place = groups.num_aborts, groups.store_address
    groups.abort()
    with pytest.raises(PeerError, match=r"group of generation 1\.1: aborted while it was formed\. Form the next one\."):
        groups.form_group(place, "1.1", 0, 1, num_aborts)
    assert groups.store_address == place, "it was not used"


def test_a_first_member_that_is_gone_is_not_searched_for() -> None:
    groups = GenerationGroups(HERE)
    with pytest.raises(PeerError, match=r"group of generation 1\.2: .*refused, expected all of 2 members\."):
        groups.form_group(f"{HERE} 9", "1.2", 1, 2, groups.num_aborts)


def test_a_store_is_told_for_one_epoch() -> None:
    groups = GenerationGroups(HERE)
    place = groups.store_address
    groups.form_group(place, "1.3", 0, 1, groups.num_aborts)
    assert groups.store_address != place
    groups.abort()
    groups.leave_group()


def test_the_script_has_a_rank_at_any_moment_and_no_group_of_an_epoch_that_is_over() -> None:
    groups, has_ended, failures = GenerationGroups(HERE), threading.Event(), []

    def ask() -> None:
        while not has_ended.is_set():
            try:
                assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
            except Exception as error:
                failures.append(error)
                return

    groups.form_group(groups.store_address, "1.1", 0, 1, groups.num_aborts)
    beside = dist.new_group([0])
    thread = threading.Thread(target=ask)
    thread.start()
    for number in range(2, 8):
        before = dist.group.WORLD
        groups.abort()
        groups.form_group(groups.store_address, f"1.{number}", 0, 1, groups.num_aborts)
        assert dist.group.WORLD is not before
    has_ended.set()
    thread.join()
    assert failures == []
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(beside)
    assert generation_group.is_generation_group()
    groups.leave_group()
    assert not dist.is_initialized()
    assert not generation_group.is_generation_group()


def test_who_ran_out_of_time_gives_it_twice_as_long_the_next_time() -> None:
    """Whoever listens here never answers."""
    with socket.create_server((HERE, 0)) as silent:
        groups, seconds = GenerationGroups(HERE, form_timeout_s=0.2), []
        for number in range(3):
            began_s = time.monotonic()
            with pytest.raises(PeerError, match=r"expected all of 2 members"):
                groups.form_group(f"{HERE} {silent.getsockname()[1]}", f"1.{number}", 1, 2, groups.num_aborts)
            seconds.append(time.monotonic() - began_s)
    assert seconds[1] >= 0.4
    assert seconds[2] >= 0.8


@pytest.mark.parametrize(
    "stands",
    ["_make_group", "wait_for_plan", "_connect_trees"],
    ids=["while it meets the others", "before it tells the plan", "before it takes rows"],
)
def test_a_first_member_that_is_stopped_keeps_nobody_from_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch, stands: str
) -> None:
    """Who is ordered to stand still meanwhile does, and joins the next epoch at once."""
    groups, errors = GenerationGroups(HERE), []
    is_stopped, is_let_go = threading.Event(), threading.Event()
    whose = backend.RingweaveProcessGroup if stands == "wait_for_plan" else generation_group
    goes_on = getattr(whose, stands)

    def stop(*args: object, **kwargs: object) -> object:
        is_stopped.set()
        is_let_go.wait(60)
        return goes_on(*args, **kwargs)

    def form() -> None:
        try:
            groups.form_group(groups.store_address, "1.1", 0, 1, 0)
        except PeerError as error:
            errors.append(str(error))

    forming = threading.Thread(target=form)
    with monkeypatch.context() as patch:
        patch.setattr(whose, stands, stop)
        forming.start()
        assert is_stopped.wait(30)
        groups.abort()
        forming.join(30)
    assert "group of generation 1.1: aborted while it was formed. Form the next one." in errors[0]
    groups.form_group(groups.store_address, "1.2", 0, 1, 1)
    default = dist.group.WORLD
    is_let_go.set()
    while "ringweave group setup" in {thread.name for thread in threading.enumerate()}:
        time.sleep(0.01)
    assert dist.group.WORLD is default, "the group that came too late is none that anybody uses"
    groups.form_group(groups.store_address, "1.3", 0, 1, 1)
    assert list(distributed_c10d._world.pg_map) == [dist.group.WORLD], "nothing is left of it"
    groups.leave_group()


def test_both_groups_of_a_generation_form_at_the_same_time_while_the_previous_ones_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the three goes on only when all three are under way."""
    groups, all_there = GenerationGroups(HERE), threading.Barrier(3)
    groups.form_group(groups.store_address, "1.1", 0, 1, 0, has_reduce_group=True)
    before = [dist.group.WORLD, groups.reduce_group]
    make, abort = generation_group._make_group, generation_group._abort_groups

    def make_later(*args: Any) -> Any:
        all_there.wait(60)
        return make(*args)

    def abort_later(old: Any) -> None:
        assert {*old} == {*before}
        all_there.wait(60)
        abort(old)

    with monkeypatch.context() as patch:
        patch.setattr(generation_group, "_make_group", make_later)
        patch.setattr(generation_group, "_abort_groups", abort_later)
        groups.form_group(groups.store_address, "1.2", 0, 1, 0, has_reduce_group=True)
    assert {*distributed_c10d._world.pg_map} == {dist.group.WORLD, groups.reduce_group}
    assert not {dist.group.WORLD, groups.reduce_group} & {*before}
    groups.leave_group()


def test_what_a_member_cannot_do_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such node")

    monkeypatch.setattr(generation_group, "_make_group", refuse)
    groups = GenerationGroups(HERE)
    with pytest.raises(ValueError, match="no such node"):
        groups.form_group(groups.store_address, "1.1", 0, 1, 0)
