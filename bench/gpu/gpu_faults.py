"""Death of a rank in the middle of a bucket: the survivors' error, its time, and their next allreduce.

The last rank kills itself by SIGKILL right after it has started an asynchronous allreduce. With `--what elastic` the
program runs under `ringweave run --elastic` instead: a model on the device trains on, and workers die on the way.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_device import BenchDevice, agree_max, first_line, join_world, rank_parser, reduce_and_wait, save_json
from torch.nn import Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader, TensorDataset

ELASTIC_SAMPLES, ELASTIC_BATCH, NUM_CLASSES = 4096, 64, 10
DEATHS = {"1": 10, "2": 40}
"""Slot -> train step at which its first process kills itself; two of four are always left."""
STEP_S = 0.1
"""Pause of every step: successors join before the last one."""


def run_kill(options: Any) -> None:
    """Warm up, let the last rank die in a bucket, and record what the others see."""
    device = BenchDevice(options.device)
    control = join_world(60.0)
    rank, size = dist.get_rank(), dist.get_world_size()
    message = torch.ones(options.bytes // 4, device=device.device)
    for _ in range(3):
        reduce_and_wait(message, dist.group.WORLD)
    device.synchronize()
    document: dict[str, Any] = {"rank": rank, "memory_before": device.memory()}
    own = options.result.with_name(f"{options.result.name}.{rank}")
    died = options.result.with_name("died_at")
    save_json(own, document)
    agree_max(0.0, control)
    for _ in range(1000):
        try:
            work = dist.all_reduce(message, async_op=True)
            if rank == size - 1:
                time.sleep(0.002)
                died.write_text(repr(time.time()), encoding="ascii")
                os.kill(os.getpid(), signal.SIGKILL)
            assert work is not None
            work.wait()
            device.synchronize()
        except Exception as error:
            document["seconds_to_error"] = time.time() - float(died.read_text(encoding="ascii"))
            document["error"] = str(error).strip()[:600]
            document["names_the_rank"] = f"rank {size - 1}" in str(error)
            break
    save_json(own, document)
    document["next"] = next_allreduce(device, size)
    document["memory_after"] = device.memory()
    save_json(own, document)
    os._exit(0)  # the broken group is left as it is: its end is not measured here


def next_allreduce(device: BenchDevice, size: int) -> dict[str, Any]:
    """Make a group of the survivors and reduce in it."""
    started_s = time.perf_counter()
    try:
        survivors = list(range(size - 1))
        group = dist.new_group(survivors, backend="ringweave", use_local_synchronization=True)
        x = torch.ones(1_000_000, device=device.device)
        reduce_and_wait(x, group)
        device.synchronize()
        is_right = bool((x == size - 1).all())
    except Exception as error:
        return {"error": first_line(error), "seconds": time.perf_counter() - started_s}
    return {"right": is_right, "seconds": time.perf_counter() - started_s}


def run_elastic(options: Any) -> None:
    """Train under --elastic; the first incarnation of some slots dies at a step of its own."""
    import ringweave

    device = BenchDevice(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    slot, _, incarnation = os.environ.get("RINGWEAVE_MEMBER", "0.1").partition(".")
    x = torch.randn(ELASTIC_SAMPLES, 256)
    samples = TensorDataset(x, x[:, :NUM_CLASSES].argmax(dim=1))
    width = 64 if options.short else 1024
    model = Sequential(Linear(256, width), ReLU(), Linear(width, width), ReLU(), Linear(width, NUM_CLASSES))
    model = model.to(device.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(samples, batch_size=ELASTIC_BATCH, shuffle=True)
    model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
    folder: Path = options.result.parent
    log = folder / f"elastic.{slot}.{incarnation}"
    steps, losses, stalls = 0, [], 0.0
    last_s = time.perf_counter()
    for _ in range(3):
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs.to(device.device)), labels.to(device.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            steps += 1
            now_s = time.perf_counter()
            stalls, last_s = (max(stalls, now_s - last_s) if steps > 3 else 0.0), now_s
            time.sleep(STEP_S)
            if steps == DEATHS.get(slot) and not (folder / f"killed.{slot}").exists():
                (folder / f"killed.{slot}").write_text(str(steps), encoding="ascii")
                os.kill(os.getpid(), signal.SIGKILL)
            document = {"steps": steps, "first_loss": losses[0], "last_loss": losses[-1], "longest_step_s": stalls}
            save_json(log, document | {"memory": device.memory()})


def main() -> None:
    """Run one of the two."""
    parser = rank_parser(__doc__)
    parser.add_argument("--what", choices=["kill", "elastic"], default="kill")
    parser.add_argument("--bytes", type=int, default=100_000_000)
    options = parser.parse_args()
    (run_kill if options.what == "kill" else run_elastic)(options)


if __name__ == "__main__":
    main()
