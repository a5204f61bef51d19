"""Which rank has what, without any process."""

import pytest

from ringweave.errors import UsageError
from ringweave.pipeline import Layout, Settings, even_splits
from ringweave.sim import pipeline_schedules


def test_stages_and_replicas() -> None:
    layout = Layout(num_blocks=10, splits=(2, 5, 7), num_replicas=2)
    assert layout.ranges == (range(2), range(2, 5), range(5, 7), range(7, 10))
    assert layout.world_size == 8
    assert [layout.stage_of_block(block) for block in range(10)] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    assert layout.ranks_of_replica(1) == (4, 5, 6, 7)
    assert layout.ranks_of_stage(2) == (2, 6)
    assert [(layout.stage_of_rank(rank), layout.replica_of_rank(rank)) for rank in (3, 4)] == [(3, 0), (0, 1)]


def test_empty_stages_have_no_block() -> None:
    layout = Layout(num_blocks=3, splits=(0, 2, 2, 3))
    assert layout.ranges == (range(0), range(2), range(2, 2), range(2, 3), range(3, 3))
    assert [layout.stage_of_block(block) for block in range(3)] == [1, 1, 3]


@pytest.mark.parametrize(("num_blocks", "num_stages", "splits"), [(10, 4, (3, 6, 8)), (4, 4, (1, 2, 3)), (5, 1, ())])
def test_even_splits(num_blocks: int, num_stages: int, splits: tuple[int, ...]) -> None:
    assert even_splits(num_blocks, num_stages) == splits


def test_wrong_layouts() -> None:
    with pytest.raises(UsageError) as caught:
        Layout(num_blocks=3, splits=(2, 1))
    assert str(caught.value) == (
        "splits: (2, 1), expected numbers from 0 to 3, the blocks there are, none smaller than the one before it. "
        "Take what `ringweave partition` prints."
    )
    with pytest.raises(UsageError) as caught:
        Layout(num_blocks=3, splits=(1,), num_replicas=0)
    assert str(caught.value) == (
        "replicas of the pipeline: 0, expected 1 or more. Start a whole number of workers for each stage."
    )


def test_wrong_settings() -> None:
    with pytest.raises(UsageError) as caught:
        Settings(num_microbatches=0)
    assert str(caught.value) == "microbatches: 0, expected 1 or more. Say how many parts a batch is cut into."
    with pytest.raises(UsageError, match="pipeline schedule: '1f1c', expected one of gpipe, 1f1b, 1f1b-overlap"):
        Settings(num_microbatches=4, schedule="1f1c")
    with pytest.raises(UsageError) as caught:
        Settings(num_microbatches=4, schedule=pipeline_schedules.generate_pipeline_schedule("gpipe", 2, 3))
    assert str(caught.value) == (
        "microbatches of the order: 3, expected 4, as in num_microbatches. Generate the order for this number."
    )
    with pytest.raises(UsageError) as caught:
        Settings(num_microbatches=4, reduction="none")
    assert str(caught.value) == (
        "reduction: 'none', expected mean or sum. Say how the loss of a batch follows from those of its microbatches."
    )
    with pytest.raises(UsageError) as caught:
        Settings(num_microbatches=4, num_stages=2, splits=(1, 2))
    assert str(caught.value) == "stages: 2, expected 3, one more than there are splits. Give one of the two."
