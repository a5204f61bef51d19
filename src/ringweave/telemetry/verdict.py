"""Verdict on a run: where its time goes, which rank the others wait for and why, and a remedy; pure.

It reads the events `steps_measured`, in which every rank sums its steps over windows. All ranks leave an exchange of
gradients together, so the one that waits least in it is the one that the others wait for, and its time there is that of
the transfers. The verdict knows nothing of runs without `ringweave.prepare`.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
MIN_COST = 0.05
"""Fraction of the time from which on a loss is named."""
MIN_LINK_COST = 0.2
"""The same for the time of transfers, which no run is without."""
MIN_STEPS = 20
"""Number of steps from which on there is a verdict; in fewer, starting counts for much."""
_MIN_WINDOWS = 3
"""Number of windows of a rank from which on its first one, with trials and warm-up, does not count."""
_HALF = 0.5
"""Fraction of an excess that a cause inside of a part has to explain."""
_MANY_FAULTS = 1.0
"""Pages read from a disk in a step, beside ten times as many as others read, that count as lack of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Something that a run loses time to."""

    cause: str
    """`compute`, `input`, `update`, `script`, `quota`, `collections`, `memory`, `link`, or `restarts`."""
    rank: int | None
    """Rank that the others wait for; None if no single one is the cause."""
    cost: float
    """Fraction of the time that is lost, measured."""
    evidence: str
    """Numbers behind it, as a sentence."""
    remedy: str
    """Advice, as a sentence; empty if there is none."""
    gain: float | None = None
    """Fraction of the time that the remedy would save, predicted; None if unknown."""

    def text(self) -> str:
        """Return all of it in one line."""
        gain = "" if self.gain is None else f" Predicted gain: {self.gain:.0%} of the time."
        advice = f" {self.remedy}" if self.remedy else ""
        return f"{self.cause}: {self.cost:.0%} of the time is lost (measured). {self.evidence}{advice}{gain}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankStep:
    """Mean step of a rank in one window; seconds."""

    rank: int
    node: str
    wall_s: float
    exchange_s: float
    parts: Mapping[str, float]
    """Cause -> seconds of own work: compute, input, update, and script, which is the rest of the step."""
    hidden: Mapping[str, float]
    """Cause -> seconds inside of the parts: quota, collections; for memory the pages read from a disk."""

    @property
    def own_s(self) -> float:
        return sum(self.parts.values())


def find_losses(events: Sequence[Event]) -> list[Loss]:
    """Return what the last attempt loses time to, the largest loss first; empty if nothing is worth a word."""
    windows = _align(events)
    if not windows:
        return []
    mode = next((each["mode"] for each in reversed(events) if each["kind"] == "training_prepared"), "")
    losses = [*_slow_ranks(windows, mode), *_losses_of_all(windows, events), *_restarts(events)]
    return sorted((each for each in losses if each.cost >= MIN_COST), key=lambda each: -each.cost)


def headline(losses: Sequence[Loss]) -> str:
    """Return the largest loss as a line for the end of a run; empty without one."""
    return f"ringweave: {losses[0].text()}\n" if losses else ""


def _align(events: Sequence[Event]) -> list[list[_RankStep]]:
    """Return the windows in time order, each with one step for every rank that has a window at about that time."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "steps_measured" and event["steps"]:
            by_rank[event["rank"]].append(event)
    counted = {rank: each[1:] if len(each) >= _MIN_WINDOWS else each for rank, each in by_rank.items()}
    if not counted:
        return []
    reference = max(counted.values(), key=len)
    if sum(each["steps"] for each in reference) < MIN_STEPS:
        return []
    return [
        [_rank_step(min(each, key=lambda other: abs(other["time"] - event["time"]))) for each in counted.values()]
        for event in reference
    ]


def _rank_step(event: Event) -> _RankStep:
    count = event["steps"]
    parts = {cause: event[f"{cause}_s"] / count for cause in ("compute", "input", "update")}
    wall_s, exchange_s = event["wall_s"] / count, event["exchange_s"] / count
    parts["script"] = max(0.0, wall_s - exchange_s - sum(parts.values()))
    hidden = {
        "quota": event["throttled_s"] / count,
        "collections": event["collections_s"] / count,
        "memory": event["major_faults"] / count,
    }
    return _RankStep(
        rank=event["rank"], node=event["node"], wall_s=wall_s, exchange_s=exchange_s, parts=parts, hidden=hidden
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Excess:
    """Work of a rank, in one window, beyond that of the others."""

    slow: _RankStep
    cause: str
    part: str
    """Part of the step that it is in."""
    usual_s: float
    """Seconds that the others need for this part, median."""
    cost: float
    """Fraction of the time of all ranks."""
    gain: float
    """Fraction of a step that shares by speed would save."""


def _slow_ranks(windows: Sequence[Sequence[_RankStep]], mode: str) -> list[Loss]:
    """Return a loss for each rank that others wait for, with the cause that explains most of it."""
    found: dict[tuple[int, str], list[_Excess]] = defaultdict(list)
    for window in windows:
        if len(window) > 1:
            excess = _excess(window)
            found[excess.slow.rank, excess.cause].append(excess)
    return [_slow_rank_loss(rows, len(windows), mode) for rows in found.values()]


def _excess(window: Sequence[_RankStep]) -> _Excess:
    slow = min(window, key=lambda each: each.exchange_s)
    usual = {cause: statistics.median(each.parts[cause] for each in window if each is not slow) for cause in slow.parts}
    part = max(slow.parts, key=lambda cause: slow.parts[cause] - usual[cause])
    wall_s = max(each.wall_s for each in window)
    computing = [each.parts["compute"] for each in window]
    balanced_s = len(computing) / sum(1 / each for each in computing) if min(computing) > 0 else 0.0
    return _Excess(
        slow=slow,
        cause=_cause_inside(slow, window, slow.parts[part] - usual[part]) or part,
        part=part,
        usual_s=usual[part],
        cost=max(0.0, slow.own_s - statistics.fmean(each.own_s for each in window)) / wall_s,
        gain=max(0.0, max(computing) - balanced_s) / wall_s,
    )


def _cause_inside(slow: _RankStep, window: Sequence[_RankStep], excess_s: float) -> str:
    """Return the cause that explains most of the excess in a part of a step; empty if none is known."""
    usual = {
        cause: statistics.median(each.hidden[cause] for each in window if each is not slow) for cause in slow.hidden
    }
    for cause in ("quota", "collections"):
        if excess_s > 0 and slow.hidden[cause] - usual[cause] >= _HALF * excess_s:
            return cause
    return "memory" if slow.hidden["memory"] >= _MANY_FAULTS + 10 * usual["memory"] else ""


_PART_TEXTS = {
    "compute": "computing",
    "input": "wait for a batch",
    "update": "optimizer step",
    "script": "time between steps",
}
_REMEDIES = {
    "compute": "Look for other programs on its node, and at its clock and temperature.",
    "input": "Give its DataLoader more workers (num_workers), or put its data on a faster disk.",
    "update": "Compare its processor and memory with the others'.",
    "script": "Look for work that this rank does alone, such as evaluation, logging or saving.",
    "quota": "Raise the CPU limit of its control group or container, or give it fewer threads.",
    "collections": "Call gc.freeze() after the model is built, or gc.disable() and collect now and then.",
    "memory": "Give it more memory, or end what uses it beside the run.",
}


def _slow_rank_loss(rows: Sequence[_Excess], num_windows: int, mode: str) -> Loss:
    worst = max(rows, key=lambda row: row.cost)
    slow, cause = worst.slow, worst.cause
    evidence = (
        f"The others wait for rank {slow.rank} on node {slow.node}: its {_PART_TEXTS[worst.part]} takes "
        f"{slow.parts[worst.part] * 1e3:.3g} ms a step, the others' {worst.usual_s * 1e3:.3g} ms."
    )
    if cause in _HIDDEN_TEXTS:
        evidence += f" {slow.hidden[cause] * 1e3:.3g} ms of it are {_HIDDEN_TEXTS[cause]}."
    if cause == "memory":
        evidence += f" It reads {slow.hidden[cause]:.3g} pages a step from a disk."
    cost, remedy, gain = sum(row.cost for row in rows) / num_windows, _REMEDIES[cause], None
    if cause in ("compute", "quota") and mode == "sync":
        remedy = "Use --mode balanced, which gives it fewer samples."
        gain = sum(row.gain for row in rows) / num_windows
    return Loss(cause=cause, rank=slow.rank, cost=cost, evidence=evidence, remedy=remedy, gain=gain)


_HIDDEN_TEXTS = {"quota": "pauses by the CPU quota of its control group", "collections": "Python's garbage collections"}


def _losses_of_all(windows: Sequence[Sequence[_RankStep]], events: Sequence[Event]) -> list[Loss]:
    """Return the losses that no single rank causes."""
    wall_s = sum(max(each.wall_s for each in window) for window in windows)

    def cost(seconds: Sequence[float]) -> float:
        return sum(seconds) / wall_s if wall_s else 0.0

    input_cost = cost([min(each.parts["input"] for each in window) for window in windows])
    quota_cost = cost([min(each.hidden["quota"] for each in window) for window in windows])
    link_cost = cost([min(each.exchange_s for each in window) for window in windows])
    found = [
        Loss(
            cause="input",
            rank=None,
            cost=input_cost,
            evidence=f"Every rank waits for batches for at least {input_cost:.0%} of a step.",
            remedy="Give the DataLoader more workers (num_workers) or a faster source.",
            gain=input_cost,
        ),
        Loss(
            cause="quota",
            rank=None,
            cost=quota_cost,
            evidence=f"CPU quotas stop every rank for at least {quota_cost:.0%} of a step.",
            remedy=_REMEDIES["quota"],
        ),
    ]
    if link_cost >= MIN_LINK_COST and len(windows[0]) > 1:
        binding = next((each["binding"] for each in reversed(events) if each["kind"] == "plan_made"), "")
        evidence = f"Transfers of gradients take {link_cost:.0%} of a step on the rank that waits least."
        evidence += f" The plan is bound by: {binding}." if binding else ""
        remedy = "See docs/how-to/slow-links.md for modes that send less."
        found.append(Loss(cause="link", rank=None, cost=link_cost, evidence=evidence, remedy=remedy))
    return found


def _restarts(events: Sequence[Event]) -> list[Loss]:
    """Return the loss to workers that died, if time without steps followed."""
    measured = [each for each in events if each["kind"] == "steps_measured"]
    deaths = [each for each in events if each["kind"] == "worker_exited" and each["signal"] and not each["stopped"]]
    rank = max({each["rank"] for each in measured}, key=lambda one: sum(each["rank"] == one for each in measured))
    own = [each for each in measured if each["rank"] == rank]
    total_s = own[-1]["time"] - own[0]["time"] + own[0]["wall_s"]
    cost = 1 - sum(each["wall_s"] for each in own) / total_s if total_s > 0 else 0.0
    if not deaths or cost <= 0:
        return []
    evidence = f"Killed workers: {len(deaths)}. Rank {rank} made no step for {cost * total_s:.3g} s of {total_s:.3g} s."
    remedy = "See which by ringweave events; a node that is short of memory kills its largest process."
    return [Loss(cause="restarts", rank=None, cost=cost, evidence=evidence, remedy=remedy)]
