"""Workers of a bench in a lab: a script that `ringweave lab run` runs to its end, and the bytes on links meanwhile."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ringweave import lab, topology
from ringweave.lab import Lab
from ringweave.lab.lab import QuotaMode
from ringweave.topology import Cluster

_TWO_SITES = """\
name: two-sites
nodes:
  - {{name: a, switch: r0, nic: 1Gbit/s, devices: 1, count: {count}}}
  - {{name: b, switch: r1, nic: 1Gbit/s, devices: 1, count: {count}}}
switches:
  - {{name: r0, uplink: 10Mbit/s}}
  - {{name: r1, uplink: 10Mbit/s}}
latency: 100us
"""


def two_sites(nodes_per_site: int) -> Cluster:
    """Return the cluster of the benches of mode local: two sites, 10 Mbit/s between them."""
    return topology.loads(_TWO_SITES.format(count=nodes_per_site))


@contextmanager
def lab_of(cluster: Cluster, name: str, quotas: QuotaMode = "auto") -> Iterator[Lab]:
    """Yield a lab of the cluster, which is down afterwards."""
    place = lab.up(cluster, name, quotas=quotas)
    try:
        yield place
    finally:
        lab.down(place.name)


def run_workers(
    place: Lab,
    script: str | Path,
    own: Sequence[str],
    run_dir: Path,
    *,
    timeout_s: float,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """Run a script on all devices of a lab, and return its output.

    Args:
        place: The lab.
        script: What each worker runs.
        own: Arguments of the script.
        run_dir: Run directory.
        timeout_s: Time limit of the run.
        options: Further options of `ringweave lab run`.
        environ: Environment variables beside this process's.

    Raises:
        SystemExit: The run failed; its output is shown.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    verb = [sys.executable, "-m", "ringweave", "lab", "run", "--lab", place.name, "--run-dir", str(run_dir.absolute())]
    done = subprocess.run(
        [*verb, *options, str(script), *own],
        env={**os.environ, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise SystemExit(f"workers on {place.name}: exit code {done.returncode}, expected 0.\n{done.stdout}")
    return done.stdout


class LinkBytes:
    """Bytes that links have sent, by time: the counters of the lab's kernel, read now and then by a thread."""

    def __init__(self, place: Lab, counts: Callable[[str], bool], interval_s: float) -> None:
        """`counts` tells which links count, by name."""
        self._place, self._counts, self._interval_s = place, counts, interval_s
        self._samples: list[tuple[float, float]] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "LinkBytes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def sent_between(self, began: float, ended: float) -> float:
        """Return the bytes between two times (`time.time()`)."""
        times, counts = (list(each) for each in zip(*self._samples, strict=True))
        first, last = np.interp([began, ended], times, counts)
        return float(last - first)

    def _sample(self) -> None:
        while not self._has_ended.wait(self._interval_s):
            sent = self._place.bytes_on_links()
            self._samples.append((time.time(), sum(count for link, count in sent.items() if self._counts(link))))


@contextmanager
def extra_machine(found: Lab, address: str) -> Iterator[Callable[[Sequence[str]], list[str]]]:
    """Connect one more machine to a switch of a lab, with no part in its cluster; yield what makes commands there.

    Needs root.
    """
    space, switch = f"{found.name}-stranger", found.layout.switch_namespace
    try:
        for line in (
            f"netns add {space}",
            f"-n {switch} link add stranger type veth peer name eth0 netns {space}",
            f"-n {switch} link set stranger master {next(iter(found.layout.bridges.values()))} up",
            f"-n {space} link set eth0 up",
            f"-n {space} addr add {address}/16 dev eth0",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        yield lambda argv: ["ip", "netns", "exec", space, *argv]
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)
