"""One rank's part of a schedule: what it sends and receives, round by round."""

from dataclasses import dataclass

from ringweave.schedules.schedule import How, Schedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or a receive of this rank."""

    round_index: int
    peer: int
    sends: bool
    first_chunk: int
    num_chunks: int
    how: How


def project(schedule: Schedule, rank: int) -> tuple[Transfer, ...]:
    """The transfers of `rank` in the order of the rounds; within a round sends come first.

    Cost:
        One pass over the rounds.
    """
    transfers: list[Transfer] = []
    for index, round_ in enumerate(schedule.rounds):
        for sends, mine in ((True, round_.src == rank), (False, round_.dst == rank)):
            for src, dst, first, count, how in round_.where(mine).rows():
                transfers.append(Transfer(index, dst if sends else src, sends, first, count, how))
    return tuple(transfers)


def project_all(schedule: Schedule) -> list[tuple[Transfer, ...]]:
    """The transfers of every rank, as `project` gives them.

    Cost:
        One pass over the rounds, and an object for each side of each operation.
    """
    parts: list[list[Transfer]] = [[] for _ in range(schedule.num_ranks)]
    for index, round_ in enumerate(schedule.rounds):
        for sends in (True, False):
            for src, dst, first, count, how in round_.rows():
                own, peer = (src, dst) if sends else (dst, src)
                parts[own].append(Transfer(index, peer, sends, first, count, how))
    return [tuple(part) for part in parts]
