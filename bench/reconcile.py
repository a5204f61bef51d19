"""Time of one decision for a job, with a thousand jobs of 16 nodes whose nodes fail, each led to its end.

    python bench/reconcile.py --jobs 1000 --nodes 16

Measured: `reconcile` alone, and with writing and reading the record as platforms do that keep it as JSON.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ringweave.jobs import records
from ringweave.jobs.reconcile import reconcile
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.jobs.request import JobRequest, NodeRequest
from tests.fakes.job_runtime import FakeJobRuntime

_Result = TypeVar("_Result")


def main() -> None:
    """Lead the jobs to their ends, and print the times of the decisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    places = [FakeJobRuntime(job=_job(index, options.nodes)) for index in range(options.jobs)]
    deciding_s: list[float] = []
    saving_s: list[float] = []
    outcomes: dict[str, int] = {}
    while places:
        for place in places:
            _look(place, deciding_s, saving_s)
            _go_on(place, chance)
        ended = [place for place in places if place.job is None or place.job.record.state.is_end]
        for place in ended:
            assert place.job is not None
            assert place.broken_rules == []
            state = str(place.job.record.state)
            outcomes[state] = outcomes.get(state, 0) + 1
        places = [place for place in places if place not in ended]
    print(f"{options.jobs} jobs x {options.nodes} nodes, {len(deciding_s)} looks, ends {outcomes}")
    _tell("reconcile", deciding_s)
    _tell("record to JSON and back", saving_s)


def _job(index: int, num_nodes: int) -> records.Job:
    nodes = tuple(NodeRequest(name=f"n{node}", capacity=8) for node in range(num_nodes))
    request = JobRequest(name=f"job-{index}", num_workers=8 * num_nodes, script="train.py", nodes=nodes)
    counts = request.split.counts
    assert counts is not None
    return records.new_job(request, requester="bench", counts=counts, now=0.0)


def _look(place: FakeJobRuntime, deciding_s: list[float], saving_s: list[float]) -> None:
    job = place.job
    assert job is not None
    observed = place.observe()
    found = _timed(deciding_s, lambda: reconcile(job, observed, place.clock_s))
    for action in found:
        if isinstance(action, records.SaveRecord):
            record = action.record
            _timed(saving_s, lambda record=record: records.RECORD_JSON.parse(records.RECORD_JSON.dump(record)))
        place.apply(action)


def _go_on(place: FakeJobRuntime, chance: random.Random) -> None:
    """Time passes: a node fails in one tick of forty, and some finish where they run."""
    place.pass_time()
    if place.groups and chance.random() < 0.025:
        key = chance.choice(sorted(place.groups))
        if place.groups[key].phase.is_alive:
            place.end_group(key, EndCause.PLATFORM, "killed by SIGKILL")
    for key, group in list(place.groups.items()):
        if group.phase is GroupPhase.RUNNING and chance.random() < 0.1:
            place.end_group(key)


def _timed(taken_s: list[float], call: Callable[[], _Result]) -> _Result:
    begun_s = time.perf_counter()
    result = call()
    taken_s.append(time.perf_counter() - begun_s)
    return result


def _tell(what: str, taken_s: list[float]) -> None:
    """Percentiles in milliseconds."""
    in_order = sorted(taken_s)
    p50, p99 = (in_order[int(len(in_order) * share)] * 1e3 for share in (0.5, 0.99))
    print(f"measured: {what}: median {p50:.2f} ms, p99 {p99:.2f} ms, longest {in_order[-1] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
