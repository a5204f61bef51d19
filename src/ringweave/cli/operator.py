"""`ringweave operator`: runs the TrainingJobs of a Kubernetes cluster."""

import asyncio
import logging
import os
import secrets
import socket
from typing import Any

import click

from ringweave.errors import LaunchError, explain


@click.command()
@click.option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NS",
    help="Lead the jobs of this namespace only; may be given several times. Default: those of all.",
)
@click.option("--image", metavar="IMAGE", help="Container image of jobs that name none. Default: they must name one.")
@click.option("--gpu-resource", default="nvidia.com/gpu", metavar="NAME", help="What a GPU is called in this cluster.")
@click.option("--run-as", type=click.IntRange(min=1), metavar="UID", help="User of workers. Default: the image's.")
@click.option(
    "--toleration",
    "tolerations",
    multiple=True,
    metavar="KEY[=VALUE][:EFFECT]",
    help="Taint of nodes that workers may be on all the same, such as nvidia.com/gpu; may be given several times.",
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
    help="Where Pods reach this operator. Default: the Service of deploy/.",
)
@click.option("--desk-port", type=int, default=8443, help="Port to listen at for them. Default: 8443.")
@click.option(
    "--no-desk", is_flag=True, help="Listen for no Pods: somebody else writes what they do into their status."
)
@click.option(
    "--lease-namespace",
    default="ringweave-system",
    metavar="NS",
    help="Where the Lease is by which one operator leads. Default: ringweave-system.",
)
@click.option("--lease-s", type=float, default=15.0, help="Seconds after which another may lead.  [default: 15]")
@click.option("--identity", metavar="NAME", help="Who this operator is in the Lease. Default: made of the host name.")
@click.option("--workers", type=click.IntRange(1, 64), default=8, help="Jobs to look at at the same time. Default: 8.")
@click.option("--liveness", metavar="URL", help="Where to say that it lives, such as http://0.0.0.0:8080/healthz.")
@click.option("--context", metavar="NAME", help="Context of the kubeconfig. Default: its current one.")
@click.option("-v", "--verbose", is_flag=True, help="Say what it does.")
def command(**given: Any) -> int:
    """Lead the TrainingJobs of a Kubernetes cluster: make their Pods, open their gates, replace what fails.

    Needs what deploy/base holds: the resource, roles and admission policies. Ends by SIGTERM, and goes on where it was
    when it is started again.
    """
    try:
        from ringweave.platforms.kubernetes import operator
    except ModuleNotFoundError as error:
        do = "Install it with pip install 'ringweave[kubernetes]'"
        raise LaunchError(explain("operator", got=f"no {error.name}", expected="kopf", do=do)) from error
    logging.basicConfig(level=logging.INFO if given["verbose"] else logging.WARNING, format="%(asctime)s %(message)s")
    operator.quiet_kopf()
    identity = str(given["identity"] or f"{socket.gethostname()}-{secrets.token_hex(4)}")
    settings = operator.operator_settings(given, identity=identity)
    connect = operator.connector(os.environ, given["context"])
    asyncio.run(operator.run_operator(connect, settings, on_shutdown=operator.kill_process_later))
    return 0
