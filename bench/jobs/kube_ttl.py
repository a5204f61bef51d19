"""Lateness of the Kubernetes operator at the end of a TTL, on the fake API server.

    PYTHONPATH=. python bench/jobs/kube_ttl.py [--jobs 20] [--together 5] [--out FILE]

`ringweave operator` as a process of its own; the Pods are played. Measured with one clock, from the moment at which a
job's outcome was decided, as its record says, to the moment at which a watch tells that the job is gone, with
everything that it had: Pods that were kept, ConfigMaps, Secrets, its Service. A TTL may be late, and never early.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from ringweave.platforms.kubernetes import api_client, job_resource, objects
from ringweave.platforms.kubernetes.api_client import KubernetesClient
from tests.fakes.kubernetes.fake_cluster import FakeCluster
from tests.fakes.kubernetes.operator_process import OperatorProcess
from tests.fakes.kubernetes.simulated_kubelet import SimulatedKubelet
from tools.kubernetes_crd import custom_resource_definition

TTL_S = 2.0
WHERE = "default"
OF_JOBS = (api_client.PODS, api_client.CONFIG_MAPS, api_client.SECRETS, api_client.SERVICES)


async def lateness_s(client: KubernetesClient, name: str) -> float:
    """Leads one job to its end; how long after its TTL it was gone."""
    nodes = [{"name": f"n{index}", "capacity": 3, "deletionPolicy": "keep"} for index in range(2)]
    requester = {"username": "admin", "groups": ["system:masters"]}
    spec = {"cpuWorkers": 6, "script": "a.py", "source": "pass", "nodes": nodes, "requester": requester}
    spec["ttlSecondsAfterFinished"] = TTL_S
    made = await client.create(api_client.TRAINING_JOBS, WHERE, {"metadata": {"name": name}, "spec": spec})
    watching = asyncio.create_task(_gone(client, name, made["metadata"]["resourceVersion"]))
    kubelet = SimulatedKubelet(client, WHERE)
    while not watching.done():
        pods = await kubelet.advance_pods(name)
        found = await client.list(api_client.TRAINING_JOBS, WHERE, fieldSelector=f"metadata.name={name}")
        if found and found[0].get("status", {}).get("state") == "Running":
            for pod in pods.values():
                await kubelet.succeed_pod(pod)
        await asyncio.sleep(0.05)
    late_s = await watching
    left = [
        item for kind in OF_JOBS for item in await client.list(kind, WHERE, labelSelector=f"{objects.JOB_LABEL}={name}")
    ]
    if left:
        raise SystemExit(f"{name} is gone, and has left {[item['metadata']['name'] for item in left]}")
    return late_s


async def _gone(client: KubernetesClient, name: str, version: str) -> float:
    selected = {"watch": "true", "resourceVersion": version, "fieldSelector": f"metadata.name={name}"}
    async for line in client.stream_lines(api_client.TRAINING_JOBS.path(WHERE), selected):
        gone_s = time.time()
        event = json.loads(line)
        if event["type"] == "DELETED":
            job = job_resource.job_from_resource(event["object"])
            if job is None or job.record.ended_s is None:
                raise SystemExit(f"{name} was removed before it had ended")
            return gone_s - (job.record.ended_s + TTL_S)
    raise SystemExit("the watch ended")


async def measure(environ: dict[str, str], count: int, together: int) -> list[float]:
    """So many jobs, some at the same time."""
    async with KubernetesClient(lambda: api_client.connection_info(environ)) as client:
        found: list[float] = []
        for first in range(0, count, together):
            batch = (lateness_s(client, f"job-{index}") for index in range(first, min(first + together, count)))
            found += await asyncio.gather(*batch)
            print(f"{len(found)} of {count} jobs", flush=True)
        return found


async def define(environ: dict[str, str]) -> None:
    """Before the operator begins to watch."""
    async with KubernetesClient(lambda: api_client.connection_info(environ)) as client:
        await client.create(api_client.DEFINITIONS, None, custom_resource_definition())


def main() -> None:
    """Run the jobs, and print the lateness of their TTLs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--together", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    asked = parser.parse_args()
    arguments = ["--lease-namespace", WHERE, "--no-desk", "--image", "example/train:1"]
    with tempfile.TemporaryDirectory() as folder, FakeCluster() as cluster:
        path = cluster.kubeconfig(Path(folder) / "config")
        environ = {"KUBECONFIG": str(path)}
        asyncio.run(define(environ))
        with OperatorProcess(path, arguments, Path(folder) / "log") as operator:
            late_s = sorted(asyncio.run(measure(environ, asked.jobs, asked.together)))
            operator.stop()
    load = os.getloadavg()[0]
    print(
        f"measured: {len(late_s)} jobs, TTL {TTL_S:g} s: gone {late_s[0]:.3f} to {late_s[-1]:.3f} s after it, median "
        f"{statistics.median(late_s):.3f} s (wanted: never early, less than 1 s late); load of the machine {load:.1f}"
    )
    if asked.out:
        said = {"kind": "measured", "machine": platform.platform(), "load": load, "ttl_s": TTL_S, "late_s": late_s}
        asked.out.write_text(json.dumps(said, indent=2) + "\n")
    if not 0 <= late_s[0] <= late_s[-1] < 1:
        raise SystemExit("missed")


if __name__ == "__main__":
    main()
