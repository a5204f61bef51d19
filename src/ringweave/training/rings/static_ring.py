"""Ring of a fixed set of ranks: its process groups, its part in a pass over the data, and its regrouping.

Rings are regrouped at a barrier of all rings, while they are idle. The server forgets the last pushes and keeps
parameters, optimizer state and version. Every rank gets new process groups, and the gradients of a model go to the new
ring from then on. With local steps, each rank of a ring steps its own optimizer, so the ranks of a new ring continue
with the optimizer state of their representative.
"""

import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringweave import rpc
from ringweave.comm import peer_data
from ringweave.errors import TrainingError
from ringweave.param_server.client import RingClient
from ringweave.param_server.data_shards import Spans, spans_in_epoch
from ringweave.param_server.messages import ResumeDecision, ServerSetup
from ringweave.param_server.versions import StalenessPolicy
from ringweave.planning import balancing
from ringweave.planning.balancing import SampleAccount, Speed
from ringweave.planning.balancing.epochs import Indices
from ringweave.planning.mode_forecast import Ring
from ringweave.training.checkpoints.format import DTYPE_BY_NAME, StateEncoder, decode_state
from ringweave.training.collectives import ControlGroup
from ringweave.training.data.order import Portion, portion_of_rank
from ringweave.training.data.sources import EpochPass, TrainingMembership
from ringweave.training.elastic.accounting import EpochAccount
from ringweave.training.gradients import GradientReducer, SampleWeights
from ringweave.training.mode_choice.forecast import RingReconsideration
from ringweave.training.options import Asynchronous
from ringweave.training.recorder import Recorder
from ringweave.training.rings.ring_formation import RingFormation, RingShares, find_better_rings
from ringweave.training.rings.ring_progress import OfferedCheckpoint, ResumeStart
from ringweave.training.rings.ring_worker import ParameterServerOptimizer, RingWorker, StaticExchange

_OPTIMIZER_STATE = "state of the optimizer in a ring"


@torch.no_grad()
def share_optimizer_state(
    optimizer: ParameterServerOptimizer, ring_control: ControlGroup, representative: int, *, is_representative: bool
) -> None:
    """Take the optimizer state of the ring's representative; all ranks call it, and keep their own groups.

    Raises:
        TrainingError: The optimizer's state has other values than numbers and tensors.
        DisagreementError: The representative's message is malformed.

    Cost: one broadcast of the state.
    """
    encoder = StateEncoder()
    tree = encoder.encode(optimizer.state_dict()["state"], "optimizer.state") if is_representative else None
    specs = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in encoder.tensors.items()]
    payload = bytearray(json.dumps([tree, specs]).encode())
    length = int(ring_control.broadcast(torch.tensor([len(payload)]), representative))
    peer_data.check_length(length, _OPTIMIZER_STATE, min_bytes=1)
    text = torch.frombuffer(payload, dtype=torch.uint8) if is_representative else torch.empty(length, dtype=torch.uint8)
    received = bytes(ring_control.broadcast(text, representative).tolist())
    most = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    tree, specs = peer_data.decode_peer_data(
        received,
        _OPTIMIZER_STATE,
        functools.partial(_parse_optimizer_state, most=most),
        expected=f"what its representative has, tensors of at most {most} elements",
        where=f"rank {representative}",
    )
    tensors = {}
    for name, dtype, shape in specs:
        own = encoder.tensors[name].cpu().contiguous() if is_representative else torch.empty(shape, dtype=dtype)
        tensors[name] = ring_control.broadcast(own, representative)
    if not is_representative:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": decode_state(tree, tensors), "param_groups": groups})


def _parse_optimizer_state(document: Any, most: int) -> tuple[Any, list[tuple[str, torch.dtype, list[int]]]]:
    """Return the tree and the specs of its tensors, each of at most so many elements: no vector is longer."""
    tree, specs = document
    found = [
        (str(name), DTYPE_BY_NAME[dtype], [operator.index(size) for size in shape]) for name, dtype, shape in specs
    ]
    for name, _, shape in found:
        if min(shape, default=0) < 0 or math.prod(shape) > most:
            raise ValueError(f"{name} of shape {shape}")
    return tree, found


RingGroups = tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]
"""Process groups of one ring: for tensors, for shards, for speeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignedRing:
    """Ring of this rank in one set of rings, with its connections."""

    rings: tuple[Ring, ...]
    index: int
    """Index of this rank's ring."""
    groups: RingGroups
    speed_control: ControlGroup
    """Messages for speeds; ranks that load ahead send them earlier or later among shards."""
    client: RingClient | None
    """Only the representative has one."""
    worker: RingWorker

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.groups[0]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Group for shards, which must not queue behind tensors."""
        return self.groups[1]

    @property
    def ring(self) -> Ring:
        """Ranks of this rank's ring, the representative first."""
        return self.rings[self.index]


class RingAssignment:
    """Assignment of this rank to a ring; `current` is the present one."""

    def __init__(
        self,
        servers: Sequence[Callable[[], rpc.RpcClient]],
        control: ControlGroup,
        setup: ServerSetup,
        parameters: Sequence[torch.Tensor],
        groups: RingGroups,
        local_steps: int,
    ) -> None:
        """Take the place that `setup` assigns.

        Args:
            servers: Connectors, one for each server of the job; the initial leader comes first.
            control: Messages among all ranks.
            setup: Set-up of the job, which the server knows already.
            parameters: Trained parameters, in the server's order.
            groups: Process groups of this ring.
            local_steps: Steps of a ring from one push to the next; 0 pushes the gradients of each step.
        """
        self._servers, self._control, self._parameters = servers, control, list(parameters)
        self._local_steps = local_steps
        self.has_left = False
        self.current = self._connect_ring(tuple(map(tuple, setup.rings)), groups)

    def move_to_rings(self, rings: Sequence[Ring]) -> None:
        """Move to other rings. All ranks call it while all rings are idle; the next pull takes parameters."""
        before, wanted = self.current, tuple(map(tuple, rings))
        if before.client is not None and before.index == 0:
            before.client.regroup(wanted)
        before.worker.disconnect()
        groups = create_ring_groups(wanted, self._control.rank)
        # No rank takes parameters before the server knows the rings, or connects before all have disconnected.
        self._control.gather_json({})
        self.current = self._connect_ring(wanted, groups)

    def leave_server(self) -> None:
        self.has_left = True
        self.current.worker.leave_server()

    def take_shard(self, number: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        """Take the ring's next shard of that pass: the representative asks the server, and tells its ring."""
        ring = self.current
        drawn = torch.tensor(
            ring.client.take_shard(number, wanted, total, min_samples=min_samples) if ring.client else (0, 0)
        )
        dist.broadcast(drawn, ring.ring[0], group=ring.shard_group)
        return int(drawn[0]), int(drawn[1])

    def discard_rest_of_pass(self, number: int, total: int, epoch: int) -> None:
        """Take the rest of a pass over that epoch without using it: the pass ends for other rings too.

        Waits for no rank.
        """
        if self.current.client and not self.has_left:
            self.current.client.take_shard(number, total, total, ended_epoch=epoch)

    def connect_server(self) -> RingClient:
        """Return a connection to the server for this rank's ring, beside the representative's."""
        return RingClient(self._servers, self.current.index)

    def _connect_ring(self, rings: tuple[Ring, ...], groups: RingGroups) -> AssignedRing:
        rank = self._control.rank
        index = ring_index(rings, rank)
        client = RingClient(self._servers, index) if rank == rings[index][0] else None
        return AssignedRing(
            rings=rings,
            index=index,
            groups=groups,
            speed_control=ControlGroup(groups[2]),
            client=client,
            worker=RingWorker(
                StaticExchange(groups[0], rings[index][0], client), self._parameters, local_steps=self._local_steps
            ),
        )


def ring_index(rings: Sequence[Ring], rank: int) -> int:
    """Return the index of a rank's ring."""
    return next(index for index, ring in enumerate(rings) if rank in ring)


def create_ring_groups(rings: Sequence[Ring], rank: int) -> RingGroups:
    """Create the groups for tensors, shards and speeds on all ranks; return this rank's."""
    own_groups = []
    for backend in ("ringweave", "gloo", "gloo"):
        groups = [dist.new_group(list(ring), backend=backend) for ring in rings]
        own = groups[ring_index(rings, rank)]
        assert isinstance(own, dist.ProcessGroup), "a rank is in its own ring"
        own_groups.append(own)
    return own_groups[0], own_groups[1], own_groups[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRegrouper:
    """Moves this rank, with all its objects of a ring, to another ring."""

    assignment: RingAssignment
    settings: Asynchronous
    formation: RingFormation
    parallel: DistributedDataParallel
    reducer: GradientReducer
    weights: SampleWeights
    optimizer: ParameterServerOptimizer
    shares: RingShares
    recorder: Recorder
    reconsideration: RingReconsideration | None = None
    """Later forecasts, if `auto` has chosen the mode."""

    def regroup_if_faster(self, speeds: Sequence[Speed] | None) -> None:
        """Regroup if these speeds call for it; all rings are idle, and take parameters afterwards.

        Args:
            speeds: Speeds of all ranks, the same on all ranks; None while one of them is unknown.
        """
        rings = None if speeds is None else self._find_better(speeds)
        if speeds is not None and rings is not None:
            self._move_to(rings)

    def _find_better(self, speeds: Sequence[Speed]) -> tuple[Ring, ...] | None:
        present = self.assignment.current.rings
        if self.reconsideration is not None:
            return self.reconsideration.find_better_rings(present, self.shares.recent_s)
        return find_better_rings(present, speeds, self.formation.num_rings) if self.formation.follows_speeds else None

    def _move_to(self, rings: tuple[Ring, ...]) -> None:
        old_groups = self.assignment.current.groups
        self.assignment.move_to_rings(rings)
        placement = self.assignment.current
        self.reducer.process_group = placement.process_group
        self.parallel._update_process_group(placement.process_group)  # reorders buckets, on all ranks alike
        self.weights.num_ranks = len(placement.ring)
        self.optimizer.move_to_ring(placement.worker)
        if self.settings.local_steps:
            share_optimizer_state(
                self.optimizer,
                placement.speed_control,
                placement.ring[0],
                is_representative=placement.client is not None,
            )
        self.shares.join_ring(placement.ring, placement.speed_control)
        for group in old_groups:  # on all ranks in this order, once they are unused
            dist.destroy_process_group(group)
        self.recorder.rings_formed(rings=rings, most_versions=StalenessPolicy(num_rings=len(rings)).max_versions)


class StaticRing(TrainingMembership):
    """Ranks of one ring, which no rank joins or leaves but at the end of an epoch.

    A rank that breaks off a pass ends it for all rings: they get no further batch, and no account of the pass. Rings
    that break off take the newest parameters at the start of their next pass, the others at the end of this one.
    """

    def __init__(
        self,
        control: ControlGroup,
        assignment: RingAssignment,
        shares: RingShares,
        regroup: Callable[[Sequence[Speed] | None], None],
        record_account: Callable[[EpochAccount], object],
    ) -> None:
        """Create it; `regroup` is called at a barrier of all rings, with the speeds of all ranks."""
        self._control, self.assignment, self.ring_shares = control, assignment, shares
        self._regroup, self._record_account = regroup, record_account
        self.start: ResumeStart | None = None
        """Position in the data to resume from, if any, until a pass has begun."""
        self._epoch = 0
        self._done_spans: Spans = ()
        """Spans of the running pass's epoch that were done before the pass."""
        self._num_passes = 0
        """Number of passes, the same on all ranks. Shards belong to a pass, since an epoch may be started again."""
        self._received = SampleAccount()
        self._running: object = None
        """The pass that has not ended."""
        self._wait_abort_notice: Callable[[], object] | None = None
        """Waits for the message that tells other rings of a pass that was broken off."""

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(map(str, self.assignment.current.ring))

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank of the ring in the next whole shard."""
        return self.ring_shares.ring_shares

    def evaluation_slice(self, num_samples: int) -> slice:
        """Return an equal part: at the end of an epoch all ranks have the same parameters."""
        equal = balancing.scale_shares((1,) * self._control.world_size, num_samples)
        return balancing.rank_slice(equal, self._control.rank)

    def has_training_begun(self) -> bool:
        """Return whether the others are training. Rings that lose no members begin together."""
        return False

    @property
    def may_save(self) -> bool:
        """This process represents a ring that may be the one to write checkpoints: the first, which always exists."""
        placement = self.assignment.current
        return placement.client is not None and placement.index == 0

    def connect_server(self) -> RingClient:
        """Return a separate connection of this process for its ring; the caller closes it."""
        return self.assignment.connect_server()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give all ranks the first rank's samples in order."""
        return self._control.broadcast(tensor)

    def resume(self, offered: OfferedCheckpoint | None, epoch_samples: int) -> tuple[ResumeDecision, int | None]:
        """Agree with all rings on a checkpoint, and resume from it: parameters and data. All ranks offer the same one.

        Returns:
            The decision, and the epoch of the next pass; None leaves it to the script.

        Raises:
            TrainingError: Training has begun, or the checkpoint belongs to other data or another model.
        """
        if self._num_passes:
            raise TrainingError(
                "checkpoint to go on from",
                got="one after the first pass has begun",
                expected="it before",
                do="Call Checkpoints.load right after prepare",
            )
        start = ResumeStart.of_state(offered.state, epoch_samples) if offered else None
        decision = self._agree_with_server(offered, start)
        if start is None:
            return decision, None
        self.start = start
        self.assignment.current.worker.refresh()
        return decision, start.epoch

    def _agree_with_server(self, offered: OfferedCheckpoint | None, start: ResumeStart | None) -> ResumeDecision:
        """Return the server's decision to the representative; the other ranks, which do not ask, know it."""
        client = self.assignment.current.client
        if client is not None:
            decision = client.offer_checkpoint(
                offered.train_step if offered else 0, offered.checksum if offered else ""
            )
            if decision.verdict == "give" and offered is not None and start is not None:
                client.restore_snapshot(offered.content(), decision, start.to_message(self._num_passes + 1))
        if offered is None:
            return ResumeDecision(verdict="nothing")
        step = offered.train_step
        return ResumeDecision(verdict="resumed", train_step=step, check=offered.checksum, num_done=step)

    # One pass, in this order.

    def finish_aborted_pass(self, epoch_samples: int) -> None:
        """End a pass that was broken off, or whose iterator was dropped: take the newest parameters."""
        if self._running is not None:
            self._discard_pass(epoch_samples)
        if self._wait_abort_notice is not None:
            self._wait_abort_notice()
            self._wait_abort_notice = None
            self.assignment.current.worker.refresh()

    def begin_epoch(self, number: int) -> tuple[int, Spans] | None:
        """Begin a pass of an epoch.

        Returns:
            Number of the pass, and the spans of the epoch that are not drawn; None if the others have finished it.
        """
        start, self.start = self.start, None
        self._epoch, self._done_spans = number, start.done_spans_of(number) if start else ()
        self._num_passes += 1
        self._received, self._running = SampleAccount(), self._num_passes
        self.ring_shares.begin_pass()
        return self._num_passes, self._done_spans

    def begin_batch(self) -> None:
        """Begin the next batch: the computation of the one before is over."""
        self.ring_shares.begin_batch()

    def pass_shard_boundary(self) -> tuple[Portion, float] | None:
        """Pass the boundary before a shard is taken; return missing samples of the last step if they come first."""
        return None

    def take_shard(self, pass_number: int, wanted: int, total: int, min_samples: int) -> tuple[int, int]:
        """Take the ring's next shard; return (first sample, number of samples)."""
        with self.ring_shares.waiting_for_shard():
            return self.assignment.take_shard(pass_number, wanted, total, min_samples)

    def record_shard(self, batch: Indices, batch_part: float, first: int) -> Portion:
        """Record a shard that the ring computes later; return this rank's portion."""
        del batch_part, first
        own = self.assignment.current.ring.index(self._control.rank)
        portion = portion_of_rank(batch, self.ring_shares.ring_shares, own)
        self.ring_shares.count_shard()
        return portion

    def record_batch(self, first: int, own: Portion, batch_part: float) -> None:
        samples = self.assignment.current.worker.ring.samples
        samples.add(own.num_total, batch_part)
        spans = spans_in_epoch(self._done_spans, first, own.num_total)
        samples.note_spans(self._num_passes, self._epoch, spans)
        self.ring_shares.count_batch()
        self._received += SampleAccount.from_indices(own.indices)

    def abort_pass(self, begun: EpochPass, epoch_samples: int) -> None:
        """Break off a pass: no ring gets a further batch of it, and no ring waits.

        Waits for no other rank, since the script may have broken off its loop, or failed in it.
        """
        if self._running == begun.number:
            self._discard_pass(epoch_samples)

    def _discard_pass(self, epoch_samples: int) -> None:
        self._running = None
        self.assignment.current.worker.discard_unpushed()
        self.assignment.current.worker.ring.samples.clear()
        self.assignment.discard_rest_of_pass(self._num_passes, epoch_samples, self._epoch)
        self._wait_abort_notice = self._control.start_account_exchange(None)

    def end_epoch(self, epoch: int, expected: SampleAccount) -> EpochAccount | None:
        """Pass the barrier at the end of an epoch: check the account, regroup, take the same parameters.

        Returns:
            The account; None if a rank has broken off its pass.

        Raises:
            TrainingError: Samples were lost or doubled.
        """
        self._running = None
        self.assignment.current.worker.go_idle()
        by_rank = self._control.start_account_exchange(self._received)()
        if by_rank is None:
            self.assignment.current.worker.refresh()
            return None
        account = EpochAccount.of_ranks(epoch, expected, by_rank)
        self._record_account(account)
        account.check()
        self._regroup(self.ring_shares.rebalance_at_barrier())
        self.assignment.current.worker.refresh()
        self._control.gather_accounts(self._received)  # no ring pushes before all have the same parameters
        return account
