"""RPC messages between rings and the parameter server; each carries the term of the server it is meant for.

A server that takes over starts a higher term and refuses messages of an earlier one. So a ring that missed the
change can do no harm.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import pydantic

from ringweave import rpc

OptimizerOption = bool | int | float | str | list[float] | None
Count = pydantic.NonNegativeInt
ValidatedSpan = tuple[Count, pydantic.PositiveInt]
"""Span of `data_shards`, validated."""


class TensorSpec(pydantic.BaseModel):
    """Name, shape and dtype of one parameter of the model."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str
    shape: list[Count]
    dtype: str
    """Name of the dtype in torch, without `torch.`: `float32`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class ParameterGroup(pydantic.BaseModel):
    """Group of parameters with the same options of the optimizer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    parameters: list[Count]
    """Indices of its tensors."""
    options: dict[str, OptimizerOption]


class ServerSetup(pydantic.BaseModel):
    """Description of a job for the server."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="constants")

    tensors: list[TensorSpec]
    optimizer: str
    """Name of a class of `torch.optim`."""
    groups: list[ParameterGroup]
    rings: list[list[Count]]
    """Global ranks of each ring; the first is its representative at the start."""
    overlaps: bool
    compensation: float
    shares: list[list[Count]] = pydantic.Field(default_factory=list)
    """Samples of each of those ranks in a whole batch at the start, for workers that join later; empty if none may."""
    local_steps: list[Count] = pydantic.Field(default_factory=list)
    """Steps of each ring from one push to the next, for workers that join later; empty where every step is pushed."""
    fragments: list[list[Count]] = pydantic.Field(default_factory=list)
    """Indices of the tensors of each fragment, which is pushed alone: the optimizer is that of outer steps. Empty:
    every push has all tensors."""

    @pydantic.model_validator(mode="after")
    def _check_fragments(self) -> "ServerSetup":
        places = sorted(place for each in self.fragments for place in each)
        if self.fragments and places != list(range(len(self.tensors))):
            raise ValueError("fragments: each tensor in exactly one, expected")
        return self

    def places_of(self, fragments: Sequence[int]) -> list[list[int]]:
        """Return the indices of the tensors of these fragments, of all if there are none; one list for each."""
        every = self.fragments or [list(range(len(self.tensors)))]
        return [every[index] for index in fragments] if fragments else every

    @property
    def may_lose_members(self) -> bool:
        """True if rings survive the loss of a worker; otherwise the run ends with it."""
        return bool(self.shares)


class RingMessage(rpc.RpcMessage):
    """Base of the messages of a ring."""

    term: Count
    ring: Count


class StartJob(rpc.RpcMessage):
    """Starts the job, with the initial parameters, one buffer for each dtype. Rank 0 sends it once."""

    kind: ClassVar[str] = "params.start_job"

    term: Count
    setup: ServerSetup


class ExchangeBenchmarkResult(rpc.RpcMessage):
    """Answer to a benchmarked exchange, with placeholder parameters, one buffer for each dtype."""

    kind: ClassVar[str] = "params.exchange_benchmark_result"

    processor_s: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """CPU time of the server since its start; the difference of two answers is the time between them."""
    cores: float | None = pydantic.Field(default=None, gt=0, allow_inf_nan=False)
    """CPU time per second that a quota leaves the server; None without a quota."""


class ExchangeBenchmark(rpc.RpcMessage):
    """Benchmarks a push and a pull before the job starts, on zeros; one buffer for each dtype."""

    kind: ClassVar[str] = "params.exchange_benchmark"
    reply: ClassVar[type[rpc.RpcMessage]] = ExchangeBenchmarkResult

    term: Count
    setup: ServerSetup


class EndExchangeBenchmark(rpc.RpcMessage):
    """Ends the benchmarks of this process; the last process to send it frees the memory."""

    kind: ClassVar[str] = "params.end_exchange_benchmark"

    term: Count


class PushResult(rpc.RpcMessage):
    """Result of a push, applied now or when it first arrived."""

    kind: ClassVar[str] = "params.push_result"

    version: Count
    staleness_versions: Count
    damping: float
    is_repeat: bool


class Push(RingMessage):
    """Gradient or change of a ring; one buffer for each dtype."""

    kind: ClassVar[str] = "params.push"
    reply: ClassVar[type[rpc.RpcMessage]] = PushResult

    sequence: pydantic.PositiveInt
    base_version: Count
    content: Literal["gradient", "change", "outer_gradient"]
    """`gradient` is the mean over the ring's samples; `change` is how much its parameters changed in its local
    steps; `outer_gradient` the opposite of that, for the optimizer of outer steps."""
    fragments: list[Count] = pydantic.Field(default_factory=list)
    """Fragments of an outer gradient; empty: all."""
    weight: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of an outer gradient: the ring's part of an outer step."""
    local_steps: Count = 0
    """Local steps from one push to the next that the ring would take, by its measured times; 0: any number."""
    num_samples: Count
    batch_share: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """Weight of the push: the ring's part of a train step of all rings."""
    num_batches: pydantic.PositiveInt = 1
    """Train steps of the ring in a change."""
    pass_number: Count = 0
    """Number of the pass over the data that contains its samples."""
    epoch: Count = 0
    spans: list[ValidatedSpan] = pydantic.Field(default_factory=list)
    """Samples of the pass: places in the order of the whole epoch."""
    absent: list[Count] = pydantic.Field(default_factory=list)
    """Indices of parameters without a gradient."""
    options: list[dict[str, OptimizerOption]] = pydantic.Field(default_factory=list)
    """Present options of each group, which schedulers change. Empty with a change."""
    ring_progress: str = pydantic.Field(default="", max_length=4096)
    """Text for the other rings at the next barrier, in case no member of this ring is left by then."""


class PullResult(rpc.RpcMessage):
    """Parameters; one buffer for each dtype, of each fragment if there are some."""

    kind: ClassVar[str] = "params.pull_result"

    version: Count
    waited_s: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Measured: seconds from the ring's last push until other rings had pushed the same fragment."""
    local_steps: Count = 0
    """Most local steps that a ring would take from one push of a fragment to the next; 0: none has said it."""


class Pull(RingMessage):
    """Asks for the parameters, once the ring's push of that number is applied and no ring is left too far behind."""

    kind: ClassVar[str] = "params.pull"
    reply: ClassVar[type[rpc.RpcMessage]] = PullResult

    after_sequence: Count
    fragments: list[Count] = pydantic.Field(default_factory=list)
    """Fragments to send, once the rings that push the same next have done so; empty: all, at once."""
    next_fragment: Count = 0
    """With all: the fragment that the ring pushes next."""


class ShardResult(rpc.RpcMessage):
    """Samples `first` to `first + num_samples - 1` of the epoch's order; none when it is used up."""

    kind: ClassVar[str] = "params.shard"

    first: Count
    num_samples: Count


class TakeShard(RingMessage):
    """Asks for the next samples of a ring."""

    kind: ClassVar[str] = "params.take_shard"
    reply: ClassVar[type[rpc.RpcMessage]] = ShardResult

    number: pydantic.PositiveInt
    epoch: Count
    num_samples: pydantic.PositiveInt
    least: pydantic.PositiveInt
    epoch_samples: Count
    ended_epoch: Count | None = None
    """Epoch of an aborted pass; no worker computes the samples of this shard."""


class LeaveRing(RingMessage):
    """Announces that the ring is idle until it pulls again, so that no ring waits for it."""

    kind: ClassVar[str] = "params.leave_ring"

    is_for_good: bool
    """True after the ring's last push."""


class RegroupRings(RingMessage):
    """Forms other rings of the same ranks, while all of them are idle; pushes and shards are counted from 1 again.

    `ring` is that of the caller before the change.
    """

    kind: ClassVar[str] = "params.regroup_rings"

    rings: list[list[Count]]
    """All ranks; the first of each ring is its representative."""


class RegisterRingLeader(RingMessage):
    """Registers a process as the ring's representative in that generation; an earlier representative is fenced off."""

    kind: ClassVar[str] = "params.register_ring_leader"

    generation_id: tuple[Count, Count]
    least_incarnations: list[tuple[Count, Count]] = pydantic.Field(default_factory=list)
    """Slots of the ring, each with the least incarnation whose certificate counts."""


class PauseRing(RingMessage):
    """Pauses a ring that has lost a member and regroups: no ring waits for it until it pushes or pulls again."""

    kind: ClassVar[str] = "params.pause_ring"


class BarrierReply(rpc.RpcMessage):
    """Result of the barrier of that number, at which all present rings have arrived: the text of each ring.

    A ring without any live member is included with its last `ring_progress`.
    """

    kind: ClassVar[str] = "params.barrier_result"

    texts: dict[str, str]


class BarrierArrival(RingMessage):
    """Announces that the ring has finished its pass and waits at the barrier for all others but those that are gone."""

    kind: ClassVar[str] = "params.barrier_arrival"
    reply: ClassVar[type[rpc.RpcMessage]] = BarrierReply

    number: pydantic.PositiveInt
    """Number of the barrier, counted from 1. Two follow each pass: at its end, and when all have the same
    parameters."""
    epoch: Count = 0
    """Epoch of the finished pass."""
    text: str = pydantic.Field(max_length=4096)
    """Text for the other rings."""


class RingAssignmentReply(rpc.RpcMessage):
    """Rings and the progress of one of them: the information for a worker that replaces another."""

    kind: ClassVar[str] = "params.ring_assignment"

    rings: list[list[Count]]
    """Empty before the job has started."""
    shares: list[list[Count]] = pydantic.Field(default_factory=list)
    """Samples of each rank, as in the setup."""
    local_steps: list[Count] = pydantic.Field(default_factory=list)
    num_pushed: Count = 0
    num_shards: Count = 0
    num_barriers: Count = 0
    """Barriers of passes that the ring has completed."""
    epoch: Count = 0
    ring_progress: str = ""
    """Text that came with the ring's last push."""
    resumed: list[ValidatedSpan] = pydantic.Field(default_factory=list)
    """Samples of `resumed_epoch` that were done before this run."""
    resumed_epoch: Count = 0
    resumed_seed: int | None = None
    """Seed of the orders of all epochs, if the job resumes from a checkpoint."""
    next_fragment: Count = 0
    """Fragment that the other rings push next."""


class RingAssignmentRequest(rpc.RpcMessage):
    """Asks for the ring of a worker."""

    kind: ClassVar[str] = "params.get_ring_assignment"
    reply: ClassVar[type[rpc.RpcMessage]] = RingAssignmentReply

    term: Count
    slot: Count
    """Rank of the worker at the start."""
    begins: bool = False
    """The ring starts, or starts again: no member of it has anything in flight."""


class ServerStatus(rpc.RpcMessage):
    """State of the server."""

    kind: ClassVar[str] = "params.server_status"

    version: Count
    staleness: dict[str, Count]
    """Staleness in versions -> number of pushes of that age."""
    pushes: dict[str, Count]
    """Ring -> pushes applied."""
    samples: Count
    repeats: Count
    received_bytes: Count
    sent_bytes: Count
    most_peers: Count
    """Maximum number of workers connected at once: one for each ring."""
    train_steps: float = pydantic.Field(ge=0, allow_inf_nan=False)
    """Samples pushed by all rings together, in steps of synchronous training."""
    memory_bytes: Count
    """Tensors held: parameters, the optimizer's state, gradients of the present train step, data being received and
    sent."""


class LeaderStatus(rpc.RpcMessage):
    """Leadership of the server, and its term."""

    kind: ClassVar[str] = "params.leader_status"

    term: Count
    leads: bool


class LeaderStatusRequest(rpc.RpcMessage):
    """Asks whether the server leads; also shows that the caller is alive."""

    kind: ClassVar[str] = "params.get_leader_status"
    reply: ClassVar[type[rpc.RpcMessage]] = LeaderStatus


class ServerStatusRequest(rpc.RpcMessage):
    """Asks for the state of the server."""

    kind: ClassVar[str] = "params.get_server_status"
    reply: ClassVar[type[rpc.RpcMessage]] = ServerStatus


SNAPSHOT_STATE_NAME = "snapshot"
"""Name under which a snapshot can be read."""
SNAPSHOT_CHUNK_BYTES = 16 << 20
"""Maximum bytes of a restored snapshot in one message."""


class SnapshotReply(rpc.RpcMessage):
    """Availability of a snapshot (`rpc.state_transfer`); if it is not there, a ring with a lower number reads it."""

    kind: ClassVar[str] = "params.snapshot_result"

    is_there: bool


class SnapshotRequest(RingMessage):
    """Asks for a snapshot of the present state. Pushes go on."""

    kind: ClassVar[str] = "params.take_snapshot"
    reply: ClassVar[type[rpc.RpcMessage]] = SnapshotReply


class ReleaseSnapshot(RingMessage):
    """Releases a snapshot that has been read."""

    kind: ClassVar[str] = "params.release_snapshot"


class ResumeDecision(rpc.RpcMessage):
    """Decision on the checkpoint from which all rings resume."""

    kind: ClassVar[str] = "params.resume_decision"

    verdict: Literal["nothing", "give", "resumed", "begun"]
    """`give`: the ring's own checkpoint, which it has to send to the server (`RestoreSnapshot`). `resumed`: the server
    has one. `begun`: rings draw samples already, and no checkpoint is read any more. `nothing`: there is none."""
    train_step: Count = 0
    """Train step after which the checkpoint was saved."""
    check: str = ""
    """Checksum of the checkpoint."""
    num_done: Count = 0
    """Whole train steps of all rings that the server has by now."""


class OfferCheckpoint(RingMessage):
    """Offers the checkpoint of a ring; answered with the decision once all rings have offered theirs."""

    kind: ClassVar[str] = "params.offer_checkpoint"
    reply: ClassVar[type[rpc.RpcMessage]] = ResumeDecision

    train_step: Count = 0
    check: str = pydantic.Field(default="", max_length=64)
    """Checksum of the checkpoint; empty if it has none."""


class DataStart(pydantic.BaseModel):
    """Position from which the data resume."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    pass_number: Count
    """Number of the first pass over the data that follows."""
    epoch: Count
    done: list[ValidatedSpan]
    """Samples of that epoch that are not drawn again."""
    seed: int
    """Seed of the orders of all epochs."""


class RestoreSnapshot(RingMessage):
    """Sends a snapshot to the server, piece by piece in order; after the last one the server resumes from it."""

    kind: ClassVar[str] = "params.restore_snapshot"

    num_bytes: pydantic.PositiveInt
    """Bytes of the whole snapshot."""
    first_byte: Count
    train_step: Count
    check: str = pydantic.Field(max_length=64)
    """Checksum of its checkpoint."""
    start: DataStart
