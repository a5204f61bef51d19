"""Members that stand still or are cut off for half a minute: how long the others wait, and what the zombie does then.

    python bench/faults/standing.py --only pause,cut         # three minutes
    python bench/faults/standing.py                          # nine

An elastic job in a lab: SIGSTOP of a worker, its node cut off from the network both ways, deaf, and not heard; then the
same of the node of the coordinator that decides, and SIGSTOP of that coordinator just before a worker is killed. One
after the other, each when the one before has come back.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lab_jobs

from ringweave.benchmarks.chaos import deciders, faults, survivors
from ringweave.benchmarks.chaos.deciders import Deciders
from ringweave.benchmarks.chaos.faults import Fault
from ringweave.benchmarks.chaos.survivors import Toll
from ringweave.telemetry import Event

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
"""Of each kind its faults; `decides` is the node whose coordinator decides by then: one that is hit does no more."""
BAR_S = 2.0
_BACK_S = 20.0
"""Time to come back in, after a fault."""
_CALM_S = 10.0
_SOON_S = 0.1
_PLACES = ("a-0", "a-1")
"""Of the coordinators, the one that decides first before the other."""


def script(kinds: Sequence[str], lasts_s: float) -> tuple[str, float]:
    """The faults of some kinds as text, and when the last is over."""
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
    """The other one has to take over."""
    return kind.startswith("coordinator")


def strangers(events: Sequence[Event]) -> list[str]:
    """Cuts of a coordinator's node whose coordinator did not decide by then, in words."""
    known, found = Deciders(), []
    for event in events:
        known.note(event)
        for fault in faults.parse(event["fault"]) if event["kind"] == "fault_begun" else ():
            decides = "nobody" if known.coordinator is None else _PLACES[known.coordinator]
            if fault.kind == faults.CUT and fault.target in _PLACES and fault.target != decides:
                found.append(f"{fault}: the coordinator that decided was that of {decides}")
    return found


def missed(said: Mapping[str, Any], found: Sequence[Toll], happens: Sequence[Fault], num_over: int) -> list[str]:
    """What was not as it has to be, in words.

    Args:
        said: Of the job; with `coordinators_changed`, how often another one came to decide.
        found: What each fault that hit workers did.
        happens: All that was to happen.
        num_over: So many coordinators have to take over.
    """
    num_felt = sum(fault.hits_worker or fault.kind == faults.CUT for fault in happens)
    wrong = [*lab_jobs.missed(said), *said["strangers"]]
    wrong += [f"{len(found)} faults hit workers, not {num_felt}"] if len(found) != num_felt else []
    for each in found:
        wrong += [f"{each.fault}: the victim never came back"] if each.back_s is None else []
        wrong += [f"{each.fault}: {each.steps_as_zombie} steps as a zombie"] if each.steps_as_zombie else []
        wrong += lab_jobs.over(f"{each.fault}: stall in s", each.stall_s, BAR_S)
    num_changed = said["coordinators_changed"]
    return wrong + ([f"{num_changed} coordinators took over, not {num_over}"] if num_changed < num_over else [])


def main() -> int:
    """One of each; 1 if a bar is missed."""
    parser = lab_jobs.parser(__doc__)
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)}")
    parser.add_argument("--lasts", type=float, default=30.0)
    options = parser.parse_args()
    kinds = options.only.split(",")
    text, until_s = script(kinds, options.lasts)
    happens = lab_jobs.parse(text.splitlines(), options)
    ended = lab_jobs.run(options, happens, until_s=until_s, elastic=lab_jobs.bounds(options))
    found = survivors.tolls(ended.events)
    said = lab_jobs.summary(ended, found)
    said |= {"coordinators_changed": deciders.num_changes(ended.events), "strangers": strangers(ended.events)}
    rows = lab_jobs.toll_rows(found)
    lab_jobs.conclude(options, "standing", said, [*rows, *lab_jobs.summary_rows(said, len(rows[0]))])
    return lab_jobs.verdict(missed(said, found, happens, sum(map(hits_coordinator, kinds))))


if __name__ == "__main__":
    sys.exit(main())
