"""`ringweave operator`: runs the TrainingJobs of a Kubernetes cluster."""

import asyncio
import logging
import os
import secrets
import socket
from typing import Any

import click

from ringweave.errors import LaunchError


@click.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NS",
    help="Manage only jobs of this namespace; repeatable. Default: all namespaces.",
)
@click.option("--image", metavar="IMAGE", help="Default container image of jobs. Default: jobs must name one.")
@click.option(
    "--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="Resource name of a GPU in this cluster."
)
@click.option("--run-as", type=click.IntRange(min=1), metavar="UID", help="User of workers. Default: the image's.")
@click.option(
    "--toleration",
    "tolerations",
    multiple=True,
    metavar="KEY[=VALUE][:EFFECT]",
    help="Tolerated taint of nodes, such as nvidia.com/gpu; repeatable.",
)
@click.option(
    "--node-selector",
    "node_selectors",
    multiple=True,
    metavar="KEY=VALUE",
    help="Label of the nodes of all Pods, such as nvidia.com/gpu.product=NVIDIA-H200; repeatable.",
)
@click.option(
    "--image-pull-secret",
    "image_pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret of each job's namespace with the credentials of a private registry; repeatable.",
)
@click.option(
    "--worker-cpu",
    metavar="CPUS",
    help="CPUs of each worker, request and limit. Default: CPU workers ask for 1.",
)
@click.option("--worker-memory", metavar="BYTES", help="Memory of each worker, request and limit, such as 16Gi.")
@click.option(
    "--desk",
    default="https://ringweave-operator.ringweave-system.svc:8443",
    metavar="URL",
    help="URL of the agent gateway for Pods. Default: the Service of deploy/.",
)
@click.option("--desk-port", type=int, default=8443, help="Port of the agent gateway. Default: 8443.")
@click.option(
    "--no-desk", is_flag=True, help="Run without the agent gateway: another process writes the status of Pods."
)
@click.option(
    "--lease-namespace",
    default="ringweave-system",
    metavar="NS",
    help="Namespace of the Lease for leader election. Default: ringweave-system.",
)
@click.option("--lease-s", type=float, default=15.0, help="Duration of the Lease in seconds.  [default: 15]")
@click.option(
    "--identity", metavar="NAME", help="Holder identity in the Lease. Default: host name and a random suffix."
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=8, help="Number of jobs reconciled at the same time. Default: 8."
)
@click.option(
    "--liveness", metavar="URL", help="Address of the liveness endpoint, such as http://0.0.0.0:8080/healthz."
)
@click.option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current one.")
@click.option("-v", "--verbose", is_flag=True, help="Log every action.")
def command(**given: Any) -> int:
    """Run the operator of TrainingJobs: create their Pods, release their start barriers, replace failed Pods.

    Needs the resource, roles and admission policies of deploy/base. SIGTERM ends it; a restarted operator continues
    with the jobs as they are.
    """
    try:
        from ringweave.platforms.kubernetes import operator
    except ModuleNotFoundError as error:
        do = "Install it with pip install 'ringweave[kubernetes]'"
        raise LaunchError("operator", got=f"no {error.name}", expected="aiohttp", do=do) from error
    logging.basicConfig(level=logging.INFO if given["verbose"] else logging.WARNING, format="%(asctime)s %(message)s")
    identity = str(given["identity"] or f"{socket.gethostname()}-{secrets.token_hex(4)}")
    settings = operator.operator_settings(given, identity=identity)
    connect = operator.connector(os.environ, given["context"])
    asyncio.run(operator.run_operator(connect, settings))
    return 0
