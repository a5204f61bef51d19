"""What a run leaves behind: loss curves that can be compared, TensorBoard, a progress bar, run.json."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from support.checkpoints import replace_text

LOSSES, HELD_OUT = "losses.jsonl", "held_out.jsonl"
BAR = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} samples, {rate_fmt}, {remaining} to go{postfix}"


class Report:
    """Notes in `folder` what the ranks measured together: rank 0 writes, the others do nothing.

    A resumed run hands in the last step of its checkpoint, and what was noted after that step is dropped.
    """

    def __init__(self, folder: Path, *, done_steps: int, steps: int, batch: int) -> None:
        self.folder, self.batch = folder, batch
        self.steps, self.done_steps = steps, done_steps
        self.started_s = self.last_s = time.perf_counter()
        self.writes = dist.get_rank() == 0
        if not self.writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LOSSES, HELD_OUT):
            keep_until(folder / name, done_steps)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1)
        self.bar = progress_bar(total=steps * batch, initial=done_steps * batch)

    def step(self, train_step: int, loss: float, learning_rate: float) -> None:
        """Notes the global mean loss of a train step, in nats per byte."""
        if not self.writes:
            return
        elapsed_s, self.last_s = time.perf_counter() - self.last_s, time.perf_counter()
        append(self.folder / LOSSES, train_step=train_step, loss=loss)
        self.board.add_scalar("loss/train", loss, train_step)
        self.board.add_scalar("learning_rate", learning_rate, train_step)
        self.board.add_scalar("samples_per_s", self.batch / elapsed_s, train_step)
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update(self.batch)

    def held_out(self, train_step: int, loss: float) -> None:
        """Notes the loss on the held-out bytes after a train step, in nats per byte."""
        if not self.writes:
            return
        append(self.folder / HELD_OUT, train_step=train_step, loss=loss)
        self.board.add_scalar("loss/held_out", loss, train_step)
        self.last_s = time.perf_counter()  # judging is not training: keep it out of the next samples/s

    def close(self) -> None:
        """Ends the progress bar, the clock and TensorBoard."""
        self.train_s = time.perf_counter() - self.started_s
        if self.writes:
            self.bar.close()
            self.board.close()

    def summary(self) -> dict[str, float]:
        """Returns the numbers of the run, of which the times are this process's: a resumed run counts its own steps."""
        return {
            "steps": self.steps,
            "resumed_after_step": self.done_steps,
            "world_size": dist.get_world_size(),
            "train_s": self.train_s,
            "samples_per_s": (self.steps - self.done_steps) * self.batch / self.train_s,
            "final_loss": read_curve(self.folder / LOSSES)[1][-1],
            "held_out_nats_per_byte": read_curve(self.folder / HELD_OUT)[1][-1],
        }


def append(path: Path, **values: float) -> None:
    """Adds one line to a curve; floats are written so that they read back as the same bits."""
    with path.open("a") as lines:
        lines.write(json.dumps(values) + "\n")


def read_curve(path: Path) -> tuple[list[int], list[float]]:
    """Returns the train steps and the losses noted in a curve."""
    points = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [point["train_step"] for point in points], [point["loss"] for point in points]


def keep_until(path: Path, last_step: int) -> None:
    """Drops from a curve what comes after `last_step`, and a last line that was cut short."""
    if not path.exists():
        return
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    replace_text(path, "".join(line for line in whole if json.loads(line)["train_step"] <= last_step))


def merge_into_json(path: Path, values: Mapping[str, object]) -> None:
    """Sets `values` in a JSON document and keeps its other keys, which belong to other programs."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(known | values, indent=2) + "\n")


def progress_bar(*, total: int, initial: int = 0) -> tqdm:
    """Returns a bar that counts samples: one that moves on a terminal, a line every few seconds elsewhere."""
    terminal = sys.stderr.isatty()
    file, interval_s = (sys.stderr, 0.2) if terminal else (_OneLineEach(), 5.0)
    return tqdm(
        desc="training",
        total=total,
        initial=initial,
        unit=" samples",
        bar_format=BAR,
        file=file,
        mininterval=interval_s,
    )


class _OneLineEach:
    """A text stream for logs and pipes: what would redraw a line ends it instead."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Has nothing to do: every line is flushed when it is written."""
