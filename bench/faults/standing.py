"""Members that are stopped or cut off for half a minute: the others' wait, and the behaviour of the zombie afterwards.

    python bench/faults/standing.py --only pause,cut         # three minutes
    python bench/faults/standing.py                          # nine

An elastic job in a lab: SIGSTOP of a worker; its node cut off from the network both ways, inbound, and outbound; then
the same for the node of the active coordinator, and SIGSTOP of that coordinator just before a worker is killed. One
after the other, each when the previous member has come back.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lab_jobs

from ringweave.telemetry import Event
from ringweave_bench.chaos import fault_script, job_history, member_impacts
from ringweave_bench.chaos.fault_script import Fault
from ringweave_bench.chaos.job_history import LeaderTracker
from ringweave_bench.chaos.member_impacts import FaultImpact

KINDS = {
    "pause": "at {at}s pause worker 4 for {lasts}s",
    "cut": "at {at}s cut a-5 for {lasts}s",
    "in": "at {at}s cut a-6 in for {lasts}s",
    "out": "at {at}s cut a-7 out for {lasts}s",
    "coordinator-cut": "at {at}s cut {decides} for {lasts}s",
    "coordinator-in": "at {at}s cut {decides} in for {lasts}s",
    "coordinator-out": "at {at}s cut {decides} out for {lasts}s",
    "coordinator-pause": "at {at}s pause coordinator for {lasts}s\nat {soon}s kill worker 3",
}
"""Faults of each kind; `decides` is the node of the coordinator that is active by then, not one that was hit."""
BAR_S = 2.0
_BACK_S = 20.0
"""Time for a member to come back after a fault."""
_CALM_S = 10.0
_SOON_S = 0.1
_PLACES = ("a-0", "a-1")
"""Nodes of the coordinators, the first active one first."""


def script(kinds: Sequence[str], lasts_s: float) -> tuple[str, float]:
    """Return the faults of some kinds as text, and the end of the last one."""
    lines, at_s, num_over = [], _CALM_S, 0
    for kind in kinds:
        decides = _PLACES[num_over % 2]
        lines.append(
            KINDS[kind].format(at=f"{at_s:g}", soon=f"{at_s + _SOON_S:g}", lasts=f"{lasts_s:g}", decides=decides)
        )
        at_s += lasts_s + _BACK_S
        num_over += hits_coordinator(kind)
    return "\n".join(lines), at_s


def hits_coordinator(kind: str) -> bool:
    """True if the other coordinator has to take over."""
    return kind.startswith("coordinator")


def strangers(events: Sequence[Event]) -> list[str]:
    """Return texts about cuts of a coordinator's node whose coordinator was not active by then."""
    known, found = LeaderTracker(), []
    for event in events:
        known.observe(event)
        for fault in fault_script.parse_faults(event["fault"]) if event["kind"] == "fault_begun" else ():
            decides = "nobody" if known.coordinator is None else _PLACES[known.coordinator]
            if fault.kind == fault_script.CUT and fault.target in _PLACES and fault.target != decides:
                found.append(f"{fault}: the coordinator that decided was that of {decides}")
    return found


def missed(said: Mapping[str, Any], found: Sequence[FaultImpact], happens: Sequence[Fault], num_over: int) -> list[str]:
    """Return the missed requirements, in words.

    Args:
        said: Summary of the job; `coordinators_changed` counts the takeovers.
        found: Impacts of the faults that hit workers.
        happens: All planned faults.
        num_over: Number of coordinators that must take over.
    """
    num_felt = sum(fault.hits_worker or fault.kind == fault_script.CUT for fault in happens)
    wrong = [*lab_jobs.missed(said), *said["strangers"]]
    wrong += [f"{len(found)} faults hit workers, not {num_felt}"] if len(found) != num_felt else []
    for each in found:
        wrong += [f"{each.fault}: the victim never came back"] if each.back_s is None else []
        wrong += [f"{each.fault}: {each.steps_as_zombie} steps as a zombie"] if each.steps_as_zombie else []
        wrong += lab_jobs.over(f"{each.fault}: stall in s", each.stall_s, BAR_S)
    num_changed = said["coordinators_changed"]
    return wrong + ([f"{num_changed} coordinators took over, not {num_over}"] if num_changed < num_over else [])


def main() -> int:
    """Run one fault of each kind; return 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--lasts", type=float, default=30.0)
    options = parser.parse_args()
    kinds = options.only.split(",")
    text, until_s = script(kinds, options.lasts)
    happens = lab_jobs.parse(text.splitlines(), options)
    ended = lab_jobs.run(options, happens, until_s=until_s, elastic=lab_jobs.bounds(options))
    found = member_impacts.measure_fault_impacts(ended.events)
    said = lab_jobs.summary(ended, found)
    said |= {"coordinators_changed": job_history.count_takeovers(ended.events), "strangers": strangers(ended.events)}
    rows = lab_jobs.toll_rows(found)
    lab_jobs.conclude(options, "standing", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))])
    return lab_jobs.verdict(missed(said, found, happens, sum(map(hits_coordinator, kinds))))


if __name__ == "__main__":
    sys.exit(main())
