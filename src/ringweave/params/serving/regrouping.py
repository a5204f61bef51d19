"""Other rings for the same job: what may be asked for, and when."""

from collections.abc import Sequence

from ringweave.errors import TrainingError, explain
from ringweave.params.messages import Setup


def regrouped(setup: Setup, rings: Sequence[Sequence[int]], computing: Sequence[int]) -> Setup:
    """The job with these rings.

    Args:
        setup: The job.
        rings: Ranks of each ring.
        computing: Rings that have not left: their next push would be counted to another ring.

    Raises:
        TrainingError: They are not of the job's ranks, or a ring is still computing.
    """
    ranks, before = (sorted(rank for ring in each for rank in ring) for each in (rings, setup.rings))
    if ranks != before or not all(rings):
        do = "Regroup all ranks of the job"
        expected = f"every one of the ranks {before} in one of them"
        raise TrainingError(explain("new rings", got=[list(ring) for ring in rings], expected=expected, do=do))
    if computing:
        do = "Let every ring leave first, as at the end of an epoch"
        raise TrainingError(
            explain("rings that compute while new ones are formed", got=list(computing), expected="none", do=do)
        )
    return setup.model_copy(update={"rings": [list(ring) for ring in rings]})
