"""Verdict on a run: where its time goes, which rank the others wait for and why, and a remedy; pure.

It reads the events `steps_measured`, in which every rank sums its steps over windows. All ranks leave an exchange of
gradients together, so the one that waits least in it is the one that the others wait for, and its time there is that of
the transfers. Of scripts without `ringweave.prepare` it knows the collectives alone (`traffic_measured`): the rank that
spends least time in them is the one that the others wait for. Slow links show in the same events: every rank has bytes
and seconds to each peer.
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
"""The same for the time of transfers by links that are alike, which no run is without."""
MIN_TRIALS_COST = 0.1
"""The same for trials of schedules, which no first run over several nodes is without; they cost a long run little."""
MIN_STEPS = 20
"""Number of steps from which on there is a verdict; in fewer, starting counts for much."""
_MIN_WINDOWS = 3
"""Number of windows of a rank from which on its first one, with trials and warm-up, does not count."""
_HALF = 0.5
"""Fraction of an excess that a cause inside of a part has to explain."""
_ONE_SIDED = 0.75
"""Fraction of the excess of both passes from which on one of them is the cause."""
_MANY_FAULTS = 1.0
"""Pages read from a disk in a step, beside ten times as many as others read, that count as lack of memory."""
_PAGE_BYTES = 4096
_STALLED = 0.3
"""Fraction of a wait for batches for which a disk is waited for; the kernel counts about half of it (measured)."""
_ONCE = 5
"""Number of windows from which on a loss has to show in two: a single pause of a machine is nothing to mend."""
_ONCE_PART = 0.9
"""Part of a loss that a single window has if it came once."""
_SLOW_LINK = 0.35
"""Part of the usual rate below which a link is slow."""
_BUSY = 0.25
"""Fraction of the exchanges for which a slow link has to be busy; of links that are alike, half."""
_SAME_CAUSE = 1.5
"""Multiple of the slowest rate up to which a link is slow for the same cause; others wait for messages by slow ones."""
_MIN_LINK_BYTES = 2**18
"""Bytes on a link from which on its rate is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Something that a run loses time to."""

    cause: str
    """`compute`, `forward`, `backward`, `input`, `disk`, `update`, `script`, `work`, `quota`, `collections`, `memory`,
    `link`, `nic`, `trials`, or `restarts`."""
    rank: int | None
    """Rank that the others wait for, or whose link is slow; None if no single one is the cause."""
    cost: float
    """Fraction of the time that is lost, measured."""
    evidence: str
    """Numbers behind it, as a sentence."""
    remedy: str
    """Advice, as a sentence; empty if there is none."""
    gain: float | None = None
    """Fraction of the time that the remedy would save, predicted; None if unknown."""
    peer: int | None = None
    """Rank at the receiving end of a slow link."""

    def text(self) -> str:
        gain = "" if self.gain is None else f" Predicted gain: {self.gain:.0%} of the time."
        advice = f" {self.remedy}" if self.remedy else ""
        return f"{self.cause}: {self.cost:.0%} of the time is lost (measured). {self.evidence}{advice}{gain}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankStep:
    """Mean step of a rank in one window; seconds."""

    rank: int
    node: str
    steps: int
    wall_s: float
    exchange_s: float
    parts: Mapping[str, float]
    """Cause -> seconds of own work: forward, backward, input, update, and script, which is the rest of the step."""
    hidden: Mapping[str, float]
    """Further sums of the window by their names in the event, for each step; 0 where the event lacks them."""

    @property
    def own_s(self) -> float:
        return sum(self.parts.values())

    @property
    def computing_s(self) -> float:
        return self.parts.get("forward", 0.0) + self.parts.get("backward", 0.0)


_HIDDEN = (
    "throttled_s",
    "collections_s",
    "major_faults",
    "memory_stall_s",
    "disk_stall_s",
    "read_bytes",
    "input_processor_s",
    "forward_s",
)


def find_losses(events: Sequence[Event]) -> list[Loss]:
    """Return what the last attempt loses time to, the largest loss first; empty if nothing is worth a word."""
    windows = _align(events)
    if not windows:
        return []
    mode = next((each["mode"] for each in reversed(events) if each["kind"] == "training_prepared"), "")
    losses = [*_slow_ranks(windows, mode), *_losses_of_all(windows, events), *_trials(events), *_restarts(events)]
    return sorted((each for each in losses if each.cost >= MIN_COST), key=lambda each: -each.cost)


def headline(losses: Sequence[Loss]) -> str:
    """Return the largest loss as a line for the end of a run; empty without one."""
    return f"ringweave: {losses[0].text()}\n" if losses else ""


def _align(events: Sequence[Event]) -> list[list[_RankStep]]:
    """Return the windows in time order, each with one step for every rank that has a window at about that time."""
    by_rank = _windows_by_rank(events, "steps_measured", "steps") or _windows_by_rank(
        events, "traffic_measured", "collectives"
    )
    if not by_rank:
        return []
    if max(sum(each["steps"] for each in windows) for windows in by_rank.values()) < MIN_STEPS:
        return []
    counted = list(map(_without_first, by_rank.values()))
    return [
        [_rank_step(min(each, key=lambda other: abs(other["time"] - event["time"]))) for each in counted]
        for event in max(counted, key=len)
    ]


def _windows_by_rank(events: Sequence[Event], kind: str, count: str) -> dict[int, list[Event]]:
    """Return the windows of each rank, each with its number of steps, or of what stands for them."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == kind and event[count]:
            by_rank[event["rank"]].append({**event, "steps": event[count]})
    return by_rank


def _without_first(windows: list[Event]) -> list[Event]:
    return windows[1:] if len(windows) >= _MIN_WINDOWS else windows


def _rank_step(event: Event) -> _RankStep:
    count = event["steps"]
    wall_s, exchange_s = event["wall_s"] / count, event.get("exchange_s", event.get("in_flight_s", 0.0)) / count
    if event["kind"] == "traffic_measured":
        parts = {"work": max(0.0, wall_s - exchange_s)}
    else:
        parts = {cause: event[f"{cause}_s"] / count for cause in ("input", "update")}
        parts["forward"] = min(event.get("forward_s", 0.0), event["compute_s"]) / count
        parts["backward"] = event["compute_s"] / count - parts["forward"]
        parts["script"] = max(0.0, wall_s - exchange_s - sum(parts.values()))
    return _RankStep(
        rank=event["rank"],
        node=event["node"],
        steps=count,
        wall_s=wall_s,
        exchange_s=exchange_s,
        parts=parts,
        hidden={name: event.get(name, 0.0) / count for name in _HIDDEN},
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _SlowWindow:
    """Window of the rank that the others wait for, beside theirs; seconds of a step."""

    slow: _RankStep
    usual: Mapping[str, float]
    """Parts of the others, median."""
    usual_hidden: Mapping[str, float]
    lost_s: float
    """Seconds that the ranks wait for it, mean over all."""
    gain_s: float
    """Seconds that a step would be shorter if it were as slow as the next one."""
    balanced_gain_s: float
    """Seconds that shares by speed would save."""
    paused_s: float
    """Seconds of the exchange for which a CPU quota stops it, beyond the others: they wait for its messages."""


def _slow_ranks(windows: Sequence[Sequence[_RankStep]], mode: str) -> list[Loss]:
    """Return a loss for each rank that others wait for, with the cause that explains most of it."""
    found: dict[int, list[_SlowWindow]] = defaultdict(list)
    for window in windows:
        if len(window) > 1:
            slow = _slow_window(window)
            found[slow.slow.rank].append(slow)
    wall_s = sum(max(each.wall_s for each in window) * window[0].steps for window in windows)
    losses = [
        _slow_rank_loss(rows, _stalls(windows, rank), wall_s, mode)
        for rank, rows in found.items()
        if not _came_once(rows, len(windows))
    ]
    return [each for each in losses if each is not None]


def _stalls(windows: Sequence[Sequence[_RankStep]], rank: int) -> dict[str, float]:
    """Return a rank's stalls over all windows: the kernel adds up every two seconds, too late for short windows."""
    own = [each for window in windows for each in window if each.rank == rank]
    return {name: sum(each.steps * each.hidden[name] for each in own) for name in ("memory_stall_s", "disk_stall_s")}


def _slow_window(window: Sequence[_RankStep]) -> _SlowWindow:
    slow = min(window, key=lambda each: each.exchange_s)
    others = [each for each in window if each is not slow]
    computing = [each.computing_s for each in window]
    balanced_s = len(computing) / sum(1 / each for each in computing) if min(computing) > 0 else 0.0
    return _SlowWindow(
        slow=slow,
        usual={part: statistics.median(each.parts[part] for each in others) for part in slow.parts},
        usual_hidden={name: statistics.median(each.hidden[name] for each in others) for name in _HIDDEN},
        lost_s=max(0.0, slow.own_s - statistics.fmean(each.own_s for each in window)),
        gain_s=max(0.0, slow.own_s - max(each.own_s for each in others)),
        balanced_gain_s=max(0.0, max(computing) - balanced_s) if balanced_s else 0.0,
        paused_s=_paused_s(slow, others),
    )


def _paused_s(slow: _RankStep, others: Sequence[_RankStep]) -> float:
    pauses_s = slow.hidden["throttled_s"] - statistics.median(each.hidden["throttled_s"] for each in others)
    excess_s = max(0.0, slow.own_s - statistics.median(each.own_s for each in others))
    return min(slow.exchange_s, max(0.0, pauses_s - excess_s))


def _came_once(rows: Sequence[_SlowWindow], num_windows: int) -> bool:
    lost = [row.lost_s * row.slow.steps for row in rows]
    return num_windows >= _ONCE and max(lost) >= _ONCE_PART * sum(lost)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sums:
    """Sums over the windows in which a rank is the slow one."""

    excess: Mapping[str, float]
    """Part -> seconds beyond those of the others."""
    hidden: Mapping[str, float]
    beyond: Mapping[str, float]
    """The same beyond those of the others."""
    steps: int
    paused_s: float

    @property
    def excess_s(self) -> float:
        return sum(max(0.0, each) for each in self.excess.values())


def _sum_up(rows: Sequence[_SlowWindow], stalls: Mapping[str, float]) -> _Sums:
    return _Sums(
        excess={
            part: sum(row.slow.steps * (row.slow.parts[part] - row.usual[part]) for row in rows)
            for part in rows[0].slow.parts
        },
        hidden={name: sum(row.slow.steps * row.slow.hidden[name] for row in rows) for name in _HIDDEN} | {**stalls},
        beyond={
            name: sum(row.slow.steps * (row.slow.hidden[name] - row.usual_hidden[name]) for row in rows)
            for name in _HIDDEN
        },
        steps=sum(row.slow.steps for row in rows),
        paused_s=sum(row.slow.steps * row.paused_s for row in rows),
    )


def _find_cause(sums: _Sums) -> tuple[str, str]:
    """Return the cause that explains most of a rank's excess, and the part of a step that it is in."""
    part = max(sums.excess, key=lambda each: sums.excess[each])
    both = max(0.0, sums.excess.get("forward", 0.0)) + max(0.0, sums.excess.get("backward", 0.0))
    if part in ("forward", "backward") and sums.excess[part] < _ONE_SIDED * both:
        part = "compute"
    half = _HALF * sums.excess_s
    if max(half, sums.paused_s) > 0 and sums.beyond["throttled_s"] >= half:
        return "quota", part if sums.excess_s > sums.paused_s else "exchange"
    if half > 0 and sums.beyond["collections_s"] >= half:
        return "collections", part
    others_faults = sums.hidden["major_faults"] - sums.beyond["major_faults"]
    has_faults = sums.hidden["major_faults"] >= _MANY_FAULTS * sums.steps + 10 * others_faults
    if has_faults and (part != "input" or sums.hidden["memory_stall_s"] >= half):
        return "memory", part
    return ("disk", part) if part == "input" and _waits_for_disk(sums) else (part, part)


def _waits_for_disk(sums: _Sums) -> bool:
    """Return whether the rank waits for batches without computing while a disk is waited for, and reads from one."""
    waited_s = sums.excess["input"] - max(0.0, sums.beyond["input_processor_s"])
    reads = sums.hidden["read_bytes"] >= _PAGE_BYTES * sums.steps
    return reads and min(waited_s, sums.hidden["disk_stall_s"]) >= _STALLED * sums.excess["input"]


_PART_TEXTS = {
    "compute": "computing",
    "forward": "forward pass",
    "backward": "backward pass",
    "input": "wait for a batch",
    "update": "optimizer step",
    "script": "time between steps",
    "work": "own work between collectives",
}
_REMEDIES = {
    "compute": "Look for other programs on its node (top), and at its clock and temperature.",
    "forward": "Look for what its forward pass does beyond that of the others (python -m cProfile).",
    "backward": "Look for what its backward pass does beyond that of the others, such as hooks.",
    "input": "Give its DataLoader more workers (num_workers), or put its data on a faster disk.",
    "disk": "Copy its data to a faster disk, or into memory; iostat -x 1 on its node shows the disk.",
    "update": "Compare its processor and memory with the others'.",
    "script": "Look for work that this rank does alone, such as evaluation, logging or saving.",
    "work": "Call ringweave.prepare in the script, which tells input, computing and updates apart.",
    "quota": "Raise the CPU limit of its control group or container (cpu.max), or give it fewer threads.",
    "collections": "Call gc.freeze() after the model is built, or gc.disable() and collect now and then.",
    "memory": "Give it more memory (memory.max of its control group), or end what uses it beside the run.",
}


def _slow_rank_loss(rows: Sequence[_SlowWindow], stalls: Mapping[str, float], wall_s: float, mode: str) -> Loss | None:
    sums = _sum_up(rows, stalls)
    if max(sums.excess_s, sums.paused_s) <= 0 or wall_s <= 0:
        return None
    cause, part = _find_cause(sums)
    slow = rows[0].slow
    remedy, gain_s = _REMEDIES[cause], sum(row.slow.steps * row.gain_s for row in rows)
    if cause in ("compute", "forward", "backward", "quota") and mode == "sync":
        remedy = "Use --mode balanced, which gives it fewer samples."
        gain_s = sum(row.slow.steps * row.balanced_gain_s for row in rows)
    paused_s = sums.paused_s if cause == "quota" else 0.0
    return Loss(
        cause=cause,
        rank=slow.rank,
        cost=(sum(row.slow.steps * row.lost_s for row in rows) + paused_s) / wall_s,
        evidence=_slow_rank_evidence(rows, sums, cause, part),
        remedy=remedy,
        gain=gain_s / wall_s,
    )


def _slow_rank_evidence(rows: Sequence[_SlowWindow], sums: _Sums, cause: str, part: str) -> str:
    """Return the sentences with numbers: means over the windows in which the rank is the slow one."""

    def mean_ms(*, own: bool) -> float:
        names = ("forward", "backward") if part == "compute" else (part,)
        return (
            sum(1e3 * row.slow.steps * (row.slow.parts if own else row.usual)[name] for row in rows for name in names)
            / sums.steps
        )

    def per_step(name: str) -> float:
        return sums.hidden[name] / sums.steps

    unit = "a collective" if part == "work" else "a step"
    slow = rows[0].slow
    text = f"The others wait for rank {slow.rank} on node {slow.node}"
    if part == "exchange":
        pauses_ms = per_step("throttled_s") * 1e3
        return f"{text}: the CPU quota of its control group stops it for {pauses_ms:.3g} ms a step, also in exchanges."
    text += (
        f": its {_PART_TEXTS[part]} takes {mean_ms(own=True):.3g} ms {unit}, the others' {mean_ms(own=False):.3g} ms."
    )
    if cause == "quota":
        text += f" {per_step('throttled_s') * 1e3:.3g} ms of it are pauses by the CPU quota of its control group."
    elif cause == "collections":
        text += f" {per_step('collections_s') * 1e3:.3g} ms of it are Python's garbage collections."
    elif cause == "memory":
        text += f" It reads {per_step('major_faults'):.3g} pages a step from a disk."
    elif cause == "disk":
        text += f" A disk is waited for {per_step('disk_stall_s') * 1e3:.3g} ms, for {_kib(sums)} KiB a step."
    elif cause == "input" and per_step("input_processor_s"):
        text += f" Of these the script's thread computes for {per_step('input_processor_s') * 1e3:.3g} ms."
    return text


def _kib(sums: _Sums) -> str:
    return f"{sums.hidden['read_bytes'] / sums.steps / 1024:.3g}"


def _losses_of_all(windows: Sequence[Sequence[_RankStep]], events: Sequence[Event]) -> list[Loss]:
    """Return the losses that no single rank causes, and those to links."""
    wall_s = sum(max(each.wall_s for each in window) for window in windows)

    def cost(seconds: Sequence[float]) -> float:
        return sum(seconds) / wall_s if wall_s else 0.0

    input_cost = cost([min(each.parts.get("input", 0.0) for each in window) for window in windows])
    quota_cost = cost([min(each.hidden["throttled_s"] for each in window) for window in windows])
    link_cost = cost([_transfer_s(window) for window in windows])
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
    if len(windows[0]) > 1:
        exchange_s = sum(window[0].steps * _transfer_s(window) for window in windows)
        found += _link_losses(link_cost, exchange_s, events)
    return found


def _transfer_s(window: Sequence[_RankStep]) -> float:
    """Return the seconds of transfers in a step: those of the rank that waits least, without its pauses."""
    slow = min(window, key=lambda each: each.exchange_s)
    others = [each for each in window if each is not slow]
    return slow.exchange_s - (_paused_s(slow, others) if others else 0.0)


def _link_losses(link_cost: float, exchange_s: float, events: Sequence[Event]) -> list[Loss]:
    """Return the loss to transfers: to slow links that are busy for much of `exchange_s`, else to all if it is much."""
    sums = _link_sums(events)
    rates = {pair: each.sent_bytes / each.busy_s for pair, each in sums.items()}
    slow = sorted(
        (pair for pair, rate in rates.items() if rate < _SAME_CAUSE * min(rates.values())), key=lambda pair: rates[pair]
    )
    usual = statistics.median([rate for pair, rate in rates.items() if pair not in slow] or [0.0])
    if slow and rates[slow[0]] < _SLOW_LINK * usual and max(sums[pair].busy_s for pair in slow) >= _BUSY * exchange_s:
        part = 1 - rates[slow[0]] / usual
        return [_slow_link_loss(slow, rates, usual, part * link_cost)]
    if link_cost < MIN_LINK_COST or _are_links_idle(events, sums, exchange_s):
        return []
    binding = next((each["binding"] for each in reversed(events) if each["kind"] == "plan_made"), "")
    evidence = f"Transfers of gradients take {link_cost:.0%} of a step on the rank that waits least."
    evidence += f" The plan is bound by: {binding}." if binding else ""
    remedy = "See docs/how-to/slow-links.md for modes that send less."
    return [Loss(cause="link", rank=None, cost=link_cost, evidence=evidence, remedy=remedy)]


def _are_links_idle(events: Sequence[Event], sums: Mapping[tuple[int, int], "_LinkSum"], exchange_s: float) -> bool:
    """Return whether exchanges take long for want of processors: links are idle meanwhile, or there are none."""
    known = [each for each in events if each["kind"] == "traffic_measured"]
    busy_s = max((each.busy_s for each in sums.values()), default=0.0)
    return busy_s < _HALF * exchange_s if sums else bool(known) and not any(each["links"] for each in known)


@dataclass(slots=True)
class _LinkSum:
    """Traffic from one rank to another over all windows that count."""

    sent_bytes: float = 0.0
    busy_s: float = 0.0
    """Seconds in which bytes were on the way and the receiving process took them."""


def _link_sums(events: Sequence[Event]) -> dict[tuple[int, int], _LinkSum]:
    """Return (rank, peer) -> traffic, where it is enough for a rate."""
    sums: dict[tuple[int, int], _LinkSum] = defaultdict(_LinkSum)
    for rank, windows in _windows_by_rank(events, "traffic_measured", "collectives").items():
        for window in _without_first(windows):
            for peer, link in window["links"].items():
                row = sums[rank, int(peer)]
                row.sent_bytes += link["sent_bytes"]
                row.busy_s += link["busy_s"] - link["limited_s"]
    return {pair: each for pair, each in sums.items() if each.sent_bytes >= _MIN_LINK_BYTES and each.busy_s > 0}


def _slow_link_loss(
    slow: Sequence[tuple[int, int]], rates: Mapping[tuple[int, int], float], usual: float, cost: float
) -> Loss:
    """Return the loss to these links: to a rank's NIC if all links from it or to it are slow, and no others.

    Acknowledgements queue behind bytes, so a link whose other direction is slow may look slow too.
    """
    cause, rank, peer = "link", None, None
    nics = [each for each in {rank for pair in slow for rank in pair} if _is_slow_nic(each, slow, rates)]
    if len(slow) > 1 and nics:
        cause, rank = "nic", nics[0]
    elif len(slow) == 1:
        rank, peer = slow[0]
    pairs = ", ".join(f"{rates[pair] / 1e6:.3g} MB/s from rank {pair[0]} to rank {pair[1]}" for pair in slow[:4])
    evidence = f"Links are slow while they carry bytes: {pairs}, beside {usual / 1e6:.3g} MB/s on others."
    what = f"the NIC of rank {rank}" if cause == "nic" else "the cables, NICs and switches between them"
    remedy = f"Look at {what} (ethtool INTERFACE), or see docs/how-to/slow-links.md for modes that send less."
    return Loss(cause=cause, rank=rank, peer=peer, cost=cost, evidence=evidence, remedy=remedy, gain=cost)


def _is_slow_nic(rank: int, slow: Sequence[tuple[int, int]], rates: Mapping[tuple[int, int], float]) -> bool:
    leaving = [pair for pair in rates if pair[0] == rank]
    arriving = [pair for pair in rates if pair[1] == rank]
    is_whole = any(pairs and all(pair in slow for pair in pairs) for pairs in (leaving, arriving))
    return is_whole and all(rank in pair for pair in slow)


def _trials(events: Sequence[Event]) -> list[Loss]:
    """Return the loss to trials of schedules: what they took beyond as many collectives by the fastest one."""
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == "schedule_tuned" and event["schedule"] in event["measured_s"]:
            by_rank[event["rank"]].append(event)
    _, total_s = _longest_rank(events)
    if not by_rank or total_s <= 0:
        return []
    tuned = max(by_rank.values(), key=lambda rows: sum(map(_excess_s, rows)))
    excess_s, trials_s = sum(map(_excess_s, tuned)), sum(each["trials_s"] for each in tuned)
    largest = max(tuned, key=_excess_s)
    tried = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in largest["measured_s"].items())
    winners = {each["schedule"] for each in tuned}
    evidence = (
        f"{sum(each['trials'] for each in tuned)} trials of schedules took {trials_s:.3g} s of {total_s:.3g} s, "
        f"{excess_s:.3g} s more than by the fastest ones. Of {largest['bytes'] / 1e6:.3g} MB: {tried}."
    )
    remedy = "Keep the tuning cache (XDG_CACHE_HOME/ringweave/tuning) from run to run: what it has is not tried again"
    remedy += f"; or ringweave run --schedule {winners.pop()}." if len(winners) == 1 else "."
    cost = excess_s / total_s
    loss = Loss(cause="trials", rank=None, cost=cost, evidence=evidence, remedy=remedy, gain=cost)
    return [loss] if cost >= MIN_TRIALS_COST else []


def _excess_s(tuned: Event) -> float:
    """Return the seconds of trials beyond those of as many collectives by the schedule that won."""
    return max(0.0, tuned["trials_s"] - tuned["trials"] * tuned["measured_s"][tuned["schedule"]])


def _longest_rank(events: Sequence[Event]) -> tuple[list[Event], float]:
    """Return the windows of the rank that has most, and the seconds that they span."""
    kinds = [each["kind"] for each in events]
    kind = "steps_measured" if "steps_measured" in kinds else "traffic_measured"
    by_rank: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["kind"] == kind:
            by_rank[event["rank"]].append(event)
    own = max(by_rank.values(), key=len, default=[])
    return own, own[-1]["time"] - own[0]["time"] + own[0]["wall_s"] if own else 0.0


def _restarts(events: Sequence[Event]) -> list[Loss]:
    """Return the loss to workers that died, if time without steps followed."""
    deaths = [each for each in events if each["kind"] == "worker_exited" and each["signal"] and not each["stopped"]]
    own, total_s = _longest_rank(events)
    if not own or own[0]["kind"] != "steps_measured":
        return []
    rank = own[0]["rank"]
    cost = 1 - sum(each["wall_s"] for each in own) / total_s if total_s > 0 else 0.0
    if not deaths or cost <= 0:
        return []
    evidence = f"Killed workers: {len(deaths)}. Rank {rank} made no step for {cost * total_s:.3g} s of {total_s:.3g} s."
    remedy = "See which by ringweave events; a node that is short of memory kills its largest process."
    return [Loss(cause="restarts", rank=None, cost=cost, evidence=evidence, remedy=remedy)]
