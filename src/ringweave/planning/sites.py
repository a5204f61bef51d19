"""Sites of mode `local`: workers that reduce every gradient together, and the division of a round among sites.

A round is what all sites compute from one outer step to the next. A site takes part of its samples in proportion to its
speed, and cuts them into inner steps of about equal size, in which a rank has as many samples as in a train step of
all: of two sites with as many ranks, one that is twice as fast does twice as many of them in the same time.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringweave import units
from ringweave.errors import TrainingError
from ringweave.planning import balancing
from ringweave.planning.balancing import Speed
from ringweave.planning.balancing.epochs import Indices
from ringweave.topology import Cluster

Site = tuple[int, ...]
"""Global ranks of a site, in order."""
_THIN_NIC_RATIO = 0.5
"""A node whose NICs have at most this fraction of the fastest node's rate is a site of its own."""
MIN_RATE_GAP = 4.0
"""Least ratio of measured rates inside sites to those between them. Below it, exact modes hide most of an exchange; and
rates of one kind of link differ by less."""
UNKNOWN_SITES = (
    "each node is a site: neither switches and NICs of a cluster file nor measured links tell nodes apart; an elastic "
    "job measures none, and takes what a run without --elastic has measured between these nodes in the last day. "
    "Describe the links (with --hosts, a cluster file), or name the sites in Local(sites=...)"
)
FIRST_INNER_STEPS = 16
"""Inner steps of the first rounds, if they are derived: no exchange has been measured yet."""
MIN_SPLIT_GAIN = 0.05
"""Predicted gain from which a round is divided in another way: speeds are known to a few per cent."""
MAX_INNER_STEPS = 500
"""Upper limit of derived inner steps: what the authors of DiLoCo (arXiv 2311.08105) have tried."""
MIN_INNER_STEPS = 16
"""Lower limit of derived inner steps: fewer gain little loss, and links between sites may be paid by the byte."""
MIN_STEPS_CHANGE = 0.2
"""Relative change from which derived inner steps are changed."""
NUM_REMEMBERED = 12
"""Outer steps whose measurements decide about the next rounds: single ones may be of a step or two."""
LINK_SHARE = 0.7
"""Share of a round in which the links may carry an exchange, if inner steps are derived: rates vary meanwhile."""


def find_sites(ranks: Sequence[Mapping[str, Any]]) -> tuple[Site, ...]:
    """Return the sites, the first one with rank 0.

    With a cluster file, a site is below the nearest switch whose uplink carries less than its nodes send, and a node
    behind thin NICs is alone. Without a file, sites are those of `group_nodes_by_rate`. If neither tells nodes apart,
    each node is a site.

    Args:
        ranks: Of each rank: `node`, `rate` (bytes per second of its node's NICs, None without a cluster file) and
            `uplinks` (switch above it, nearest first -> bytes per second). Of the first one, `measured_sites`: nodes of
            each site by measured links, if no cluster file describes them and there are such.
    """
    names = _site_names(ranks)
    if len(set(names)) == 1:
        names = [("node", each["node"]) for each in ranks]
    found: dict[tuple[str, str], list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(name, []).append(index)
    return tuple(map(tuple, found.values()))


def explain_sites(named: Sequence[Sequence[int]] | None, ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return where sites come from, in words that follow others, if neither script nor cluster file says it."""
    if named is not None:
        return ""
    if "measured_sites_text" in ranks[0]:
        return f"; {ranks[0]['measured_sites_text']}"
    if len({each["node"] for each in ranks}) == 1 or len(set(_site_names(ranks))) > 1:
        return ""
    return f"; {UNKNOWN_SITES}"


def _site_names(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return for each rank kind and name of what ties it to others: all the same if nothing tells nodes apart."""
    measured = {node: index for index, site in enumerate(ranks[0].get("measured_sites") or ()) for node in site}
    nodes = {each["node"]: each for each in ranks}
    fastest = max((each["rate"] or 0.0 for each in nodes.values()), default=0.0)
    below: dict[str, float] = {}
    for each in nodes.values():
        for switch in each["uplinks"]:
            below[switch] = below.get(switch, 0.0) + (each["rate"] or 0.0)

    def site_name(rank: Mapping[str, Any]) -> tuple[str, str]:
        if rank["node"] in measured:
            return "measured", str(measured[rank["node"]])
        if not rank["rate"] or rank["rate"] <= _THIN_NIC_RATIO * fastest:
            return "node", rank["node"]
        return "switch", next((name for name, rate in rank["uplinks"].items() if rate < below[name]), "")

    return [site_name(each) for each in ranks]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSites:
    """Sites of nodes whose links are much faster than those between them."""

    nodes: tuple[tuple[str, ...], ...]
    """Nodes of each site."""
    inside_bytes_per_s: float
    """Measured: least rate between two nodes of a site."""
    across_bytes_per_s: float
    """Measured: highest rate between nodes of two sites."""

    def __str__(self) -> str:
        inside, across = map(units.show_rate, (self.inside_bytes_per_s, self.across_bytes_per_s))
        shown = " | ".join(" ".join(site) for site in self.nodes)
        ratio = self.inside_bytes_per_s / self.across_bytes_per_s
        return f"sites by measured links: {shown}; {inside} or more inside, {across} or less across, {ratio:.3g} times"


def group_nodes_by_rate(nodes: Sequence[str], rate_between: Callable[[str, str], float]) -> MeasuredSites | None:
    """Return the sites with the widest gap between rates inside and across; None if it is below MIN_RATE_GAP.

    Agglomerates the nodes by single linkage, the fastest links first, and compares the sites after each merge.

    Args:
        nodes: Names, in order.
        rate_between: Bytes per second between two nodes, in the slower direction.

    Cost: cubic in the number of nodes.
    """
    rates = {(a, b): rate_between(a, b) for a, b in itertools.combinations(nodes, 2)}
    groups = {node: (node,) for node in nodes}
    best: MeasuredSites | None = None
    for _, linked in itertools.groupby(sorted(rates, key=rates.__getitem__, reverse=True), key=rates.__getitem__):
        for a, b in linked:
            if groups[a] != groups[b]:
                merged = tuple(sorted({*groups[a], *groups[b]}, key=nodes.index))
                groups |= dict.fromkeys(merged, merged)
        inside = [rate for (a, b), rate in rates.items() if groups[a] == groups[b]]
        across = [rate for (a, b), rate in rates.items() if groups[a] != groups[b]]
        if not across:
            break
        gap = min(inside) / max(across)
        if gap >= MIN_RATE_GAP and (best is None or gap > best.inside_bytes_per_s / best.across_bytes_per_s):
            best = MeasuredSites(
                nodes=tuple(dict.fromkeys(groups[node] for node in nodes)),
                inside_bytes_per_s=min(inside),
                across_bytes_per_s=max(across),
            )
    return best


def group_nodes_by_links(
    nodes: Sequence[str], cluster: Cluster, rates_bytes_per_s: Mapping[str, float]
) -> MeasuredSites | None:
    """Return the sites of nodes of a cluster by the measured rates of its links, as `group_nodes_by_rate` does."""

    def rate_between(a: str, b: str) -> float:
        return min(rates_bytes_per_s[link] for link in (*cluster.route(a, b), *cluster.route(b, a)))

    return group_nodes_by_rate(nodes, rate_between)


def sites_of(named: Sequence[Sequence[int]] | None, ranks: Sequence[Mapping[str, Any]]) -> tuple[Site, ...]:
    """Return the sites that the script names, else those that `find_sites` finds.

    Raises:
        TrainingError: A rank is in none of the sites that the script names, or in two.
    """
    return find_sites(ranks) if named is None else check_sites(named, len(ranks))


def check_sites(sites: Sequence[Sequence[int]], world_size: int) -> tuple[Site, ...]:
    """Return the sites that a script names, the one with rank 0 first.

    Raises:
        TrainingError: A rank is in none of them, or in two.
    """
    if sorted(itertools.chain.from_iterable(sites)) != list(range(world_size)) or not all(sites):
        expected = f"each of the ranks 0 to {world_size - 1} in exactly one site"
        do = "Name the ranks of each site, or leave sites out for those of the cluster file"
        raise TrainingError("sites", got=[list(site) for site in sites], expected=expected, do=do)
    return tuple(sorted(tuple(sorted(site)) for site in sites))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSplit:
    """Division of rounds among sites, until it is decided anew after an outer step."""

    batch_samples: int
    """Samples of a train step over all sites."""
    inner_steps: int
    """Train steps in which each parameter gets one outer step: inner steps of a site of average speed."""
    speeds: tuple[float, ...]
    """Samples per second of each site; only ratios count."""
    num_ranks: tuple[int, ...] = ()
    """Ranks of each site; empty if all have as many."""
    fragments: int = 1
    """Fragments of the parameters; a round ends with the outer step of one of them."""
    max_inner_steps: int = MAX_INNER_STEPS
    """Upper limit of derived inner steps."""

    @property
    def round_steps(self) -> int:
        return -(-self.inner_steps // self.fragments)

    @property
    def site_batches(self) -> tuple[int, ...]:
        """Most samples of an inner step of each site: a rank has as many as in a train step of all ranks."""
        ranks = self._weights
        return tuple(-(-self.batch_samples * each // sum(ranks)) for each in ranks)

    @property
    def _weights(self) -> tuple[int, ...]:
        """Parts of the sites in a train step: their ranks."""
        return self.num_ranks or (1,) * len(self.speeds)

    def inner_lr_factor(self, site: int, *, is_scale_invariant: bool) -> float:
        """Return the factor of a site's learning rates with which the mean of all moves as far as one process would.

        The gradient of a batch that is a part p of the whole one has 1 / sqrt(p) times the noise. An optimizer that
        divides by the size of gradients, as Adam does, moves that much less along their mean, so its learning rate goes
        with sqrt(p), others' with p. Sites that do the samples of a train step in p of its size then move as far; each
        does a part f of all samples and counts with f in the mean: in all they move the sum of f^2 of the way, which
        the factor takes back. With M equal sites it is sqrt(M), or 1.

        Args:
            site: Index of the site.
            is_scale_invariant: The optimizer's step is the same for gradients of another size.

        Source: the square-root rule of Malladi et al. (arXiv 2205.10287); measured in docs/notebook/2026-11.md.
        """
        total, ranks = math.fsum(self.speeds), self._weights
        moved = math.fsum((speed / total) ** 2 for speed in self.speeds)
        return (ranks[site] / sum(ranks)) ** (0.5 if is_scale_invariant else 1.0) / moved

    def samples_of_sites(self, num_samples: int) -> tuple[int, ...]:
        """Return the samples of each site in a round, by speed.

        Whole inner steps where the slowest site takes little longer by them: with 65 of 128 samples in five steps, in
        place of four, a site takes longer than by speed, since a step's reduction and update get no shorter.
        """
        speeds = [Speed(s_per_sample=1 / speed) for speed in self.speeds]
        least = int(num_samples >= len(speeds))
        found = balancing.apportion(num_samples, speeds, min_samples=least)
        caps = [size * max(1, round(each / size)) for each, size in zip(found, self.site_batches, strict=True)]
        if sum(caps) < num_samples:
            return found
        whole = balancing.apportion(num_samples, speeds, caps, least)
        by_speed_s, whole_s = (max(map(operator.truediv, each, self.speeds)) for each in (found, whole))
        return whole if whole_s <= (1 + MIN_SPLIT_GAIN) * by_speed_s else found

    def with_measured(self, samples: Sequence[float], seconds: Sequence[float]) -> "RoundSplit":
        """Return the division by measured speeds; this one if it is predicted to gain little, or a site did nothing.

        `seconds`: seconds in which each site computed them, without outer exchange and waits for other sites.
        """
        if min(samples) <= 0 or min(seconds) <= 0:
            return self
        speeds = tuple(count / each_s for count, each_s in zip(samples, seconds, strict=True))
        present_s = max(
            speed / sum(self.speeds) / measured for speed, measured in zip(self.speeds, speeds, strict=True)
        )
        if present_s * sum(speeds) < 1 + MIN_SPLIT_GAIN:
            return self
        return replace(self, speeds=speeds)

    def fitted(
        self, step_s: float, exchange_s: float, blocked_s: float, computing_share: float, min_change: float
    ) -> "RoundSplit":
        """Return the division whose rounds are as long as the exchanges need; this one if it changes less.

        Args:
            step_s: Seconds of computing per train step.
            exchange_s: Seconds of the exchange of a fragment, during which all compute.
            blocked_s: Seconds of an outer step, during which none computes.
            computing_share: Share of the time that is to be computing, between 0 and 1.
            min_change: Relative change from which the division changes.
        """
        steps = max(
            math.ceil(exchange_s / (LINK_SHARE * step_s) - 1e-9),
            inner_steps_for_share(step_s, blocked_s, computing_share),
        )
        wanted = min(self.max_inner_steps, max(MIN_INNER_STEPS, self.fragments * steps))
        return (
            self
            if abs(wanted - self.inner_steps) <= min_change * self.inner_steps
            else replace(self, inner_steps=wanted)
        )


@dataclass(frozen=True, eq=False)
class SiteOrder:
    """Samples of one site in the rest of an epoch, cut into inner steps; read like an `EpochOrder`."""

    indices: Indices
    """(num_samples,) int64: samples of all sites, from the present position to the end of the epoch."""
    split: RoundSplit
    site: int

    @functools.cached_property
    def rounds(self) -> list[tuple[int, int]]:
        """(samples of all sites, inner steps of this site) of each round."""
        return [(len(samples), len(pieces)) for samples, pieces in self._cut]

    @functools.cached_property
    def batches(self) -> list[Indices]:
        """Samples of each inner step of this site."""
        return [piece for _, pieces in self._cut for piece in pieces]

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def batch(self, index: int) -> Indices:
        return self.batches[index]

    @functools.cached_property
    def _cut(self) -> list[tuple[Indices, list[Indices]]]:
        whole = self.split.batch_samples * self.split.round_steps
        rounds = [self.indices[first : first + whole] for first in range(0, len(self.indices), whole)]
        return [(samples, self._pieces(samples)) for samples in rounds]

    def _pieces(self, samples: Indices) -> list[Indices]:
        """Return the inner steps of this site in a round: as few as no step is larger than the site's batch."""
        own = samples[balancing.rank_slice(self.split.samples_of_sites(len(samples)), self.site)]
        num_pieces = -(-len(own) // self.split.site_batches[self.site])
        return np.array_split(own, num_pieces) if num_pieces else []


def inner_steps_for_share(step_s: float, exchange_s: float, computing_share: float) -> int:
    """Return the inner steps between outer ones with which computing takes this share of the time.

    Args:
        step_s: Seconds of computing per train step.
        exchange_s: Seconds of an outer step, during which no site computes.
        computing_share: Between 0 and 1.
    """
    steps = computing_share / (1 - computing_share) * exchange_s / step_s
    return min(MAX_INNER_STEPS, max(1, math.ceil(steps - 1e-9)))


def divide_into_fragments(sizes: Sequence[int], num_fragments: int) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the parameters of each fragment: neighbours, of about equal size in all.

    `num_fragments`: number of fragments; some are empty if there are fewer parameters.
    """
    ends, total = itertools.accumulate(sizes), max(1, sum(sizes))
    middles = [end - size / 2 for end, size in zip(ends, sizes, strict=True)]
    places = [min(num_fragments - 1, int(num_fragments * middle / total)) for middle in middles]
    return tuple(
        tuple(index for index, place in enumerate(places) if place == number) for number in range(num_fragments)
    )
