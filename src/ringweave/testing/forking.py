"""Processes that begin with everything loaded, forked from one server: loading torch takes longer than most tests."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = [
    "torch._dynamo",  # which DDP and every optimizer load at their first use
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "ringweave.comm.backend",
    "ringweave.params.ring.optimizer",
    "ringweave.pipeline",
    "ringweave.training",
    "ringweave.training.elastic.preparing",
    "ringweave.testing.elastic",
    "ringweave.testing.kubernetes.crashing",  # where kopf is installed
    "ringweave.testing.ranks",
]
"""One list for all, since a process has one fork server, which loads what the first to ask has named. None of them
starts a thread or opens a file: what a fork would take over is code."""


def context() -> ForkServerContext:
    """Starts processes from the server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found
