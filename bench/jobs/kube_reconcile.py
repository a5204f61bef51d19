"""What one pass of the operator takes, with a thousand jobs of 16 nodes on the fake API server.

    python bench/jobs/kube_reconcile.py --jobs 1000 --nodes 16

Measured: a `Controller.reconcile` from its first read to its last answer, reads and writes over HTTP included, of jobs
one after another, so that no pass waits for another job's. The API server is a process of its own on the same machine;
Pods become ready, run and end between passes. The operator's own processor time is told beside it: on a busy machine
that is what can be compared.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringweave.jobs.life.observing import Phase
from ringweave.launch.groups.posts import Report
from ringweave.launch.kubernetes.api import connecting, kinds
from ringweave.launch.kubernetes.api.client import Client
from ringweave.launch.kubernetes.objects import seeing
from ringweave.launch.kubernetes.objects.pods import PodSettings
from ringweave.launch.kubernetes.operating.acting import Actor
from ringweave.launch.kubernetes.operating.admission import Admission
from ringweave.launch.kubernetes.operating.controller import Controller
from ringweave.launch.kubernetes.resource.definition import definition
from ringweave.testing.kubernetes.cluster import FakeCluster
from ringweave.testing.kubernetes.kubelet import PlayedKubelet


def main() -> None:
    """Lead the jobs to their ends, and say what the passes took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        context = multiprocessing.get_context("spawn")
        ready, over = context.Event(), context.Event()
        server = context.Process(target=_serve, args=(path, ready, over))
        server.start()
        ready.wait()
        try:
            passes = asyncio.run(_lead(path, given.jobs, given.nodes))
        finally:
            over.set()
            server.join()
    what = f"{given.jobs} jobs of {given.nodes} nodes, {len(passes)} passes"
    _show(f"{what}: time", [wall_s for wall_s, _ in passes])
    _show(f"{what}: processor time of the operator", [cpu_s for _, cpu_s in passes])


def _serve(path: Path, ready: Any, over: Any) -> None:
    with FakeCluster() as cluster:
        cluster.kubeconfig(path)
        ready.set()
        over.wait()


async def _lead(path: Path, num_jobs: int, num_nodes: int) -> list[tuple[float, float]]:
    environ = {"KUBECONFIG": str(path)}
    async with Client(lambda: connecting.connection(environ)) as client:
        await client.create(kinds.DEFINITIONS, None, definition())
        settings = PodSettings(image="example/train:1")
        actor, admission = Actor(client, settings, time.time), Admission(client, settings, time.time)
        controller = Controller(client, actor, admission, time.time)
        kubelet = PlayedKubelet(client, "default")
        names = [f"job-{index}" for index in range(num_jobs)]
        for name in names:
            await client.create(kinds.TRAINING_JOBS, "default", {"metadata": {"name": name}, "spec": _spec(num_nodes)})
        passes: list[tuple[float, float]] = []
        # All jobs take each step before any takes the next: a thousand jobs are there at the same time.
        for step in ("make", "ready", "run", "end", "tidy"):
            for name in names:
                if step in ("ready", "run"):
                    await kubelet.step(name)
                elif step == "end":
                    await _end(kubelet, name)
                await _settle(controller, name, passes)
        return passes


async def _settle(controller: Controller, name: str, passes: list[tuple[float, float]]) -> None:
    again = True
    while again:
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        again = (await controller.reconcile(("default", name))).again
        passes.append((time.perf_counter() - begun_s, time.process_time() - cpu_s))


async def _end(kubelet: PlayedKubelet, name: str) -> None:
    for pod in (await kubelet.pods(name)).values():
        report = Report(round=seeing.round_of(pod), phase=Phase.SUCCEEDED, pid=1, ended_s=time.time(), exit_code=0)
        await kubelet.end(pod, report)


def _spec(num_nodes: int) -> dict[str, Any]:
    nodes = [{"name": f"n{index}", "capacity": 8} for index in range(num_nodes)]
    requester = {"username": "admin", "groups": ["system:masters"]}
    return {"gpus": 8 * num_nodes, "script": "a.py", "source": "pass", "nodes": nodes, "requester": requester}


def _show(what: str, seconds: Sequence[float]) -> None:
    in_order = sorted(seconds)
    p50, p99 = (in_order[int(len(in_order) * share)] * 1e3 for share in (0.5, 0.99))
    print(f"measured: {what}: median {p50:.2f} ms, p99 {p99:.2f} ms, longest {in_order[-1] * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
