"""Plan choice: settings and placement of a group decide how its messages travel, identically on all ranks."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ringweave.comm.group_info import GroupInfo, RankLocation
from ringweave.environment import AUTO, BRIDGE, DEVICE_PATH, ENCRYPT, NATIVE, WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.relayed_address import is_relayed

if TYPE_CHECKING:
    from ringweave.comm.transport.encryption import LinkEncryption

MIN_SCHEDULED_BYTES = 64 * 2**10
"""Smaller messages go to the native backend: latency dominates there, and Python adds more of it."""

MIN_SINGLE_NODE_BYTES = 3 * 10**6
"""The same limit for a single-node group that is not tuned: the native backend is faster up to here
(docs/notebook/2026-11.md)."""


def is_plan_shared(group: GroupInfo, environment: WorkerEnvironment) -> bool:
    """Return True if the first rank makes the plan for all: among several nodes, and on one node that is tuned."""
    return group.group_size > 1 and (group.num_nodes > 1 or environment.tuning is True)


def may_tune(group: GroupInfo, environment: WorkerEnvironment) -> bool:
    """Return True if measured times may change the group's schedules; the first rank's answer counts.

    By default this holds among several nodes, where predictions can be wrong. It does not hold where equal bits are
    wanted from run to run: a schedule is forced, torch uses deterministic algorithms, or tuning is off.
    """
    wanted = group.num_nodes > 1 if environment.tuning is None else environment.tuning
    is_fixed = environment.schedule is not None or torch.are_deterministic_algorithms_enabled()
    return wanted and not is_fixed and group.group_size > 1


def is_oversubscribed(nodes: Sequence[str]) -> bool:
    """Return True if some node has more of these ranks than this machine has processors."""
    return max(Counter(nodes).values()) > len(os.sched_getaffinity(0))


def native_limit_bytes(group: GroupInfo, environment: WorkerEnvironment) -> float:
    """Return the size below which messages go to the native backend if it computes them; infinite if all are to.

    It is the same on all ranks, because it depends on nothing that differs between them.

    Raises:
        UsageError: No schedule has the forced name.
    """
    if environment.schedule is not None:
        from ringweave import schedules  # late: most groups force none

        schedules.check_schedule_name(environment.schedule)
    if group.group_size == 1 or environment.schedule == NATIVE:
        return math.inf
    is_known_slower = environment.schedule is None and group.num_nodes == 1 and environment.tuning is not True
    return MIN_SINGLE_NODE_BYTES if is_known_slower else MIN_SCHEDULED_BYTES


def uses_bridge(group: GroupInfo, environment: WorkerEnvironment) -> bool:
    """Return True if the group's collectives of device tensors go through host memory, as far as schedules have them.

    By default they do in a group of several nodes, in an elastic job, where a schedule is forced, and where ranks share
    a GPU. It is the same on all ranks.
    """
    if environment.device_path != AUTO:
        return environment.device_path == BRIDGE
    is_forced = environment.schedule is not None and environment.schedule != NATIVE
    has_reason = is_forced or bool(environment.coordinators) or group.num_nodes > 1
    return has_reason or shares_gpu([member.location for member in group.ranks])


BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""torch's variable for waits that block the thread, and raise the collective's error themselves."""


def may_order_streams(environment: WorkerEnvironment, environ: Mapping[str, str]) -> bool:
    """Return True if a wait for a device's result may leave the waiting to the stream.

    Not in an elastic job, which has to know of a failure before it counts a step; nor where the user wants waits that
    block.
    """
    return not environment.coordinators and environ.get(BLOCKING_WAIT, "0").lower() in ("", "0", "false", "no")


def allows_nccl(group: GroupInfo, environment: WorkerEnvironment) -> bool:
    """Return True if NCCL may run the collectives that the bridge does not; else Gloo runs them.

    NCCL does not allow ranks that share a GPU, does not know of relays, and does not encrypt. In an elastic job it is
    never made: its kernels wait for a dead rank without end, and its watchdog ends the survivors' processes.

    Raises:
        UsageError: NCCL is asked for in an elastic job, or an encrypted one, with GPUs.
    """
    if environment.coordinators:
        if environment.device_path == NATIVE and any(member.location.gpus for member in group.ranks):
            expected = "auto or bridge in an elastic job, since NCCL does not survive a worker's death"
            raise UsageError(DEVICE_PATH, got=NATIVE, expected=expected, do="Correct or unset it")
        return False
    if any(is_relayed(member.location.address) for member in group.ranks):
        return False
    if environment.encrypts and group.num_nodes > 1:
        if environment.device_path == NATIVE and any(member.location.gpus for member in group.ranks):
            expected = "auto or bridge in an encrypted run on several nodes, since NCCL sends plain bytes"
            do = f"Correct or unset it, or run with --encrypt off ({ENCRYPT})"
            raise UsageError(DEVICE_PATH, got=NATIVE, expected=expected, do=do)
        return False
    if environment.device_path != AUTO:
        return environment.device_path != BRIDGE
    return not shares_gpu([member.location for member in group.ranks])


def load_encryption(environment: WorkerEnvironment) -> "LinkEncryption | None":
    """Return this process's TLS towards other nodes; None if the run is plain.

    Raises:
        UsageError: This process is to encrypt, and has no credentials.
    """
    if not environment.encrypts:
        return None
    from ringweave.comm.transport.encryption import encryption_for  # with certificates, which a plain run does without

    return encryption_for(environment)


def shares_gpu(locations: Sequence[RankLocation]) -> bool:
    """Return True if some node has more ranks that see a GPU than different GPUs that they see."""
    return any(num_ranks_per_gpu(locations, node) > 1 for node in {location.node for location in locations})


def num_ranks_per_gpu(locations: Sequence[RankLocation], node: str) -> int:
    """Return the most ranks that share a GPU of a node, if they are spread evenly; 1 without GPUs."""
    seen = [location.gpus for location in locations if location.node == node and location.gpus]
    return -(-len(seen) // len({gpu for gpus in seen for gpu in gpus})) if seen else 1
