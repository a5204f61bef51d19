"""What real processes do in tests of checkpoints that a crash breaks off."""

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import xxhash
from torch import Tensor, nn

from ringweave.errors import TrainingError
from ringweave.files import file_io
from ringweave.pipeline import Pipeline, Settings, checkpoints, profiling
from ringweave.pipeline import blocks as pipeline_blocks
from tests.pipeline.pipeline_functions import Case, batch_of, fingerprints, make_pipeline, without_checks

MOMENTS = (
    "the new one half written",
    "all written",
    "the old one aside",
    "the new one has its name",
    "the old one half deleted",
)


class Crash(BaseException):
    """Nobody catches it: nothing is tidied up behind it."""


def crash_while_saving(directory: Path, moment: str) -> dict[str, Any]:
    """Three saves, each after one more step; the second one breaks off at a moment."""
    pipeline = make_pipeline(Case())
    bits = {1: _train_and_save(pipeline, directory, 0)}
    has_crashed = False
    with _crashing(directory, moment):
        try:
            _train_and_save(pipeline, directory, 1)
        except Crash:
            has_crashed = True
    bits[2] = fingerprints(pipeline)
    after = _loaded(directory)
    _train_and_save(pipeline, directory, 2)
    return {
        "has crashed": has_crashed,
        "steps after the crash": after.train_step_index,
        "same values": fingerprints(after) == bits[after.train_step_index],
        "steps after the next save": _loaded(directory).train_step_index,
    }


def watch_saving(directory: Path) -> list[str]:
    """What is synced and renamed, one after the other."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(descriptor: int) -> None:
        done.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def watched_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name} {without_checks(target.name)}")
        return rename(path, target)

    with mock.patch.object(os, "fsync", watched_fsync), mock.patch.object(Path, "rename", watched_rename):
        checkpoints.save(make_pipeline(Case()), directory)
    return done


def _train_and_save(pipeline: Pipeline, directory: Path, step: int) -> dict[int, str]:
    x, y = batch_of(step)
    pipeline.train_step(x, target=y)
    checkpoints.save(pipeline, directory)
    return fingerprints(pipeline)


def _loaded(directory: Path) -> Pipeline:
    pipeline = make_pipeline(Case())
    checkpoints.load(pipeline, directory)
    return pipeline


def _crashing(directory: Path, moment: str) -> Any:
    rename, rmtree = Path.rename, shutil.rmtree

    def broken_rename(path: Path, target: Path) -> Path:
        if (moment == "all written" and path.is_dir()) or (moment == "the old one aside" and target == directory):
            raise Crash
        return rename(path, target)

    def broken_rmtree(path: Path, **settings: Any) -> None:
        if path.name.endswith(".old") and (blocks := list(path.glob("block-00000-*"))):
            blocks[0].unlink()
            raise Crash
        rmtree(path, **settings)

    def broken_sync(path: Path) -> None:
        if moment == "the new one half written" or path == directory.parent:
            raise Crash

    replaced: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "the new one half written": (checkpoints, "_sync_path", broken_sync),
        "all written": (Path, "rename", broken_rename),
        "the old one aside": (Path, "rename", broken_rename),
        "the new one has its name": (file_io, "fsync_folder", broken_sync),
        "the old one half deleted": (shutil, "rmtree", broken_rmtree),
    }
    return mock.patch.object(*replaced[moment])


def save_on_full_disks(directory: Path) -> tuple[list[str], int]:
    """(what was said by saves that break off at one rank, one after the other; steps of what is loaded behind them)."""
    pipeline = make_pipeline(Case(splits=(1, 3)))
    _train_and_save(pipeline, directory, 0)
    said = []
    for step, (rank, owner, name) in enumerate(
        ((0, Path, "mkdir"), (1, checkpoints, "_save_block"), (2, checkpoints, "_save_block"), (0, Path, "rename")), 1
    ):
        full = OSError(errno.ENOSPC, "No space left on device")
        broken = mock.patch.object(owner, name, side_effect=full) if pipeline.rank == rank else nullcontext()
        with broken:
            try:
                _train_and_save(pipeline, directory, step)
            except TrainingError as error:
                said.append(str(error).replace(str(directory), "DIR"))
    checkpoints.load(pipeline, directory)
    loaded = pipeline.train_step_index
    _train_and_save(pipeline, directory, 5)
    return said, loaded


def load_damaged(directory: Path) -> dict[str, Any]:
    """What `load` says of checkpoints that were damaged in all ways, and whether the pipeline was left as it was."""
    _train_and_save(make_pipeline(Case()), directory, 0)
    pipeline = make_pipeline(Case())
    before = fingerprints(pipeline)
    texts: dict[str, list[str]] = {}
    for name, damage in _damages(directory):
        damaged = directory.with_name("damaged")
        shutil.copytree(directory, damaged)
        damage(damaged)
        try:
            checkpoints.load(pipeline, damaged)
            texts.setdefault(name, []).append("loaded")
        except TrainingError as error:
            texts.setdefault(name, []).append(str(error).replace(str(damaged), "DIR"))
        shutil.rmtree(damaged)
    is_unchanged = fingerprints(pipeline) == before and pipeline.train_step_index == 0
    checkpoints.load(pipeline, directory)
    return {"texts": texts, "unchanged": is_unchanged, "steps of the whole one": pipeline.train_step_index}


def _damages(directory: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """(what it is called, what does it to a folder)."""
    random = Random(1)
    for path in sorted(directory.glob("block-*")):
        whole = path.read_bytes()
        for length in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
            yield "cut", functools.partial(_put, path.name, whole[:length])
        for place in (0, 9, len(whole) - 1, *random.sample(range(len(whole)), 20)):
            flipped = bytes([whole[place] ^ 1 << random.randrange(8)])
            yield "flipped", functools.partial(_put, path.name, whole[:place] + flipped + whole[place + 1 :])
        yield "missing", lambda folder, path=path: (folder / path.name).unlink()
    text = (directory / checkpoints.SHARED_FILE).read_text()
    other = text.replace('"train_steps": 1', '"train_steps": 3').encode()
    yield "another number", functools.partial(_put, checkpoints.SHARED_FILE, other)
    yield "half of pipeline.json", functools.partial(_put, checkpoints.SHARED_FILE, text[: len(text) // 2].encode())
    yield "right check, no safetensors", _replace_first_block


def _put(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


def _replace_first_block(folder: Path) -> None:
    (path,) = folder.glob("block-00000-*")
    path.unlink()
    content = b"no safetensors"
    _put(f"block-00000-{xxhash.xxh3_64_hexdigest(content)}.safetensors", content, folder)


class Mastered(torch.optim.Optimizer):
    """Updates weights of half the bits from float32 ones that it keeps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore - what torch's overloads take, without a result
        """One thousandth of the gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master", parameter.detach().float())
                state["master"] -= group["lr"] * parameter.grad.float()
                parameter.copy_(state["master"])


class Counting(nn.Linear):
    """Keeps a count that is no parameter and no buffer, and hands it out with a tensor."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "last": torch.tensor([float(self.seen)])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"] if state["last"].item() == state["seen"] else -1


def save_what_is_rare(directory: Path) -> dict[str, Any]:
    """Half the bits in the weights, float32 in the optimizer, and extra state: saved, loaded, profiled."""
    made = [_rare_pipeline() for _ in range(2)]
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    made[0].train_step(x, target=x)
    checkpoints.save(made[0], directory)
    checkpoints.load(made[1], directory)
    optimizers = [pipeline.optimizer.for_block(1) for pipeline in made]
    masters = [state["master"] for each in optimizers if each for state in each.state.values()]
    half = len(masters) // 2
    profile = profiling.profile(made[0], lambda block: Mastered(block.parameters()), rounds=1)
    return {
        "seen": [pipeline.blocks[1].seen for pipeline in made],
        "types": {master.dtype for master in masters},
        "same": all(map(torch.equal, masters[:half], masters[half:])),
        "kinds": len({cost.kind for cost in profile.blocks}),
        "of a model": len(pipeline_blocks(nn.Sequential(*made[0].blocks))),
    }


def _rare_pipeline() -> Pipeline:
    torch.manual_seed(0)
    blocks = [Counting(4, 4, dtype=torch.bfloat16) for _ in range(2)]
    example = torch.empty(4, 4, dtype=torch.bfloat16)
    settings = Settings(num_microbatches=2)
    return Pipeline(blocks, nn.MSELoss(), lambda block: Mastered(block.parameters()), example, settings)
