"""Two parts of a job that cannot reach each other for a while, each with a coordinator."""

import pytest

from tests.membership.world import World


def go_on(world: World, num_rounds: int, *, is_cut: bool = False) -> None:
    """Everything is delivered, in order, where nothing is cut."""
    for number in range(num_rounds):
        world.tick()
        for member in world.members.values():
            if number % 20 == 19 and member.can_act and not world.coordinators[member.at].is_active:
                world.rejoin(member)
        for index in () if is_cut else (0, 1):
            world.hear(index)
        letters, world.letters = world.letters, []
        for letter in letters:
            letter()
        for member in world.members.values():
            world.work(member)
        world.check()


@pytest.mark.parametrize("back", [(), ("2.0",), ("0.0", "2.0")])
def test_what_the_greater_part_has_done_is_not_lost_whoever_came_back_to_its_coordinator_before(
    back: tuple[str, ...],
) -> None:
    world = World(3)
    go_on(world, 30)
    for name in back:
        world.rejoin(world.members[name], is_other=False)
    go_on(world, 5)
    world.cut = {("0.0", 0), ("1.0", 0), ("2.0", 1)}
    for name in ("0.0", "1.0"):
        world.rejoin(world.members[name])
    go_on(world, 150, is_cut=True)
    greater = [world.members[name] for name in ("0.0", "1.0")]
    before = min(each.status.committed for each in greater)
    assert before > world.members["2.0"].status.committed + 10, "it goes on with the standby"
    world.cut.clear()
    go_on(world, 100)
    assert [each.reason for each in greater] == ["", ""]
    assert min(each.status.committed for each in greater) > before + 10
    assert world.members["2.0"].follower.is_stopped


def test_what_one_has_heard_alone_is_not_taken_over_before_all_others_have_heard_it() -> None:
    world = World(5)
    go_on(world, 30)
    first, *others, late = world.members.values()
    while not all(each.status.at_step_boundary for each in world.members.values()):
        for each in world.members.values():
            if not each.status.at_step_boundary:
                world.work(each)
    for each in (first, *others, late):
        world.work(each)
    for each in (first, *others):
        world.work(each)
    assert [each.status.is_prepared for each in (first, *others, late)] == [True] * 4 + [False]
    late.is_paused, before = True, world.coordinators[0].membership
    while world.coordinators[0].membership == before:
        deliver(world)
    world.deaf = {(each.name, 0) for each in others}
    deliver(world)
    assert first.forming == world.coordinators[0].membership, "it alone knows what counts without the late one"
    for _ in range(5):
        world.work(first)
    world.is_down[0], late.is_paused, late.is_stuck = True, False, True
    world.kill(first)
    for each in (*others, late):
        world.rejoin(each)
    go_on(world, 30)
    late.is_stuck = False
    go_on(world, 100)
    assert {each.name for each in world.members.values() if each.can_act} == {each.name for each in (*others, late)}
    assert min(each.status.committed for each in others) > first.status.committed + 10


@pytest.mark.parametrize("is_mute", [False, True], ids=["both ways", "deaf"])
@pytest.mark.parametrize("still", [(), ("1.0",)], ids=["all connected", "one was put out and has ended"])
def test_who_was_not_heard_of_by_a_coordinator_that_was_itself_cut_off_comes_back(
    is_mute: bool, still: tuple[str, ...]
) -> None:
    world = World(5)
    world.is_down[1] = True  # there is no other one to go to
    go_on(world, 30)
    others = [each for each in world.members.values() if each.name != "0.0"]
    (world.mute if is_mute else world.cut).update((each.name, 0) for each in others)
    go_on(world, 30, is_cut=True)
    assert len(world.coordinators[0].present) == 1, "it has missed them"
    for name in still:
        world.kill(world.members[name])
    before = max(each.status.committed for each in others)
    world.mend()
    go_on(world, 60)
    there = [each for each in world.members.values() if each.name not in still]
    assert [each.reason for each in there] == [""] * len(there)
    assert min(each.status.committed for each in there) > before + 10


def deliver(world: World) -> None:
    world.tick()
    letters, world.letters = world.letters, []
    for letter in letters:
        letter()
    world.check()
