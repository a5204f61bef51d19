"""What to measure next, until the tree is known: a machine that is told rates and asks for batches.

Pairs first: each pair in both directions, as a tournament. Then all nodes at once, so that shared links fill up. Then,
for as long as there is something to learn: a fit (`fitting`), and a trial (`trials`) of a link that it rests on. An
edge between switches that does not hold back what is sent through it on purpose was none, and is refuted; so nothing
is invented for what happened by chance. Flows that stay unexplained are measured again, beside fewer others. In the end
everybody sends to somebody at random, and what comes out has to be explained as well.
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringweave.topology.recovery import batches, trees, trials
from ringweave.topology.recovery import evidence as seen
from ringweave.topology.recovery.batches import Batch
from ringweave.topology.recovery.evidence import Cut, Evidence
from ringweave.topology.recovery.fitting import CLEAR, Fit, assess, fit, rivals
from ringweave.topology.recovery.thinking import Thinking
from ringweave.topology.recovery.through import room

_LEAST_PROOFS = 2
_LEAST_PRESSURE = 1.12
_SURE_PROOFS = 3
_NUM_CHECKS = 2
MOST_SEARCHED = 64
"""Among more nodes no switches are looked for, and no uplink is put to trial, but NICs are: a job that starts has too
few batches to find out who shares an uplink, and a switch that is not there is worse than none."""
_NUM_EDGE_TRIALS = 3
"""A link never carries more than it can, but what busy machines held back once they let through another time."""
_NUM_REPEATS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much may be measured."""

    num_rounds: int | None = None
    """Rounds in which pairs meet, for latencies and for rates, and of all at once; None: all, so that every pair is
    measured in both directions."""
    num_trials: int | None = None
    """Batches after these; None: six for each node."""
    step_s: float = 5.0
    """Seconds of processor time that one decision may take: all others wait meanwhile."""
    thinking_s: float = 120.0
    """Seconds of processor time that all decisions may take; then the tree is what is known so far."""

    def rounds(self, most: int) -> int:
        """How many of so many rounds."""
        return most if self.num_rounds is None else min(self.num_rounds, most)


def survey(
    num_nodes: int,
    generator: random.Random,
    effort: Effort | None = None,
    clock: Callable[[], float] = time.thread_time,
) -> Generator[Batch, Sequence[float], tuple[Evidence, Fit]]:
    """Ask for batches, be sent the rate of each flow in bytes per second, and return what they say.

    Args:
        num_nodes: At least 2.
        generator: Decides who sends to whom when everybody does.
        effort: Bounds how much is asked for, and how long it is thought about; None is all pairs.
        clock: Seconds of processor time of this thread.

    Cost:
        For N nodes 2(N-1) batches of pairs (two more where N is odd), N-1 of all nodes, about N for the NICs, and six
        for each switch. Among more than `MOST_SEARCHED` nodes no switches are looked for.
    """
    effort = effort or Effort()
    evidence, thinking = Evidence(num_nodes), Thinking(effort.step_s, effort.thinking_s, clock)
    for batch in itertools.islice(batches.tournament(num_nodes), 2 * effort.rounds(num_nodes)):
        evidence.add(batch, (yield batch))
    if num_nodes > 3:
        for shift in range(1, 1 + effort.rounds(num_nodes - 1)):
            batch = batches.crowd(_shuffled(num_nodes, generator), shift)
            evidence.add(batch, (yield batch))
    known: tuple[Cut, ...] = ()
    if num_nodes > 2:
        num_trials = 6 * num_nodes if effort.num_trials is None else effort.num_trials
        known = yield from _try_links(evidence, generator, num_trials, thinking)
    if num_nodes > MOST_SEARCHED:
        found = assess(evidence, ())
    else:
        thinking.begin()
        found = _proved(evidence, lambda edge: True, thinking, known)
    return evidence, replace(found, unsought=_unsought(num_nodes, thinking))


def _unsought(num_nodes: int, thinking: Thinking) -> str | None:
    """What was not looked for, in words; None where everything was."""
    if num_nodes > MOST_SEARCHED:
        return f"switches were not looked for, as there are more than {MOST_SEARCHED} nodes: all hang on one"
    if thinking.was_cut_short:
        return "switches were not looked for to the end, as the time for it was up: there may be more"
    return None


def _try_links(
    evidence: Evidence, generator: random.Random, num_trials: int, thinking: Thinking
) -> Generator[Batch, Sequence[float], tuple[Cut, ...]]:
    """Trials until nothing is left to learn, or until the time is up; returns the edges that are known then."""
    num_nodes = evidence.num_nodes
    seeks = num_nodes <= MOST_SEARCHED
    tried: Counter[Cut] = Counter()
    repeated: Counter[int] = Counter()
    num_checks = num_rivals = 0
    found = assess(evidence, ())
    for _ in range(num_trials):
        found = _next_fit(evidence, found, tried, thinking)
        if thinking.is_over:
            break
        edges = [cut for cut in found.edges if not tried[cut]]
        believed = [cut for cut in found.edges if tried[cut] < _NUM_EDGE_TRIALS]
        doubtful = [cut for cut in found.nics if _is_doubtful(found, cut, tried[cut])]
        slow = _slowest(evidence, found, repeated) if seeks else None
        unfilled = _unfilled(evidence, found, tried) if seeks else ()
        if edges:
            chosen: tuple[Cut, ...] = (edges[0],)
            batch = trials.edge_trial(found, edges[0], num_nodes)
        elif doubtful:
            chosen = trials.nic_trials(found, evidence, doubtful, tried)
            batch = trials.nic_batch(found, evidence, chosen, tried)
        elif num_rivals < num_nodes and (new := _untried(rivals(evidence, found, thinking), tried, num_nodes)):
            num_rivals += 1
            chosen, batch = new, trials.edge_trial(found, new[0], num_nodes)
        elif unfilled:
            chosen, batch = unfilled, trials.edge_trial(found, unfilled[0], num_nodes)
        elif slow is not None and num_nodes > 3 and repeated.total() < num_nodes:
            number = int(evidence.batch[slow])
            repeated[number] += 1
            chosen, batch = (), trials.again(evidence.flows_of(number), evidence.flow(slow), generator)
        elif num_nodes > 3 and num_checks < _NUM_CHECKS:
            num_checks += 1
            chosen, batch = (), batches.crowd(_shuffled(num_nodes, generator), 1)
        elif believed:
            chosen, batch = (believed[0],), trials.edge_trial(found, believed[0], num_nodes)
        else:
            break
        tried.update(chosen)
        evidence.add(batch, (yield batch))
    return found.edges[::2]


def _next_fit(evidence: Evidence, found: Fit, tried: Counter[Cut], thinking: Thinking) -> Fit:
    """The fit before the next trial."""
    thinking.begin()
    if evidence.num_nodes > MOST_SEARCHED:
        return assess(evidence, ())

    def had_its_trial(edge: Cut) -> bool:
        return bool(tried[edge] and tried[seen.other_side(edge, evidence.num_nodes)])

    return _proved(evidence, had_its_trial, thinking, found.edges[::2])


def _untried(edges: Sequence[Cut], tried: Counter[Cut], num_nodes: int) -> tuple[Cut, ...]:
    """The first direction of any of these edges that had no trial; empty if all had."""
    both = [cut for edge in edges for cut in (edge, seen.other_side(edge, num_nodes))]
    return tuple(cut for cut in both if not tried[cut])[:1]


def _unfilled(evidence: Evidence, found: Fit, tried: Counter[Cut]) -> tuple[Cut, ...]:
    """The first direction of what may be a rack whose uplink nobody has filled yet; empty if there is none.

    Traffic that is not meant to fills an uplink of many nodes only by chance: it takes nearly all of them at once.
    Nodes that hang on one switch beside other things may be such a rack, or those of them whose NICs are alike.
    """
    num_nodes = found.num_nodes
    both = [cut for rack in trees.racks(found) for cut in (rack, seen.other_side(rack, num_nodes))]
    fresh = [cut for cut in both if not tried[cut]]
    carried = seen.capacities(evidence.loads(evidence.crossed(seen.rows(fresh, num_nodes)))) if fresh else ()
    for cut, most in zip(fresh, carried, strict=True):
        if _asked(found, cut) > _LEAST_PRESSURE * most:
            return (cut,)
    return ()


def _is_doubtful(found: Fit, cut: Cut, num_tried: int) -> bool:
    """Whether a NIC deserves a trial: it was seldom what held flows back, or never in spite of one."""
    return num_tried < len(trials.FACTORS) and found.num_proofs(cut) < (1 if num_tried else _SURE_PROOFS)


def _slowest(evidence: Evidence, found: Fit, repeated: Counter[int]) -> int | None:
    """The flow that is explained least, of a batch that was not repeated often enough; None if all is explained."""
    fresh = np.array([repeated[int(number)] < _NUM_REPEATS for number in evidence.batch])
    missing = np.where(fresh, found.unexplained, 0.0)
    return int(missing.argmax()) if missing.max() > CLEAR else None


def _proved(
    evidence: Evidence, had_its_trial: Callable[[Cut], object], thinking: Thinking, known: Sequence[Cut]
) -> Fit:
    """The fit without edges that had their trial and have not proved themselves by what is known now.

    Where the time for this decision is up, its edges are those found by then, or those that are known.
    """
    refuted: set[Cut] = set()
    while True:
        found = fit(evidence, thinking, refuted, [cut for cut in known if cut not in refuted])
        known = found.edges[::2]
        failed = {
            out
            for out, back in zip(known, found.edges[1::2], strict=True)
            if (had_its_trial(out) and found.num_proofs(out) + found.num_proofs(back) < _LEAST_PROOFS)
            or min(_pressure(found, out), _pressure(found, back)) < _LEAST_PRESSURE
        }
        if not failed:
            return found
        refuted |= failed


def _pressure(found: Fit, cut: Cut) -> float:
    """How many times what a cut carries the links on its sides would let through.

    What carries about as much as they do, in one direction at least, is no link of its own, only their sum: a cable has
    one rate for both directions, and what starved in one of them was held back by chance.
    """
    return _asked(found, cut) / found.capacity(cut)


def _asked(found: Fit, cut: Cut) -> float:
    """Bytes per second that the links on the sides of a cut would let through."""
    rates = dict(zip(found.cuts, found.capacities.tolist(), strict=True))
    return min(sum(side.values()) for side in room(rates, cut, found.num_nodes))


def _shuffled(num_nodes: int, generator: random.Random) -> list[int]:
    order = list(range(num_nodes))
    generator.shuffle(order)
    return order
