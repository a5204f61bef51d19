"""The simulation of one collective: the executor's own programs, on virtual time, over links that streams share.

Messages between nodes go over one stream for each pair of ranks; streams share links max-min fairly. Ranks of a node
share memory. Ignored: headers (pass measured rates), how TCP finds its rate and what it loses, acknowledgements on the
way back, traffic that is not the collective's.
"""

from collections.abc import Iterable, Mapping, Sequence

from ringweave import cost, schedules
from ringweave.errors import UsageError, explain
from ringweave.schedules import Schedule
from ringweave.schedules.programs import Pipelining, Program, compile_program
from ringweave.sim.events.world import ELEMENT_BYTES, World
from ringweave.sim.faults import Fault
from ringweave.sim.machine import Machine
from ringweave.sim.regular import IrregularError, follow
from ringweave.sim.results import Simulation, Tell, silent
from ringweave.sim.routes import Routes
from ringweave.topology import Cluster

DEFAULT_TIMEOUT_S = 1800.0
"""What torch.distributed waits, where nothing else is said."""
FEW_MESSAGES, MOST_MESSAGES = 20_000, 2_000_000
"""From the first number on regular schedules go round by round; more than the second are not followed one by one."""


def simulate(  # noqa: PLR0913 - what is run, where, how, on what, and what goes wrong
    schedule: Schedule,
    cluster: Cluster,
    node_of_rank: Sequence[str],
    num_bytes: int,
    *,
    pipelining: Pipelining | None = None,
    rates: Mapping[str, float] | None = None,
    machine: Machine | None = None,
    faults: Iterable[Fault] = (),
    keeps_trace: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    tell: Tell = silent,
) -> Simulation:
    """Run a schedule on virtual time, event by event.

    Every rank follows the executor's own program. Large schedules are followed round by round instead, where they are
    regular (`regular.py`): the result is the same, but for the rounding of chunks to elements.

    Args:
        schedule: Any schedule.
        cluster: Where it is run.
        node_of_rank: Name of the node of each rank.
        num_bytes: Size of the message; chunks have whole elements of four bytes.
        pipelining: How the message is cut in time; None is one segment.
        rates: Measured bytes per second by directed link name.
        machine: What processors, memory and kernels add; None is nothing, the network alone.
        faults: What goes wrong.
        keeps_trace: Keep what each rank did and each link carried; of small schedules only.
        timeout_s: After which a rank that waits in vain gives up.
        tell: Gets now and then how many of how many rounds, or messages, are simulated.

    Raises:
        PlacementError: Not one node per rank.
        UsageError: A node, link, rank or rate is none of this cluster's; or there are too many messages to follow.

    Cost:
        About 75 us for each message of each segment; of a regular schedule 0.5 ms for each round of 10,000 ranks.
    """
    pipelining, machine, faults = pipelining or Pipelining(), machine or Machine(), tuple(faults)
    routes = Routes(cost.network(cluster, node_of_rank, rates), node_of_rank, schedule.num_ranks)
    if not has_few_messages(schedule, pipelining, FEW_MESSAGES):
        try:
            _check_regular(pipelining, keeps_trace=keeps_trace)
            found = follow(schedule, routes, num_bytes, machine, faults, tell)
            carried = routes.by_name(found.carried.tolist())
            return Simulation(finish_s=tuple(found.finish_s.tolist()), bytes_on_link=carried)
        except IrregularError as reason:
            if not has_few_messages(schedule, pipelining, MOST_MESSAGES):
                raise UsageError(_too_many(schedule, pipelining, str(reason))) from reason
    world = World(compile_all(schedule, node_of_rank, num_bytes, pipelining), routes, machine, keeps_trace=keeps_trace)
    world.apply(faults)
    return world.run(timeout_s, tell)


def has_few_messages(schedule: Schedule, pipelining: Pipelining, most: int) -> bool:
    """Whether a schedule has at most so many messages, counting those of every segment.

    Cost:
        One pass over the rounds, until there are too many.
    """
    count = 0
    for round_ in schedule.rounds:
        count += len(round_) * pipelining.num_segments
        if count > most:
            return False
    return True


def _check_regular(pipelining: Pipelining, *, keeps_trace: bool) -> None:
    if pipelining.num_segments > 1:
        raise IrregularError(f"there are {pipelining.num_segments} segments")
    if keeps_trace:
        raise IrregularError("a trace is to be kept")


def _too_many(schedule: Schedule, pipelining: Pipelining, reason: str) -> str:
    expected = f"at most {MOST_MESSAGES}, or a schedule that is regular; here {reason}"
    another = "another schedule, such as ring or leader-matrix with one rank a node"
    do = f"Take one segment (simulate --segments 1), or {another}" if pipelining.num_segments > 1 else f"Take {another}"
    return explain(f"messages of {schedule.name}", got=f"more than {MOST_MESSAGES}", expected=expected, do=do)


def compile_all(
    schedule: Schedule, node_of_rank: Sequence[str], num_bytes: int, pipelining: Pipelining
) -> list[Program]:
    """Every rank's program, as the executors of the ranks compile them."""
    parts = schedules.project_all(schedule)
    members: dict[str, set[int]] = {}
    for rank, node in enumerate(node_of_rank):
        members.setdefault(node, set()).add(rank)
    return [
        compile_program(schedule, part, num_bytes // ELEMENT_BYTES, pipelining, members[node] - {rank})
        for rank, (part, node) in enumerate(zip(parts, node_of_rank, strict=True))
    ]
