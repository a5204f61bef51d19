"""Faults at random: the same for the same seed, options and cluster."""

import math
import random
from collections.abc import Mapping, Sequence

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import (
    BUCKET,
    CLOCK,
    CUT,
    DISK,
    KILL,
    KINDS,
    MOMENTS,
    PAUSE,
    SERVICES,
    SLOW,
    Fault,
    Targets,
)
from ringweave.errors import UsageError, explain

LEAST_EVERY_S = 0.01
"""Moments are rounded to it."""
_SHIFT_S = 3600.0
"""By which clocks jump at random, forwards or back."""
_LEAST: Mapping[str, float] = {"every": LEAST_EVERY_S, "for": 0.0, "lasts": 0.0, "calm": 0.0}


def draw(
    kinds: Sequence[str],
    targets: Targets,
    *,
    seed: int,
    every_s: float,
    until_s: float,
    lasts_s: float,
    calm_s: float,
) -> tuple[Fault, ...]:
    """A script at random; the same for the same arguments.

    Args:
        kinds: Which faults, equally often.
        targets: What there is to hit, each equally often.
        seed: Of all choices.
        every_s: Mean seconds from one fault to the next (Poisson arrivals); at least a tenth of it passes.
        until_s: None begins later.
        lasts_s: How long each lasts.
        calm_s: None begins earlier: so long the fault-free rate is measured.

    Raises:
        UsageError: There is no such kind, moment or service, no kind at all, or a time is not a number of seconds that
            can be.
    """
    faults.refuse_unknown("kind of fault", kinds, KINDS)
    faults.refuse_unknown("moment of fault", targets.moments, MOMENTS)
    faults.refuse_unknown("service to hit", targets.services, SERVICES)
    if not kinds:
        do = "Name some: --random kill,pause"
        raise UsageError(explain("kinds of faults", got="none", expected=f"some of {', '.join(KINDS)}", do=do))
    for name, seconds in {"every": every_s, "for": until_s, "lasts": lasts_s, "calm": calm_s}.items():
        check_seconds(name, seconds, least=_LEAST[name])
    rng, found, at_s = random.Random(seed), [], calm_s
    while at_s <= until_s:
        found.append(_draw_one(rng, rng.choice(list(kinds)), round(at_s, 2), lasts_s, targets))
        at_s += max(every_s / 10, rng.expovariate(1 / every_s))
    return tuple(found)


def check_seconds(name: str, seconds: float, *, least: float = 0.0) -> None:
    """Refuse a time that cannot be.

    Raises:
        UsageError: It is less than the least, or not a number of seconds at all.
    """
    if not least <= seconds < math.inf:
        do = "Give a number of seconds"
        raise UsageError(explain(f"--{name}", got=seconds, expected=f"{least:g} or more seconds", do=do))


def draw_moment(rng: random.Random, moments: Sequence[str], num_buckets: int) -> str:
    """One of them at random, with the number of one of so many buckets where it needs one; empty if there are none."""
    moment = rng.choice(list(moments)) if moments else ""
    return f"{moment} {rng.randrange(num_buckets)}" if moment == BUCKET else moment


def _draw_one(rng: random.Random, kind: str, at_s: float, lasts_s: float, targets: Targets) -> Fault:
    if kind == KILL:
        target = _draw_process(rng, targets)
        moment = "" if target in SERVICES else draw_moment(rng, targets.moments, targets.num_buckets)
        return Fault(at_s=at_s, kind=kind, target=target, moment=moment)
    if kind == PAUSE:
        return Fault(at_s=at_s, kind=kind, target=_draw_process(rng, targets), lasts_s=lasts_s)
    if kind == CUT:
        way = rng.choice(("in", "out", "both"))
        return Fault(at_s=at_s, kind=kind, target=rng.choice(list(targets.nodes)), lasts_s=lasts_s, way=way)
    if kind == SLOW:
        link = rng.choice(sorted(targets.link_rates))
        rate = round(targets.link_rates[link] / 4)
        return Fault(at_s=at_s, kind=kind, target=link, lasts_s=lasts_s, rate_bytes_per_s=rate)
    if kind == CLOCK:
        shift_s = rng.choice((-_SHIFT_S, _SHIFT_S))
        return Fault(at_s=at_s, kind=kind, target=rng.choice(list(targets.nodes)), lasts_s=lasts_s, shift_s=shift_s)
    return Fault(at_s=at_s, kind=kind, target=DISK, lasts_s=lasts_s)


def _draw_process(rng: random.Random, targets: Targets) -> str:
    """A worker's rank or a service, each process as often as any other."""
    index = rng.randrange(targets.num_workers + len(targets.services))
    return str(index) if index < targets.num_workers else targets.services[index - targets.num_workers]
