"""Wait of the training for a checkpoint, beside a plain copy in memory, torch.save and torch.distributed.checkpoint.

    python bench/faults/checkpoints.py --megabytes 100 --rounds 9

The model has so many MB of parameters; with AdamW's moments a checkpoint is three times that. Rounds are interleaved;
all figures are measured, medians. `written` is when the file is on the disk, with fsync for ours only.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ringweave


def make(num_megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of linear layers with moments."""
    width = 1000
    model = nn.Sequential(
        *(nn.Linear(width, width, bias=False) for _ in range(num_megabytes * 1_000_000 // 4 // width**2))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, width)).sum().backward()
    optimizer.step()
    return model, optimizer


def seconds(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


def main() -> None:
    """Measure, print, and leave a JSON document if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, optimizer = make(options.megabytes)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [*model.parameters(), *(each for own in optimizer.state.values() for each in own.values())]
    copies = [torch.empty_like(each) for each in tensors]
    found: dict[str, list[float]] = {
        name: [] for name in ("plain copy", "save waits", "save written", "torch.save", "dcp.save")
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = ringweave.Checkpoints(Path(folder) / "ours", model=model, optimizer=optimizer, keep=1)
        for number in range(options.rounds + 1):
            row = {"plain copy": seconds(lambda: [to.copy_(each) for to, each in zip(copies, tensors, strict=True)])}
            row["save waits"] = seconds(lambda number=number: checkpoints.save(number))
            row["save written"] = row["save waits"] + seconds(checkpoints.wait)
            row["torch.save"] = seconds(lambda: torch.save(state, Path(folder) / "theirs.pt"))
            row["dcp.save"] = seconds(lambda: dcp.save(state, checkpoint_id=Path(folder) / "dcp", no_dist=True))
            for name, each_s in row.items() if number else ():  # the first touches new memory
                found[name].append(each_s)
    num_bytes = sum(each.nbytes for each in tensors)
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"{num_bytes / 1e6:.0f} MB, medians of {options.rounds} rounds (measured)")
    for name, median_s in medians.items():
        print(f"{name:14}{median_s * 1e3:9.1f} ms")
    if options.out:
        options.out.write_text(
            json.dumps({"bytes": num_bytes, "median_s": medians, "rounds_s": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
