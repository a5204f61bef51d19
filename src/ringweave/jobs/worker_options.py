"""Options of the workers of a run, the same for a run on one machine and for jobs; the order of ranks. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError

Encrypt = Literal["auto", "on", "off"]
Wire = Literal["exact", "bf16", "int8", "int4", "auto"]
ENCRYPT_CHOICES: tuple[Encrypt, ...] = ("auto", "on", "off")
ORDER_RULE = "block, round-robin, shuffled or shuffled:SEED with a whole number"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOrder:
    """Order in which devices get ranks; `parse_rank_order` reads its text back."""

    kind: Literal["block", "round-robin", "shuffled"] = "block"
    """`block`: all devices of a node, then those of the next. `round-robin`: the first device of every node, then the
    second of every node that has one. `shuffled`: at random."""
    seed: int = 0
    """Seed of `shuffled`; the same seed gives the same order."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind == "shuffled" else self.kind


BLOCK_ORDER = RankOrder()


def parse_rank_order(text: str) -> RankOrder:
    """Parse an order: `block`, `round-robin`, `shuffled` or `shuffled:7`.

    Raises:
        UsageError: The text is no order.
    """
    kind, has_seed, seed = text.partition(":")
    if kind == "shuffled" and (not has_seed or (seed.isascii() and seed.isdigit() and len(seed) < 19)):
        return RankOrder(kind="shuffled", seed=int(seed or 0))
    if text in ("block", "round-robin"):
        return RankOrder(kind=text)
    do = "Leave it out for block, which fits nearly all schedules"
    raise UsageError("--order", got=text, expected=ORDER_RULE, do=do)


def assign_ranks(counts: Sequence[int], order: RankOrder) -> list[tuple[int, int]]:
    """Return (node index, local rank) of every global rank."""
    slots = [(node_index, local_rank) for node_index, count in enumerate(counts) for local_rank in range(count)]
    if order.kind == "round-robin":
        slots.sort(key=lambda place: (place[1], place[0]))
    elif order.kind == "shuffled":
        random.Random(order.seed).shuffle(slots)
    return slots


def ranks_by_node(counts: Sequence[int], order: RankOrder) -> list[list[int]]:
    """Return the global ranks of each node, ascending.

    `counts`: number of devices of each node; a node with 0 changes no rank of the others.
    """
    ranks: list[list[int]] = [[] for _ in counts]
    for global_rank, (node_index, _) in enumerate(assign_ranks(counts, order)):
        ranks[node_index].append(global_rank)
    return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """Options of the workers of a run that no launcher needs for itself."""

    schedule: str | None = None
    """Forced schedule of large allreduces; None leaves the choice to the planner."""
    tuning: bool | None = None
    """Let measured times change schedules and plans; None means only among several nodes."""
    replace_backend: bool = False
    """Let ringweave also serve groups of an explicit "gloo" or "nccl"."""
    leader_per_nic: bool = False
    """Plan with one leader per NIC of a node instead of one per node."""
    wire: Wire = "exact"
    """Wire format of gradients on slow links, if scripts leave it open."""
    max_loss_increase: str | None = None
    """Loss at equal samples that `auto` may give up for speed, such as `0.5%`; None: it takes nothing that costs some.
    """
    order: RankOrder = BLOCK_ORDER
    """Order in which the devices get ranks."""
    encrypt: Encrypt = "auto"
    """Encrypt what travels between nodes: `on`, `off`, or `auto`: between hosts, not in a lab."""

    def encrypts(self, *, between_hosts: bool) -> bool:
        """Return whether connections between nodes are encrypted; `between_hosts` if the nodes are hosts."""
        return self.encrypt == "on" or (self.encrypt == "auto" and between_hosts)

    def apply_to(self, environment: WorkerEnvironment) -> WorkerEnvironment:
        return replace(environment, **self.to_fields("order", "encrypt"))

    def to_fields(self, *left_out: str) -> dict[str, Any]:
        """Return the options by name, with the order as text, as a job request has them."""
        values = {name: getattr(self, name) for name in OPTION_NAMES} | {"order": str(self.order)}
        return {name: value for name, value in values.items() if name not in left_out}

    def to_record(self) -> dict[str, Any]:
        """Return their keys of run.json."""
        return self.to_fields("replace_backend")


OPTION_NAMES = tuple(each.name for each in fields(WorkerOptions))


DEFAULT_OPTIONS = WorkerOptions()
