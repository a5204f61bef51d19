"""What a run notes while it trains: its loss curves, TensorBoard, and the numbers for run.json."""

import time
from pathlib import Path

import torch.distributed as dist

from support import files, progress

LOSSES, HELD_OUT = "losses.jsonl", "held_out.jsonl"


def _iterations(total: int):
    """Returns what tells `ringweave status` how far training is; None where ringweave is not installed."""
    try:
        from ringweave import Iterations
    except ImportError:
        return None
    return Iterations(total=total)


class Report:
    """Notes in `folder` what the ranks measured together: rank 0 writes, the others do nothing.

    A resumed run hands in the last step of its checkpoint, and what was noted after that step is dropped.
    """

    def __init__(self, folder: Path, *, done_steps: int, steps: int, batch: int) -> None:
        self.folder, self.batch = folder, batch
        self.steps, self.done_steps = steps, done_steps
        self.started_s = self.last_s = time.perf_counter()
        self.writes = dist.get_rank() == 0
        self.iterations = _iterations(steps)
        if not self.writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for name in (LOSSES, HELD_OUT):
            files.keep_until(folder / name, done_steps)
        from torch.utils.tensorboard import SummaryWriter  # takes seconds, so only where it is needed

        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1)
        self.bar = progress.progress_bar(total=steps * batch, initial=done_steps * batch)

    def step(self, train_step: int, loss: float, learning_rate: float) -> None:
        """Notes the global mean loss of a train step, in nats per byte."""
        if self.iterations:
            self.iterations.done(train_step, loss)
        if not self.writes:
            return
        elapsed_s, self.last_s = time.perf_counter() - self.last_s, time.perf_counter()
        files.append(self.folder / LOSSES, train_step=train_step, loss=loss)
        self.board.add_scalar("loss/train", loss, train_step)
        self.board.add_scalar("learning_rate", learning_rate, train_step)
        self.board.add_scalar("samples_per_s", self.batch / elapsed_s, train_step)
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        self.bar.update(self.batch)

    def held_out(self, train_step: int, loss: float) -> None:
        """Notes the loss on the held-out bytes after a train step, in nats per byte."""
        if not self.writes:
            return
        files.append(self.folder / HELD_OUT, train_step=train_step, loss=loss)
        self.board.add_scalar("loss/held_out", loss, train_step)
        self.last_s = time.perf_counter()  # judging is not training: keep it out of the next samples/s

    def close(self) -> None:
        """Ends the progress bar, the clock and TensorBoard."""
        self.train_s = time.perf_counter() - self.started_s
        if self.iterations:
            self.iterations.close()
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
            "final_loss": files.read_curve(self.folder / LOSSES)[1][-1],
            "held_out_nats_per_byte": files.read_curve(self.folder / HELD_OUT)[1][-1],
        }
