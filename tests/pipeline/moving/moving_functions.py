"""What real processes do in tests of moving blocks."""

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.errors import PeerError
from ringweave.pipeline import Pipeline, Settings, migration
from ringweave.pipeline.migration import BlockContents, BlockMigrator, MigrationOutcome
from tests.pipeline import pipeline_functions
from tests.pipeline.pipeline_functions import BATCH, CLASSES, FEATURES, batch_of

NUM_BLOCKS, NUM_STEPS = 7, 22
_DIGEST, _FILL, _CHANGES = (
    migration.block_digest,
    migration.load_optimizer_state,
    migration.block_changes,
)
FAULTS = (
    "nothing",
    "state left behind",
    "buffer dropped",
    "gradient dropped",
    "extra state dropped",
    "shapes inferred again",
)


class Counting(nn.Module):
    """Has a buffer that is in no state_dict, a frozen weight, and extra state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("running", torch.zeros(300))
        self.frozen = nn.Parameter(torch.randn(100, dtype=torch.float64), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen += x.detach().abs().mean()
            self.running += torch.rand(300)
        return x * self.scale * (1 + 1e-3 * self.calls) + 1e-3 * self.seen + 1e-3 * self.running.mean()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)]
    mixed = nn.Sequential(nn.Linear(16, 16), Counting(), nn.Dropout(0.2))
    return [nn.Linear(FEATURES, 16), *inner, mixed, nn.LayerNorm(16), nn.Linear(16, CLASSES)]


def make_optimizer(block: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in block.parameters() if each.requires_grad], lr=1e-2)


def make_pipeline(splits: tuple[int, ...]) -> Pipeline:
    settings = Settings(num_microbatches=4, splits=splits, schedule="1f1b", seed=7)
    return Pipeline(make_blocks(), nn.CrossEntropyLoss(), make_optimizer, torch.empty(BATCH, FEATURES), settings)


def fingerprints(pipeline: Pipeline) -> dict[int, int]:
    """Of every held block: all bits, buffers in no state_dict and extra state included."""
    return {b: _DIGEST(pipeline.blocks[b], pipeline.optimizer.for_block(b)) for b in pipeline.blocks.held}


@dataclass
class Trained:
    """What a rank has after training."""

    bits: dict[int, int]
    losses: list[list[float]]
    outcomes: list[MigrationOutcome]
    splits: tuple[int, ...]


def train(
    splits: tuple[int, ...],
    partitions: list[tuple[int, ...]],
    at_boundary: Callable[[Pipeline], Callable[[str], None]] | None = None,
    num_steps: int = NUM_STEPS,
    after_step: Callable[[Pipeline], None] = lambda _: None,
) -> Trained:
    """After each step the next of the partitions is gone to, in the step behind it."""
    pipeline = make_pipeline(splits)
    outcomes: list[MigrationOutcome] = []
    hook = at_boundary(pipeline) if at_boundary else lambda _: None
    moving = BlockMigrator(pipeline, outcomes.append, at_failure_point=hook)
    todo, losses = list(partitions), []
    scheduler = torch.optim.lr_scheduler.StepLR(pipeline.optimizer, 3, 0.8)
    for step in range(num_steps):
        x, y = batch_of(step)
        pipeline.train_step(x, target=y, max_norm=0.1)
        scheduler.step()
        losses.append(pipeline.microbatch_losses.flatten().tolist())
        after_step(pipeline)
        if todo and step < num_steps - 1:
            moving.start(todo.pop(0))
    return Trained(fingerprints(pipeline), losses, outcomes, pipeline.layout.splits)


def random_partitions(seed: int, num_stages: int, count: int) -> list[tuple[int, ...]]:
    """Each with a block or more for every stage."""
    rng = random.Random(seed)
    return [tuple(sorted(rng.sample(range(1, NUM_BLOCKS), num_stages - 1))) for _ in range(count)]


def train_both(splits: tuple[int, ...], partitions: list[tuple[int, ...]]) -> tuple[Trained, Trained]:
    """Without and with moves, in the same processes."""
    return train(splits, []), train(splits, partitions)


def train_encoded(splits: tuple[int, ...], partitions: list[tuple[int, ...]]) -> tuple[Trained, Trained]:
    """Without encoding and moves, and with both, by the environment of `run --wire`."""
    plain = train(splits, [])
    os.environ["RINGWEAVE_WIRE"] = "bf16"
    try:
        return plain, train(splits, partitions)
    finally:
        del os.environ["RINGWEAVE_WIRE"]


def train_wrongly(splits: tuple[int, ...], partitions: list[tuple[int, ...]]) -> dict[str, Trained]:
    """Each fault is left out of every move, and nobody compares; `none` is without moves."""
    found = {"none": train(splits, [], num_steps=8)}
    for fault in FAULTS:
        migration.block_digest = lambda *_: 1  # type: ignore[assignment]
        dropped = {"buffer dropped": "buffer ", "gradient dropped": "gradient ", "extra state dropped": "extra "}
        if fault == "state left behind":
            migration.load_optimizer_state = lambda *_: None  # type: ignore[assignment]
        elif fault in dropped:
            kind = dropped[fault]
            migration.block_changes = lambda block, k=kind: _without(_CHANGES(block), k)  # type: ignore[assignment]
        after_step = infer_again if fault == "shapes inferred again" else lambda _: None
        found[fault] = train(splits, partitions, after_step=after_step, num_steps=8)
        migration.block_digest, migration.load_optimizer_state, migration.block_changes = (
            _DIGEST,
            _FILL,
            _CHANGES,
        )
    return found


def _without(what: BlockContents, kind: str) -> BlockContents:
    return BlockContents(
        {name: value for name, value in what.tensors.items() if not name.startswith(kind)}, what.metadata
    )


def infer_again(pipeline: Pipeline) -> None:
    """What a stage that infers its shapes does after a move: a forward of its blocks with some data."""
    x = torch.zeros(BATCH // 4, FEATURES if pipeline.is_first else 16)
    for block in pipeline.layout.ranges[pipeline.stage]:
        x = pipeline.blocks[block](x)


def train_comparing(splits: tuple[int, ...], partitions: list[tuple[int, ...]]) -> tuple[Trained, Trained]:
    """Without moves; and with state left out of every move, while the ranks compare, as always."""
    plain = train(splits, [], num_steps=6)
    migration.load_optimizer_state = lambda *_: None  # type: ignore[assignment]
    return plain, train(splits, partitions, num_steps=6)


class Refusing:
    """Raises at one boundary on one rank, once; looks that behind the update nothing is held of what arrived there.

    Beside those of the mover there is "filling": one value of a block's optimizer is there, others are not.
    """

    def __init__(self, boundary: str, rank: int, pipeline: Pipeline) -> None:
        self.boundary, self.pipeline, self.is_due = boundary, pipeline, pipeline.rank == rank
        self.is_update_due = False
        pipeline.optimizer.register_step_post_hook(lambda *_: self._after_update())

    def __call__(self, boundary: str) -> None:
        if self.is_due and boundary == self.boundary:
            self.is_due, self.is_update_due = False, boundary in ("arrived", "filling", "updating")
            raise MemoryError(f"no room at {boundary}")

    def fill(self, optimizer: torch.optim.Optimizer | None, arrived: BlockContents) -> None:
        """As the mover does it, with the boundary between the first value and the others."""
        first = dict(list(arrived.metadata["optimizer"].items())[:1])
        _FILL(optimizer, BlockContents(arrived.tensors, arrived.metadata | {"optimizer": first}))
        self("filling")
        _FILL(optimizer, arrived)

    def _after_update(self) -> None:
        """Before the mover's own hook, which was registered later."""
        if self.is_update_due:
            assert self.pipeline.blocks.held == tuple(self.pipeline.layout.ranges[self.pipeline.stage])
            self.is_update_due = False


def train_with_failures(
    splits: tuple[int, ...], other: tuple[int, ...], failures: list[tuple[str, int]]
) -> tuple[Trained, list[Trained]]:
    """Without moves; and for each failure with a move that fails and one behind it."""
    plain, found = train(splits, [], num_steps=5), []
    for boundary, rank in failures:

        def refuse(pipeline: Pipeline, boundary: str = boundary, rank: int = rank) -> Refusing:
            refusing = Refusing(boundary, rank, pipeline)
            migration.load_optimizer_state = refusing.fill  # type: ignore[assignment]
            return refusing

        found.append(train(splits, [other, other], refuse, num_steps=5))
    return plain, found


def die(boundary: str, rank: int, splits: tuple[int, ...], other: tuple[int, ...]) -> dict[str, Any]:
    """One rank is killed at a boundary; what the others then hold."""

    def killer(pipeline: Pipeline) -> Callable[[str], None]:
        def hook(now: str) -> None:
            if now == boundary and pipeline.rank == rank:
                os.kill(os.getpid(), signal.SIGKILL)

        return hook

    pipeline = make_pipeline(splits)
    moving = BlockMigrator(pipeline, at_failure_point=killer(pipeline))
    x, y = batch_of(0)
    pipeline.train_step(x, target=y)
    text = ""
    try:
        moving.start(other)
        pipeline.train_step(x, target=y)
    except (PeerError, RuntimeError) as cause:
        text = f"{type(cause).__name__}: {cause}"
    else:
        pipeline.groups.sum_over_ranks(torch.zeros(1))
    layout = pipeline.layout
    held = pipeline.blocks.held
    values = all(bool(p.isfinite().all()) for b in held for p in pipeline.blocks[b].parameters())
    return {"text": text, "splits": layout.splits, "held": held, "own": layout.ranges[pipeline.stage], "whole": values}


def train_replicas(partitions: list[tuple[int, ...]]) -> tuple[dict[int, int], list[MigrationOutcome]]:
    """Two replicas of two stages; each step is a loop's own, and every second update is left out."""
    pipeline = make_pipeline((3,))
    outcomes: list[MigrationOutcome] = []
    moving, todo = BlockMigrator(pipeline, outcomes.append), list(partitions)
    for step in range(8):
        x, y = batch_of(2 * step + pipeline.rank // 2)
        pipeline.forward_backward(x, target=y)
        if step % 2 == 0:
            pipeline.optimizer.step()
        pipeline.optimizer.zero_grad()
        if todo and not moving.is_migrating:
            moving.start(todo.pop(0))
    return fingerprints(pipeline), outcomes


def train_replicas_both(partitions: list[tuple[int, ...]]) -> list[tuple[dict[int, int], list[MigrationOutcome]]]:
    return [train_replicas([]), train_replicas(partitions)]


def refusals() -> list[str]:
    """Texts of errors."""
    pipeline = pipeline_functions.make_pipeline(pipeline_functions.Case(splits=(2,)))
    moving, texts = BlockMigrator(pipeline), []
    for splits in ((1, 2), (3,), (4,)):
        try:
            moving.start(splits)
        except Exception as cause:
            texts.append(str(cause))
    return texts
