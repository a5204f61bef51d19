"""Hierarchical allreduce: rings inside groups, a ring of one representative per group, a broadcast inside groups.

Source: what Huang and Yang, "A highly scalable distributed machine learning architecture based on Ring All-Reduce"
(2022), compare their architecture with.
"""

from collections.abc import Sequence

from ringweave.schedules.generators import grouping, rings
from ringweave.schedules.joining import one_after_the_other
from ringweave.schedules.schedule import Collective, Schedule


def hierarchical(groups: Sequence[Sequence[int]]) -> Schedule:
    """Allreduce inside each group, among the groups' first ranks, then from these to their groups.

    The text says broadcast and not how: here it is a chain in the order of the group, each rank passing on the whole
    message, because the segments of a message follow each other along a chain and every link carries it once.

    Args:
        groups: The ranks of each group in the order of its ring, the representative first; sizes may differ.

    Returns:
        A schedule whose chunks lie between the borders of all cuts at once (`grouping.cut`): in n pieces for each size
        n of a group and in k pieces for k groups. With n the size of the largest group, it has 2(n-1) + 2(k-1) + (n-1)
        rounds; a single group needs no broadcast.

    Raises:
        ScheduleError: The groups do not name every rank once, or one is empty.

    Cost:
        In a group of n each rank sends 2(n-1)/n of the message, the representative 2(k-1)/k more, and all but the last
        of the chain once more the whole.
    """
    num_ranks = grouping.check_groups("hierarchical groups", groups)
    representatives = [group[0] for group in groups]
    cut = grouping.cut([len(groups), *map(len, groups)])
    rounds, phases = one_after_the_other(
        ("allreduce inside groups", rings.turning(groups, [cut.borders[len(group)] for group in groups])),
        ("allreduce among representatives", rings.turning([representatives], [cut.borders[len(groups)]])),
        ("broadcast inside groups", rings.passing_on(groups, len(cut.shares)) if len(groups) > 1 else ()),
    )
    return Schedule("hierarchical", Collective("allreduce"), num_ranks, cut.shares, rounds, phases)
