"""Seconds until ringweave and Gloo have started on this machine, interleaved in one run; every sum is checked.

    python bench/start_up.py --ranks 2,4,16 --rounds 9

A round starts the ranks anew with each system, in turns of changing order. All ranks import torch, wait for each other,
and then run `init_process_group`, an allreduce of 1 kB and one of 25 MB. `init_s`, `small_s` and `large_s` are the
seconds from that moment until each of the three has returned on the slowest rank. `run_s` is the time from the start of
the processes, with the import of torch, to the end of the allreduce of 1 kB. Prints one JSON document.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

SYSTEMS = ("gloo", "ringweave")
MOMENTS = ("init_s", "small_s", "large_s", "run_s")


def run_rank(folder: Path, backend: str) -> None:
    """Start one rank, and write its times."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"ready-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.002)
    started_s = time.time()
    dist.init_process_group(backend)
    moments = [time.time() - started_s]
    for num_elements in (256, 6_250_000):
        tensor = torch.full((num_elements,), rank + 1.0)
        dist.all_reduce(tensor)
        moments.append(time.time() - started_s)
        if not (tensor == size * (size + 1) / 2).all():
            raise AssertionError(f"{backend}: wrong sum on rank {rank}")
    moments.append(started_s + moments[1] - float(os.environ["START_UP_AT_S"]))
    (folder / f"times-{rank}.json").write_text(json.dumps(moments))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def time_start(num_ranks: int, backend: str, folder: Path) -> dict[str, float]:
    """Return the seconds of the slowest rank at each moment."""
    folder.mkdir(parents=True)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    common |= {"START_UP_AT_S": str(time.time()), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", backend, "--folder", str(folder)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    while not all((folder / f"ready-{rank}").exists() for rank in range(num_ranks)):
        if any(process.poll() for process in processes):
            raise SystemExit(f"a rank of {backend} failed")
        time.sleep(0.01)
    time.sleep(0.2)  # all ranks are between two looks at the folder
    (folder / "go").touch()
    if sum(process.wait() != 0 for process in processes):
        raise SystemExit(f"a rank of {backend} failed")
    rows = [json.loads((folder / f"times-{rank}.json").read_text()) for rank in range(num_ranks)]
    return {name: max(row[index] for row in rows) for index, name in enumerate(MOMENTS)}


def measure(num_ranks: int, rounds: int, folder: Path) -> dict[str, object]:
    """Return the medians of both systems, and how they compare round by round."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for number in range(rounds):
        for name in SYSTEMS if number % 2 else reversed(SYSTEMS):
            times[name].append(time_start(num_ranks, name, folder / f"{num_ranks}-{number}-{name}"))
    row: dict[str, object] = {"ranks": num_ranks, "rounds": rounds}
    for moment in MOMENTS:
        own, gloo = ([each[moment] for each in times[name]] for name in ("ringweave", "gloo"))
        pairs = list(zip(own, gloo, strict=True))
        row[moment] = {
            "ringweave": round(statistics.median(own), 3),
            "gloo": round(statistics.median(gloo), 3),
            "more_s": round(statistics.median(a - b for a, b in pairs), 3),
            "times_gloo": round(statistics.median(a / b for a, b in pairs), 2),
        }
    return row


def main() -> None:
    """Interleaves both systems, or is one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,16", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=9, help="of each system, alternating")
    parser.add_argument("--folder", type=Path, help="empty folder for times (default: a temporary one)")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.folder, options.rank_of)
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(int(each), options.rounds, options.folder or Path(folder)) for each in options.ranks.split(",")]
    print(json.dumps({"kind": "measured", "rows": rows}))


if __name__ == "__main__":
    main()
