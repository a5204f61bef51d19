import pytest

from ringweave.errors import ScheduleError
from ringweave.schedules import parameter_server
from tests.schedules.generated import moved


@pytest.mark.parametrize(("num_ranks", "root"), [(2, 0), (2, 1), (5, 0), (9, 4), (9, 8)])
def test_the_root_moves_all_messages_and_every_worker_one_in_equal_rounds(num_ranks: int, root: int) -> None:
    schedule = parameter_server(num_ranks, root)
    volumes = [num_ranks - 1 if rank == root else 1 for rank in range(num_ranks)]
    assert moved(schedule) == (volumes, volumes)
    assert schedule.name == "ps"
    assert len(schedule.rounds) == 2 * (num_ranks - 1)
    workers = [rank for rank in range(num_ranks) if rank != root]
    for index, round_ in enumerate(schedule.rounds):
        many, one = (round_.src, round_.dst) if index < num_ranks - 1 else (round_.dst, round_.src)
        assert many.tolist() == workers
        assert set(one.tolist()) == {root}
        assert sorted(round_.first_chunk.tolist()) == list(range(num_ranks - 1))


@pytest.mark.parametrize("root", [-1, 3])
def test_a_root_that_is_not_there(root: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        parameter_server(3, root)
    assert str(caught.value) == f"root: {root}, expected ranks 0..2. Name a rank of the group."


def test_a_group_of_nobody() -> None:
    with pytest.raises(ScheduleError, match=r"^num_ranks: 0, expected at least 1\. Name the ranks\.$"):
        parameter_server(0)
