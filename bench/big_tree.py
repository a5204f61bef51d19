"""Write the cluster file of a large tree of unequal racks, and say what `ringweave plan` takes on it.

    python bench/big_tree.py --racks 100 --nodes 10000 big.yaml
    python bench/big_tree.py --racks 100 --nodes 10000 --measure big.yaml
    python bench/big_tree.py --racks 100 --nodes 10000 --equal-racks --measure big.yaml

Racks differ in size, in the rate of their NICs and of their uplinks; the seed makes them the same every time. Equal
racks have as many nodes each, NICs of 25, 50 or 100 Gbit/s, and uplinks of 400 to 1600 Gbit/s.
"""

import argparse
import random
import resource
import subprocess
import sys
import time
from pathlib import Path


def text(num_racks: int, num_nodes: int, seed: int) -> str:
    """A cluster file of `num_nodes` nodes in `num_racks` racks, no two of them alike."""
    random_ = random.Random(seed)
    weights = [random_.uniform(0.5, 1.5) for _ in range(num_racks)]
    sizes = [max(1, int(weight / sum(weights) * num_nodes)) for weight in weights]
    for rack in range(num_nodes - sum(sizes)):
        sizes[rack % num_racks] += 1
    lines = [f"name: racks-{num_racks}", "nodes:"]
    switches = ["switches:"]
    for rack, size in enumerate(sizes):
        nic = random_.choice([25, 50, 100, 200])
        uplink = max(nic, round(size * nic / random_.uniform(1, 8)))
        lines.append(f"  - {{name: n{rack}, switch: r{rack}, nic: {nic}Gbit/s, devices: 1, count: {size}}}")
        switches.append(f"  - {{name: r{rack}, uplink: {uplink}Gbit/s}}")
    return "\n".join([*lines, *switches, "latency: 10us", ""])


def equal_racks_text(num_racks: int, num_nodes: int, seed: int) -> str:
    """A cluster file of racks with as many nodes each, and unequal rates."""
    random_ = random.Random(seed)
    lines, switches = [f"name: equal-racks-{num_racks}", "nodes:"], ["switches:"]
    for rack in range(num_racks):
        nic, count = random_.choice([25, 50, 100]), num_nodes // num_racks
        lines.append(f"  - {{name: n{rack}, switch: r{rack}, nic: {nic}Gbit/s, devices: 1, count: {count}}}")
        switches.append(f"  - {{name: r{rack}, uplink: {random_.randrange(400, 1601, 100)}Gbit/s}}")
    return "\n".join([*lines, *switches, "latency: 10us", ""])


def main() -> None:
    """Write the file, and measure if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--racks", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--equal-racks", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    make = equal_racks_text if options.equal_racks else text
    options.path.write_text(make(options.racks, options.nodes, options.seed))
    if options.measure:
        begun_s = time.monotonic()
        command = [sys.executable, "-m", "ringweave", "plan", str(options.path), "--bytes", "100MB"]
        subprocess.run(command, check=True)
        wall_s = time.monotonic() - begun_s
        peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        print(f"measured: {wall_s:.1f} s, {peak_bytes / 2**30:.2f} GiB at most")


if __name__ == "__main__":
    main()
