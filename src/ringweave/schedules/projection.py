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
