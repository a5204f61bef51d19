"""Checkpoints that are either whole or ignored: written aside by all ranks, then renamed by one."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states

from support import files

NUM_KEPT = 2
METADATA = ".metadata"  # torch writes it last, when every rank's part is on disk


class Checkpoints:
    """The last few checkpoints of a run, in a folder that all ranks can reach.

    `step-000030/` is complete, `writing/` is not (yet), and `latest` names the one to resume from.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, train_step: int) -> None:
        """Writes the state after `train_step` steps; every rank calls it. Killed half-way, it leaves the last one."""
        writing, complete = self.folder / "writing", self.folder / f"step-{train_step:06d}"
        if dist.get_rank() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        dist.barrier()
        dcp.save(_state(model, optimizer, train_step), checkpoint_id=writing)
        if dist.get_rank() == 0:
            shutil.rmtree(complete, ignore_errors=True)
            writing.rename(complete)
            files.replace_text(self.folder / "latest", complete.name)
            for old in self._complete()[:-NUM_KEPT]:
                shutil.rmtree(old)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restores the last complete checkpoint into both and returns how many steps it had seen, 0 without one."""
        latest = self.latest()
        if latest is None:
            return 0
        optimizer.zero_grad()  # torch leaves out the optimizer's moments, silently, while there are gradients
        state = _state(model, optimizer, 0)
        dcp.load(state, checkpoint_id=latest)
        states.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["train_step"])

    def latest(self) -> Path | None:
        """Returns the folder of the last complete checkpoint, None where there is none."""
        pointer = self.folder / "latest"
        if pointer.exists():
            named = self.folder / pointer.read_text().strip()
            if (named / METADATA).exists():
                return named
        return max(self._complete(), default=None)

    def clear(self) -> int:
        """Removes the checkpoints of an earlier run in the same folder and returns 0 steps; every rank calls it."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()
        return 0

    def _complete(self) -> list[Path]:
        return sorted(folder for folder in self.folder.glob("step-*") if (folder / METADATA).exists())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, train_step: int) -> dict:
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "train_step": train_step}
