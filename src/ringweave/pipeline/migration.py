"""Migration of blocks between stages while training continues; a failed migration changes nothing.

```text
 end of step t-1   headers announce the blocks; receivers allocate memory        vote: can all ranks continue?
 step t            state is copied while the stages compute (it changes only in the optimizer's step)
 optimizer's step  before it: gradients, buffers, extra state follow             vote: has everything arrived?
                   in it: sender and receiver make the same update
                   after it: both compare 63-bit digests of all tensors          vote: are they equal?
 step t+1          runs with the new partition; the sender's copies are dropped
```

Until the last vote the senders' blocks are the ones that train. A rank that fails reports it in the next vote, and all
ranks drop what they received; the failed rank frees its received blocks at once, so that its own update has the same
memory as without a migration. If a rank dies, the vote fails with an error on the others, which keep the old partition.
"""

import base64
import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from ringweave.errors import PeerError, RingweaveError, TrainingError, UsageError, explain, shorten
from ringweave.files import file_io
from ringweave.pipeline import model_blocks
from ringweave.pipeline.pipeline import Pipeline, broadcast_text
from ringweave.pipeline.runtime import staged_transfer
from ringweave.pipeline.runtime.staged_transfer import StagedTransfer
from ringweave.pipeline.stage_layout import Layout
from ringweave.planning.repartition import BlockMove, block_moves
from ringweave.sim.pipeline_simulation import StageDevices

_PLAIN_TYPES = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class BlockContents:
    """Tensors by name, and JSON metadata."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


def block_state(block: nn.Module, optimizer: Optimizer | None) -> BlockContents:
    """Contents of a block that change only in the optimizer's step: parameters and optimizer state.

    Raises:
        TrainingError: The optimizer's state contains something else than tensors and plain values.
    """
    found = BlockContents({f"parameter {name}": value.detach() for name, value in block.named_parameters()})
    found.metadata["requires_grad"] = {name: value.requires_grad for name, value in block.named_parameters()}
    kept = found.metadata["optimizer"] = {}
    for place, parameter in enumerate(_optimizer_parameters(optimizer)):
        for name, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            key = f"optimizer {place} {name}"
            if isinstance(value, Tensor):
                found.tensors[key] = value.detach()
                kept[key] = {"place": place, "name": name, "device": value.device.type}
            elif isinstance(value, _PLAIN_TYPES):
                kept[key] = {"place": place, "name": name, "value": value}
            else:
                do = "Train with an optimizer whose state can be moved, or without a controller"
                expected = "a tensor, a number, a text or nothing"
                raise TrainingError(f"optimizer's {name}", got=value, expected=expected, do=do)
    return found


def block_changes(block: nn.Module) -> BlockContents:
    """Contents of a block that change in forward and backward: gradients, buffers, extra state.

    Raises:
        TrainingError: A gradient is sparse.
    """
    found = BlockContents({f"buffer {name}": value.detach() for name, value in block.named_buffers()})
    for name, parameter in block.named_parameters():
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            do = "Use dense gradients (sparse=False)"
            expected = "a dense one"
            raise TrainingError(f"gradient of {name}", got=parameter.grad.layout, expected=expected, do=do)
        found.tensors[f"gradient {name}"] = parameter.grad.detach()
    for name, value in model_blocks.extra_states(block):
        found.tensors[f"extra {name}"] = value
    return found


def destination_tensor(name: str, spec: Tensor, block: nn.Module, device: torch.device) -> Tensor:
    """Destination of an arriving tensor: the block's own tensor if it has one of that name, else memory of a device.

    Raises:
        TrainingError: The block's own tensor has another shape or type.
    """
    kind, _, key = name.partition(" ")
    parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
    own = parameters.get(key) if kind == "parameter" else buffers.get(key) if kind == "buffer" else None
    if own is None and kind in ("parameter", "buffer"):
        do = "Give the same blocks on all ranks"
        raise TrainingError(f"{name} of a block that arrives", got="unknown here", expected="known", do=do)
    if own is None:
        _check_new_tensor(name, spec, parameters)
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)
    if (own.shape, own.dtype) != (spec.shape, spec.dtype):
        got, expected = (tuple(spec.shape), spec.dtype), f"{tuple(own.shape)}, {own.dtype}, as it is here"
        do = "Give the same blocks on all ranks, and keep the shapes of buffers"
        raise TrainingError(f"{name} of a block that arrives", got=got, expected=expected, do=do)
    return own.detach()


_MAX_EXTRA_BYTES = 2**28
"""Largest extra state of a module that a block takes along."""


def _check_new_tensor(name: str, spec: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Refuse a gradient of another shape than its parameter, and state that is larger than the block has use for."""
    kind, _, key = name.partition(" ")
    most = _MAX_EXTRA_BYTES if kind == "extra" else sum(each.numel() for each in parameters.values())
    if kind == "gradient":
        allowed = key in parameters and parameters[key].shape == spec.shape
        expected = f"the shape of its parameter, {tuple(parameters[key].shape)}" if key in parameters else "a parameter"
    else:
        allowed, expected = spec.numel() <= most, f"at most {most} elements"
    if not allowed:
        do = "Give the same blocks on all ranks"
        raise TrainingError(f"{name} of a block that arrives", got=tuple(spec.shape), expected=expected, do=do)


def load_optimizer_state(optimizer: Optimizer | None, received: BlockContents) -> None:
    """Load the previous holder's optimizer state into a new block's optimizer, without converting types."""
    parameters = _optimizer_parameters(optimizer)
    for key, entry in received.metadata["optimizer"].items():
        assert optimizer is not None
        parameter = parameters[entry["place"]]
        value = entry.get("value")
        if key in received.tensors:
            device = parameter.device if entry["device"] != "cpu" else torch.device("cpu")
            value = received.tensors[key].to(device)
        optimizer.state[parameter][entry["name"]] = value


def load_changes(block: nn.Module, received: BlockContents) -> None:
    """Set gradients and extra state; buffers were received in place."""
    parameters = dict(block.named_parameters())
    for name, value in received.tensors.items():
        kind, _, key = name.partition(" ")
        if kind == "gradient":
            parameters[key].grad = value.to(parameters[key].device)
        elif kind == "extra":
            model_blocks.set_extra_state(block, key, value)


def block_digest(block: nn.Module, optimizer: Optimizer | None) -> int:
    """Digest of a block in 63 bits, without gradients, which are spent; equal bits give equal digests."""
    state, changes = block_state(block, optimizer), block_changes(block)
    found = xxhash.xxh3_64(repr(sorted(state.metadata["optimizer"].items())).encode())
    for contents in (state, changes):
        for name, value in sorted(contents.tensors.items()):
            if not name.startswith("gradient "):
                found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
                for part in staged_transfer.bytes_on_device(value).split(staged_transfer.CHUNK_BYTES):
                    found.update(part.cpu().numpy().data)
    return found.intdigest() >> 1


def device_moves(layout: Layout, splits: tuple[int, ...]) -> tuple[BlockMove, ...]:
    """All blocks that move to a stage, between devices: each device of the new stage gets a copy from the old one."""
    found = []
    for block, src, dst in map(astuple, block_moves(layout.splits, splits, layout.num_blocks)):
        senders, receivers = layout.placed.members(src), layout.placed.members(dst)
        found += [BlockMove(block, senders[at % len(senders)], device) for at, device in enumerate(receivers)]
    return tuple(found)


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor in CPU memory, uint8 [bytes]; a view if the tensor is contiguous there."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _optimizer_parameters(optimizer: Optimizer | None) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]] if optimizer else []


_MAX_INLINE_BYTES = 256
_MAX_HEADER_BYTES = 64 * 2**20

BlockHeader = Mapping[str, Any]


class BlockSender:
    """Sends one block; keeps its tensors alive until they have left."""

    def __init__(self, block_contents: BlockContents | None, error: str = "") -> None:
        self.large_tensors: list[Tensor] = []
        """Bytes of each large tensor, where it is."""
        parts = {}
        for name, value in block_contents.tensors.items() if block_contents else ():
            parts[name] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            if value.nbytes <= _MAX_INLINE_BYTES:
                parts[name]["data"] = base64.b64encode(tensor_bytes(value).numpy().tobytes()).decode()
            else:
                self.large_tensors.append(staged_transfer.bytes_on_device(value))
        self._header = json.dumps(
            {"error": error, "parts": parts, "facts": block_contents.metadata if block_contents else {}}
        ).encode()

    def send_header(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start sending the header, which describes the large tensors."""
        raw = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        return _without_none(dist.isend(each, dst, group=group) for each in (torch.tensor([len(raw)]), raw))

    def send_tensors(self, dst: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start sending the large tensors, from host memory."""
        return _without_none(dist.isend(raw, dst, group=group) for raw in self.large_tensors)


class BlockReceiver:
    """Receives one block."""

    def __init__(self, header: BlockHeader, block: nn.Module) -> None:
        """Allocate memory for the tensors that the header describes.

        Raises:
            TrainingError: A tensor does not fit the block, or the header has another format.
        """
        self.received = BlockContents(metadata=header["facts"])
        self._large_tensors: list[tuple[Tensor, Tensor]] = []
        try:
            for name, part in header["parts"].items():
                self._allocate(name, part, block)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as cause:
            expected, do = "shape, dtype and data of each tensor", "Run the same version of ringweave on all ranks"
            raise TrainingError("parts of a block", got=str(cause), expected=expected, do=do) from cause

    def _allocate(self, name: str, part: Mapping[str, Any], block: nn.Module) -> None:
        spec = torch.empty(part["shape"], dtype=getattr(torch, part["dtype"]), device="meta")
        own = destination_tensor(name, spec, block, self._device_of_new(name, block))
        self.received.tensors[name] = own
        if "data" in part:
            raw = bytearray(base64.b64decode(part["data"]))
            if raw:
                own.copy_(torch.frombuffer(raw, dtype=own.dtype).reshape(own.shape))
        else:
            buffer = own if own.is_contiguous() else torch.empty(own.shape, dtype=own.dtype, device=own.device)
            self._large_tensors.append((own, buffer))

    def _device_of_new(self, name: str, block: nn.Module) -> torch.device:
        """Return the device of gradients and optimizer state: the parameters', except where the state is on the CPU."""
        device = next((each.device for each in block.parameters()), torch.device("cpu"))
        kept = self.received.metadata.get("optimizer", {}).get(name, {}) if name.startswith("optimizer ") else {}
        is_on_host = kept.get("device") == "cpu" or name.startswith("extra ")
        return torch.device("cpu") if is_on_host else device

    @property
    def buffers(self) -> list[Tensor]:
        """Bytes of the memory into which each large tensor is received."""
        return [buffer.detach().reshape(-1).view(torch.uint8) for _, buffer in self._large_tensors]

    def receive_tensors(self, src: int, group: dist.ProcessGroup) -> list[dist.Work]:
        """Start receiving the large tensors, into host memory."""
        return _without_none(dist.irecv(buffer, src, group=group) for buffer in self.buffers)

    def copy_into_place(self) -> None:
        """Copy received tensors from their buffers to where they belong."""
        for own, buffer in self._large_tensors:
            if own is not buffer:
                own.copy_(buffer)


def receive_header(src: int, group: dist.ProcessGroup) -> BlockHeader:
    """Wait for a header.

    Raises:
        TrainingError: It is too long, or has another format.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, src, group=group)
    if not 0 < int(length) <= _MAX_HEADER_BYTES:
        expected, do = f"1 to {_MAX_HEADER_BYTES}", "Run the same version of ringweave on all ranks"
        raise TrainingError("bytes of a block's header", got=int(length), expected=expected, do=do)
    raw = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(raw, src, group=group)
    try:
        header = file_io.parse_json(raw.numpy().tobytes(), _MAX_HEADER_BYTES)
        return {"error": header["error"], "parts": header["parts"], "facts": header["facts"]}
    except (ValueError, TypeError, KeyError) as cause:
        expected, do = "JSON of what follows", "Run the same version of ringweave on all ranks"
        raise TrainingError("header of a block", got=str(cause), expected=expected, do=do) from cause


def _without_none(works: Any) -> list[dist.Work]:
    return [work for work in works if work is not None]


def first_failure(cause: str, group: dist.ProcessGroup) -> str:
    """The failure of the first rank that cannot continue; empty if all can.

    `cause`: this rank's failure; empty if it can continue.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = torch.tensor([rank if cause else size])
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    if int(first) == size:
        return ""
    return f"rank {int(first)}: {broadcast_text(cause, group, int(first))}"


def find_mismatches(
    sent: dict[int, int], received: dict[int, int], num_items: int, group: dist.ProcessGroup
) -> list[int]:
    """Items whose sender and receiver have different numbers.

    Args:
        sent: Item -> number, 0 to 2**63 - 1, for items that this rank sent.
        received: The same for items that it received.
        num_items: Number of items over all ranks.
        group: All ranks.
    """
    table = torch.zeros(2, num_items, dtype=torch.int64)
    for row, numbers in enumerate((sent, received)):
        for item, number in numbers.items():
            table[row, item] = number
    dist.all_reduce(table, group=group)
    return (table[0] != table[1]).nonzero().flatten().tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationOutcome:
    """Outcome of a migration, the same on all ranks."""

    splits: tuple[int, ...]
    """Splits that were to be reached."""
    at_step: int
    """Number of the first train step after it."""
    is_done: bool
    """False: the old partition is kept."""
    cause: str = ""
    """Reason of a failure, with the rank."""
    pause_s: float = 0.0
    """Seconds that the slowest rank spent on it while it did nothing else."""


@dataclass(slots=True)
class _PendingMigration:
    """A migration in progress, on one rank."""

    layout: Layout
    sent: dict[int, BlockMove] = field(default_factory=dict)
    """Number of the block move among all moves -> move."""
    received: dict[int, BlockMove] = field(default_factory=dict)
    num_moves: int = 0
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    """Arriving blocks, by index."""
    receivers: dict[int, BlockReceiver] = field(default_factory=dict)
    senders: list[BlockSender] = field(default_factory=list)
    works: list[dist.Work | StagedTransfer] = field(default_factory=list)
    cause: str = ""
    is_copying: bool = False
    is_installed: bool = False
    """All blocks have arrived, and are held beside the old ones."""
    spent_s: float = 0.0
    begun_s: float = 0.0
    """Start of the present phase, by the clock."""


class BlockMigrator:
    """Migrates the blocks of one pipeline.

    All ranks construct it, and start the same migrations between the same steps.

    It works inside `pipeline.optimizer.step()`, which every training loop calls once gradients are final: clipped,
    unscaled, averaged over replicas. A step that a `GradScaler` skips only delays the migration.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        on_done: Callable[[MigrationOutcome], None] = lambda _: None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        at_failure_point: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_done` is called with each migration's outcome, in the optimizer's step that ends it."""
        self._pipeline, self._on_done, self._clock, self._at_failure_point = pipeline, on_done, clock, at_failure_point
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._pending: _PendingMigration | None = None
        pipeline.optimizer.register_step_pre_hook(lambda *_: self._before_update())
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_update())

    @property
    def is_migrating(self) -> bool:
        return self._pending is not None

    def start(self, splits: tuple[int, ...], devices: StageDevices | None = None) -> bool:
        """Start moving all blocks that the new partition places elsewhere; the next update completes it.

        Devices of a stage may get other numbers of samples at the same time (`devices`; None: as before).

        Returns:
            False if a rank could not continue; `on_done` got the reason, and nothing has changed.

        Raises:
            UsageError: The splits are for another number of stages, stages would have other devices, or a migration is
                in progress.
            PeerError: A rank has died.
        """
        self._pending = self._new_migration(splits, devices)
        self._time_phase(self._prepare)
        return self.is_migrating

    def _new_migration(self, splits: tuple[int, ...], devices: StageDevices | None) -> _PendingMigration:
        old = self._pipeline.layout
        if self._pending is not None:
            do = "Wait until it has ended, with the next update"
            raise UsageError("move of blocks", got=splits, expected="no other under way", do=do)
        if len(splits) != len(old.splits):
            do = "A pipeline keeps its number of stages; leave one empty if need be"
            raise UsageError("splits", got=splits, expected=f"{len(old.splits)} splits", do=do)
        pending = _PendingMigration(old.with_stages(splits, devices))
        planned = device_moves(old, splits)
        replica, own = old.replica_of_rank(self._pipeline.rank), old.device_of_rank(self._pipeline.rank)
        for place, move in enumerate(planned):
            number = replica * len(planned) + place
            if own == move.src:
                pending.sent[number] = move
            elif own == move.dst:
                pending.received[number] = move
        pending.num_moves = len(planned) * old.num_replicas
        return pending

    def _prepare(self, pending: _PendingMigration) -> None:
        """Exchange headers, allocate memory, and start the copy if all ranks can continue."""
        headers = self._exchange_headers(pending, self._pack_state)
        for number, header in headers.items():
            self._try_locally(pending, lambda n=number, h=header: self._allocate_block(pending, n, h))
        if not self._all_can_continue(pending):
            return
        pending.is_copying = True
        self._start_tensors(pending)
        self._try_locally(pending, lambda: self._at_failure_point("copying"))

    def _before_update(self) -> None:
        if self._pending is not None and self._pending.is_copying:
            self._time_phase(self._send_changes)

    def _send_changes(self, pending: _PendingMigration) -> None:
        """Send the changes of the step after the state; afterwards the blocks exist twice."""
        self._wait_for_works(pending)
        for receiver in pending.receivers.values():
            self._try_locally(pending, receiver.copy_into_place)
        states = dict(pending.receivers)
        headers = self._exchange_headers(pending, self._pack_changes)
        for number, header in headers.items():
            self._try_locally(pending, lambda n=number, h=header: self._expect_changes(pending, n, h))
        if not self._all_can_continue(pending):
            return
        self._start_tensors(pending)
        self._wait_for_works(pending)
        for number, move in pending.received.items():
            if not pending.cause:
                self._try_locally(pending, lambda n=number, m=move: self._install_block(pending, m.block, states[n], n))
        if pending.cause:
            self._free_received(pending)
        pending.is_installed = True

    def _after_update(self) -> None:
        if self._pending is not None and self._pending.is_installed:
            self._time_phase(self._commit)

    def _commit(self, pending: _PendingMigration) -> None:
        """Compare digests, vote for the last time, and switch to the new partition."""
        sent, arrived = {}, {}
        for numbers, moved in () if pending.cause else ((sent, pending.sent), (arrived, pending.received)):
            for number, move in moved.items():
                self._try_locally(
                    pending, lambda into=numbers, n=number, m=move: into.update({n: self._digest(m.block)})
                )
        self._try_locally(pending, lambda: self._at_failure_point("updated"))
        if not self._all_can_continue(pending):
            return
        different = self._communicate(lambda: find_mismatches(sent, arrived, pending.num_moves, self._group))
        if different:
            got, expected = f"{len(different)} blocks differ", "the same bits where they were and where they go"
            do = "Take an optimizer whose update depends on the block alone"
            self._cancel(pending, explain("blocks after the same update", got=got, expected=expected, do=do))
            return
        self._at_failure_point("voted")
        self._pending = None
        for move in pending.received.values():
            self._pipeline.optimizer.confirm_block(move.block)
        self._pipeline.repartition(pending.layout.splits, pending.layout.devices)
        pause = torch.tensor([pending.spent_s + self._clock() - pending.begun_s], dtype=torch.float64)
        self._communicate(lambda: dist.all_reduce(pause, op=dist.ReduceOp.MAX, group=self._group))
        self._report_outcome(pending, is_done=True, pause_s=float(pause))

    def _pack_state(self, block: int) -> BlockSender:
        self._at_failure_point("packing")
        return BlockSender(block_state(self._pipeline.blocks[block], self._pipeline.optimizer.for_block(block)))

    def _pack_changes(self, block: int) -> BlockSender:
        self._at_failure_point("changes")
        return BlockSender(block_changes(self._pipeline.blocks[block]))

    def _allocate_block(self, pending: _PendingMigration, number: int, header: BlockHeader) -> None:
        self._at_failure_point("making room")
        block = pending.received[number].block
        module = copy.deepcopy(self._pipeline.blocks[block]).to_empty(device=self._pipeline.device)
        pending.receivers[number] = BlockReceiver(header, module)
        pending.blocks[block] = module

    def _expect_changes(self, pending: _PendingMigration, number: int, header: BlockHeader) -> None:
        pending.receivers[number] = BlockReceiver(header, pending.blocks[pending.received[number].block])

    def _install_block(self, pending: _PendingMigration, block: int, state: BlockReceiver, number: int) -> None:
        """Hold a block that has arrived; the optimizer's step that follows updates it."""
        changes, module = pending.receivers[number], pending.blocks[block]
        changes.copy_into_place()
        self._at_failure_point("arrived")
        for name, requires_grad in state.received.metadata["requires_grad"].items():
            module.get_parameter(name).requires_grad_(requires_grad)
        load_changes(module, changes.received)
        self._pipeline.blocks.set_block(block, module)
        optimizer = self._pipeline.optimizer.add_block(block, guard=lambda update: self._guard_update(pending, update))
        load_optimizer_state(optimizer, state.received)

    def _guard_update(self, pending: _PendingMigration, update: Callable[[], None]) -> None:
        """Update a block that has arrived; unlike an update of the stage's own blocks it may fail."""

        def make() -> None:
            self._at_failure_point("updating")
            update()

        self._try_locally(pending, make)
        if pending.cause:
            self._free_received(pending)

    def _digest(self, block: int) -> int:
        return block_digest(self._pipeline.blocks[block], self._pipeline.optimizer.for_block(block))

    def _exchange_headers(
        self, pending: _PendingMigration, pack: Callable[[int], BlockSender]
    ) -> dict[int, BlockHeader]:
        """Headers of arriving blocks, except those whose sender failed; the sender reports that in the next vote."""
        self._finish_sending(pending)
        for move in pending.sent.values():
            sender = self._try_locally(pending, lambda m=move: pack(m.block)) or BlockSender(None, error=pending.cause)
            pending.senders.append(sender)
            dst = self._rank_of_device(move.dst)
            pending.works += self._communicate(lambda s=sender, d=dst: s.send_header(d, self._group))
        headers = {
            number: self._communicate(lambda m=move: receive_header(self._rank_of_device(m.src), self._group))
            for number, move in pending.received.items()
        }
        return {number: header for number, header in headers.items() if not header["error"]}

    def _start_tensors(self, pending: _PendingMigration) -> None:
        if self._pipeline.device.type == "cuda":
            self._start_staged(pending)
            return
        for sender, move in zip(pending.senders, pending.sent.values(), strict=True):
            dst = self._rank_of_device(move.dst)
            pending.works += self._communicate(lambda s=sender, d=dst: s.send_tensors(d, self._group))
        for number, move in pending.received.items():
            src, receiver = self._rank_of_device(move.src), pending.receivers[number]
            pending.works += self._communicate(lambda r=receiver, s=src: r.receive_tensors(s, self._group))

    def _start_staged(self, pending: _PendingMigration) -> None:
        """Start sending and receiving all large tensors of a GPU, each way through two pinned buffers."""
        sends = [
            (raw, self._rank_of_device(move.dst))
            for sender, move in zip(pending.senders, pending.sent.values(), strict=True)
            for raw in sender.large_tensors
        ]
        receives = [
            (raw, self._rank_of_device(move.src))
            for number, move in pending.received.items()
            for raw in pending.receivers[number].buffers
        ]
        device, group = self._pipeline.device, self._group
        if sends:
            start = partial(dist.isend, group=group)
            pending.works.append(StagedTransfer(sends, device, start, is_sending=True))
        if receives:
            start = partial(dist.irecv, group=group)
            pending.works.append(StagedTransfer(receives, device, start, is_sending=False))

    def _rank_of_device(self, device: int) -> int:
        return self._pipeline.groups.device_ranks[device]

    def _wait_for_works(self, pending: _PendingMigration) -> None:
        works, pending.works = pending.works, []
        for work in works:
            self._communicate(work.wait)

    def _finish_sending(self, pending: _PendingMigration) -> None:
        self._wait_for_works(pending)
        pending.senders = []

    def _all_can_continue(self, pending: _PendingMigration) -> bool:
        """Vote; cancel the migration if a rank cannot continue."""
        cause = self._communicate(lambda: first_failure(pending.cause, self._group))
        if cause:
            self._cancel(pending, cause)
        return not cause

    def _cancel(self, pending: _PendingMigration, cause: str) -> None:
        """Cancel the migration; the old partition is intact."""
        self._wait_for_works(pending)
        self._discard_pending()
        self._report_outcome(pending, is_done=False, cause=cause)

    def _discard_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._free_received(pending)

    def _free_received(self, pending: _PendingMigration) -> None:
        """Free the memory of all blocks that have arrived here."""
        own = self._pipeline.layout.ranges[self._pipeline.stage]
        for block in pending.blocks:
            if block not in own:
                self._pipeline.optimizer.remove_block(block)
                self._pipeline.blocks.drop_values(block)

    def _report_outcome(
        self, pending: _PendingMigration, *, is_done: bool, cause: str = "", pause_s: float = 0.0
    ) -> None:
        at_step = self._pipeline.train_step_index
        splits = pending.layout.splits
        self._on_done(MigrationOutcome(splits=splits, at_step=at_step, is_done=is_done, cause=cause, pause_s=pause_s))

    def _time_phase(self, work: Callable[[_PendingMigration], None]) -> None:
        pending = self._pending
        assert pending is not None
        pending.begun_s = self._clock()
        try:
            work(pending)
        finally:
            pending.spent_s += self._clock() - pending.begun_s

    def _try_locally(self, pending: _PendingMigration, action: Callable[[], Any]) -> Any:
        """Run an action of this rank alone; a failure is reported in the next vote."""
        try:
            return action()
        except Exception as cause:
            pending.cause = pending.cause or (str(cause) if isinstance(cause, RingweaveError) else shorten(cause))
            return None

    def _communicate(self, action: Callable[[], Any]) -> Any:
        """Run a communication; if it fails, the migration is off on this rank and training cannot continue."""
        try:
            return action()
        except (RuntimeError, ValueError) as cause:
            self._discard_pending()
            do = "Start again from a checkpoint"
            where = f"rank {self._pipeline.rank}, holding the partition {self._pipeline.layout.splits}"
            text = explain("move of blocks", got=cause, expected="answers of all ranks", do=do, where=where)
            raise PeerError(text) from cause
