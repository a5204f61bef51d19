"""What a step takes, by simulation of the very order that is run, from measured blocks and links; and the best cuts."""

from collections.abc import Sequence

from ringweave.pipeline.profiling.links import Link
from ringweave.pipeline.profiling.measuring import Profile
from ringweave.planning import partitioning
from ringweave.planning.partitioning import Memory, Partition, Problem
from ringweave.sim import pipelines
from ringweave.sim.pipelines import Order, Overheads, PipelineSimulation, StageTimes

Links = tuple[Sequence[Link], Sequence[Link]]
"""Forward, and backward, from each stage but the last to the next one and back."""


def predict(
    profile: Profile,
    links: Links,
    splits: tuple[int, ...],
    order: Order,
    *,
    transfers: str = "asynchronous",
    overheads: Overheads | None = None,
) -> PipelineSimulation:
    """A step of these stages on virtual time.

    Args:
        profile: Of the blocks.
        links: As `measure_links` gave them.
        splits: Last blocks, from 1, of all stages but the last.
        order: What each stage computes, one after the other.
        transfers: `blocking` for torch's own loops of gpipe and 1f1b, `asynchronous` for orders as data;
            `transfers_of` says which.
        overheads: As `rehearse` gave them; None: a step takes nothing beside blocks and links.
    """
    times = stage_times(profile, links, splits).beside(overheads or Overheads())
    return pipelines.simulate(order, times, transfers)


def stage_times(profile: Profile, links: Links, splits: tuple[int, ...]) -> StageTimes:
    """Seconds of each stage and link for one microbatch."""
    edges = (0, *splits, len(profile.blocks))
    own = [profile.stage_s(range(edges[stage], edges[stage + 1]), stage) for stage in range(profile.num_devices)]
    forward_links, backward_links = links
    return StageTimes(
        forward_s=tuple(forward for forward, _ in own),
        backward_s=tuple(backward for _, backward in own),
        before_s=tuple(
            sum(profile.blocks[block].update_s[stage] for block in range(edges[stage], edges[stage + 1]))
            for stage in range(profile.num_devices)
        ),
        forward_transfer_s=tuple(
            link.transfer_s(_crossing(profile, cut, "forward_bytes"))
            for link, cut in zip(forward_links, splits, strict=True)
        ),
        backward_transfer_s=tuple(
            link.transfer_s(_crossing(profile, cut, "backward_bytes"))
            for link, cut in zip(backward_links, splits, strict=True)
        ),
    )


def transfers_of(schedule: str | Order) -> str:
    """How transfers of a schedule are done: what `predict` needs to know."""
    return "blocking" if schedule in ("gpipe", "1f1b") else "asynchronous"


def partition(
    profile: Profile,
    links: Links,
    *,
    num_microbatches: int | None = None,
    memory_bytes: Sequence[float] | None = None,
    in_flight: Sequence[int] | None = None,
    allow_empty: bool = False,
) -> Partition:
    """The best cuts for these blocks, devices and links; exact.

    Args:
        profile: Of the blocks.
        links: As `measure_links` gave them.
        num_microbatches: For the least step of so many; None for the least bottleneck.
        memory_bytes: Of each device; None: unlimited.
        in_flight: Microbatches that each stage holds at once, as `Order.peak_in_flight` says; with memory only.
        allow_empty: A device may get nothing.

    Raises:
        UsageError: Nothing fits into the devices' memory, or there are fewer blocks than devices.
    """
    devices = range(profile.num_devices)
    forward_links, backward_links = links
    bandwidth = tuple(
        2 / (f.s_per_byte + b.s_per_byte + 1e-15) for f, b in zip(forward_links, backward_links, strict=True)
    )
    problem = Problem(
        work=tuple(
            tuple(cost.forward_s[device] + cost.backward_s[device] for cost in profile.blocks) for device in devices
        ),
        kinds=tuple(devices),
        capability=(1.0,) * profile.num_devices,
        activation=tuple(float(max(cost.forward_bytes, cost.backward_bytes)) for cost in profile.blocks),
        bandwidth=bandwidth,
        memory=_memory(profile, memory_bytes, in_flight),
        allow_empty=allow_empty,
    )
    return partitioning.solve(problem, num_microbatches)


def _memory(profile: Profile, limit: Sequence[float] | None, in_flight: Sequence[int] | None) -> Memory | None:
    if limit is None:
        return None
    return Memory(
        limit=tuple(limit),
        state=tuple(float(cost.state_bytes) for cost in profile.blocks),
        stash=tuple(float(cost.stash_bytes) for cost in profile.blocks),
        in_flight=tuple(in_flight or (1,) * profile.num_devices),
    )


def _crossing(profile: Profile, cut: int, what: str) -> int:
    """Bytes behind that many blocks; nothing crosses behind none or all of them but inputs, which are not counted."""
    return getattr(profile.blocks[cut - 1], what) if 0 < cut < len(profile.blocks) else 0
