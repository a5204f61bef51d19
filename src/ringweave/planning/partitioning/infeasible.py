"""Why nothing fits into the devices' memory: the block or device at fault, and what would help."""

import numpy as np

from ringweave.errors import explain
from ringweave.planning.partitioning.costs import Costs, furthest

_MENDS = "give the devices more memory, hold fewer microbatches in flight"


def explain_no_room(costs: Costs) -> str:
    """The text of the error for a problem without a partition."""
    return _large_block(costs) or _small_device(costs) or _stuck(costs)


def _large_block(costs: Costs) -> str | None:
    """A block that no device can hold even alone."""
    devices = range(costs.problem.num_devices)
    for block in range(1, costs.problem.num_blocks + 1):
        spare = [costs.limit(device) - costs.memory(device, block - 1, block) for device in devices]
        best = int(np.argmax(spare))
        if spare[best] < 0:
            return explain(
                f"memory of block {block}",
                got=costs.memory(best, block - 1, block),
                expected=f"at most {costs.limit(best):.10g}, what device {best + 1} has, the one with most to spare",
                do=f"Cut block {block} finer, give the devices more memory, or hold fewer microbatches in flight",
            )
    return None


def _small_device(costs: Costs) -> str | None:
    """A device that can hold no block though each has to get one."""
    if costs.problem.allow_empty:
        return None
    blocks = range(1, costs.problem.num_blocks + 1)
    for device in range(costs.problem.num_devices):
        smallest = min(blocks, key=lambda block: costs.memory(device, block - 1, block))
        if not costs.fits(device, smallest - 1, smallest):
            return explain(
                f"memory of device {device + 1}",
                got=costs.limit(device),
                expected=f"at least {costs.memory(device, smallest - 1, smallest):.10g} for block {smallest}",
                do="Leave the device out, allow empty stages (--allow-empty), or hold fewer microbatches in flight",
            )
    return None


def _stuck(costs: Costs) -> str:
    """All devices filled one after the other: the first block without a place."""
    cut = 0
    for device in range(costs.problem.num_devices):
        cut = int(furthest(costs.held[device], np.array([cut]), costs.limit(device))[0])
    num_blocks, num_devices = costs.problem.num_blocks, costs.problem.num_devices
    if cut == num_blocks:
        do = f"Allow empty stages (--allow-empty), {_MENDS}, or put the devices in another order"
        return explain(
            "memory of devices",
            got="no way to give each device a block",
            expected=f"blocks that fit devices 1 to {num_devices} in this order",
            do=do,
        )
    need = costs.memory(num_devices - 1, cut, cut + 1)
    return explain(
        "memory of devices",
        got=f"full after block {cut} of {num_blocks}",
        expected=f"room for block {cut + 1} ({need:.10g} on device {num_devices}) and what follows it",
        do=f"Add a device, {_MENDS}, or recompute activations",
    )
