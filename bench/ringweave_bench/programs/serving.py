"""Loop of every benchmark worker: receive requests, run rounds of a collective, check every value.

The programs of this folder run by path, in interpreters that need not have ringweave: only numpy and the system under
test are imported. Requests come over a Unix socket, which no limited link carries. While another system is measured a
worker waits in the kernel and takes no CPU time.
"""

import argparse
import json
import mmap
import os
import queue
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PERIOD = 251
"""Period of the inputs in elements: a prime, so that no chunk border is a multiple of it."""
CONTROLLER_GONE = 3
"""Exit code of a worker whose controller went away."""


class Collectives(Protocol):
    """A system under test, as one rank sees it."""

    rank: int
    world_size: int
    in_place: bool
    """The result replaces the input."""
    version: str

    def wrap(self, array: np.ndarray) -> Any:
        """Return the array as the system takes it, without a copy."""
        ...

    def barrier(self) -> None: ...

    def allreduce(self, source: Any, result: Any) -> None:
        """Sum over all ranks into `result`, which is `source` if the system works in place."""
        ...

    def reduce_scatter(self, source: Any, result: Any) -> None:
        """Sum over all ranks, and write this rank's block to `result`."""
        ...

    def allgather(self, source: Any, result: Any) -> None:
        """Write each rank's block to `result`."""
        ...

    def broadcast(self, source: Any, result: Any) -> None:
        """Overwrite `source`, which is `result`, with that of rank 0."""
        ...

    def schedules(self) -> dict[str, int]:
        """Return schedule -> number of collectives so far; empty if the system does not report it."""
        ...

    def close(self) -> None:
        """Leave the group, together with all ranks."""
        ...


class RankInputs:
    """Whole numbers that every rank can compute for every other, so that the sum is known exactly.

    Element i of rank r in call k of round q is a(r, q) (i mod 251) + b(r, q, k). All sums stay below 2**24 for less
    than 19,000 ranks, so float32 holds them exactly in any order of addition.
    """

    def __init__(self, num_elements: int, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._pattern = (np.arange(num_elements) % PERIOD).astype(np.float32)
        self._scratch = np.empty_like(self._pattern)

    def fill(self, array: np.ndarray, round_index: int, call: int) -> None:
        """Write this rank's input: the first elements, as many as there are."""
        self._combine(array, [_coefficients(self._rank, round_index, call)])

    def first_wrong(self, kind: str, array: np.ndarray, round_index: int, call: int) -> dict[str, float] | None:
        """Return the first element that is not the result of the collective; None if all are right."""
        pairs = [_coefficients(rank, round_index, call) for rank in range(self._world_size)]
        expected, block = self._scratch, len(self._scratch) // self._world_size
        if kind == "allgather":
            for rank, pair in enumerate(pairs):
                self._combine(expected[rank * block : (rank + 1) * block], [pair])
        else:
            self._combine(expected, pairs[:1] if kind == "broadcast" else pairs)
        if kind == "reduce-scatter":
            expected = expected[self._rank * block : (self._rank + 1) * block]
        if np.array_equal(array, expected):
            return None
        wrong = np.flatnonzero(array != expected)  # NaN is unequal to itself
        at = int(wrong[0])
        values = {"got": float(array[at]), "expected": float(expected[at])}
        return {"element": at, **values, "num_wrong": len(wrong), "call": call}

    def _combine(self, array: np.ndarray, pairs: Sequence[tuple[int, int]]) -> None:
        """Write the sum of the inputs with these factors and offsets."""
        factor, offset = sum(factor for factor, _ in pairs), sum(offset for _, offset in pairs)
        np.multiply(self._pattern[: len(array)], np.float32(factor), out=array)
        array += np.float32(offset)


def _coefficients(rank: int, round_index: int, call: int) -> tuple[int, int]:
    return 1 + (rank + round_index) % 3, (7 * rank + 13 * round_index + 29 * call) % 101


def allocate(num_bytes: int) -> np.ndarray:
    """Allocate a message of float32 in the kind of memory that torch gives to gradients.

    Numpy asks the kernel for huge pages, torch does not: with numpy's own memory all systems could be faster than they
    are in training.
    """
    return np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32)


class MessageBuffers:
    """The buffers of one collective and message size: one pair for each call of a round."""

    def __init__(self, system: Collectives, kind: str, num_bytes: int, num_calls: int) -> None:
        """`num_bytes` is the size of the whole message: that of the blocks of all ranks."""
        self._system, self._kind = system, kind
        self._inputs = RankInputs(num_bytes // 4, system.rank, system.world_size)
        block_bytes = num_bytes // system.world_size
        self._in_place = kind == "broadcast" or (kind == "allreduce" and system.in_place)
        source_bytes = block_bytes if kind == "allgather" else num_bytes
        result_bytes = block_bytes if kind == "reduce-scatter" else num_bytes
        self._sources = [allocate(source_bytes) for _ in range(num_calls)]
        self._results = self._sources if self._in_place else [allocate(result_bytes) for _ in self._sources]
        self._pairs = [(system.wrap(a), system.wrap(b)) for a, b in zip(self._sources, self._results, strict=True)]

    def fill(self, round_index: int) -> None:
        """Write the inputs of a round, and overwrite the results of the one before."""
        for call, array in enumerate(self._sources):
            self._inputs.fill(array, round_index, call)
        for array in self._results if not self._in_place else ():
            array.fill(-1)

    def run(self) -> tuple[float, float]:
        """Return the seconds of one collective on this rank and its processor seconds, averages over the round's calls.

        The processor seconds are those of all threads of the process, in the kernel too.
        """
        collective = getattr(self._system, self._kind.replace("-", "_"))
        self._system.barrier()
        started_s, used_s = time.perf_counter(), time.process_time()
        for source, result in self._pairs:
            collective(source, result)
        seconds, processor_s = time.perf_counter() - started_s, time.process_time() - used_s
        return seconds / len(self._pairs), processor_s / len(self._pairs)

    def first_wrong(self, round_index: int) -> dict[str, float] | None:
        """Return the first wrong element of the round."""
        for call, array in enumerate(self._results):
            found = self._inputs.first_wrong(self._kind, array, round_index, call)
            if found is not None:
                return found
        return None


class ControlChannel:
    """The worker's end of the control channel: one JSON document a line."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def send_document(self, **document: object) -> None:
        self._socket.sendall(json.dumps(document).encode() + b"\n")

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yield the controller's requests."""
        while True:
            yield self._orders.get()

    def _read(self) -> None:
        """Read requests in a thread: without its controller a worker ends at once, even inside a collective."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._orders.put(json.loads(line))
        finally:  # also after a reset connection: it was killed with an answer of ours unread
            os._exit(CONTROLLER_GONE)


def serve(channel: ControlChannel, session: str, system: Collectives) -> None:
    """Serve requests until told to stop."""
    network = Path("/proc/self/ns/net").stat().st_ino
    hello = {"session": session, "rank": system.rank, "world_size": system.world_size, "version": system.version}
    channel.send_document(**hello, pid=os.getpid(), network=network)
    messages: MessageBuffers | None = None
    for order in channel.orders():
        match order["do"]:
            case "prepare":
                messages = None  # frees the buffers of the last size first
                messages = MessageBuffers(system, order["collective"], order["bytes"], order["calls"])
                channel.send_document(ready=True)
            case "fill" if messages is not None:
                messages.fill(order["round"])
                channel.send_document(ready=True)
            case "run" if messages is not None:
                seconds, processor_s = messages.run()
                channel.send_document(seconds=seconds, processor_s=processor_s)
            case "check" if messages is not None:
                channel.send_document(wrong=messages.first_wrong(order["round"]), schedules=system.schedules())
            case "stop":
                system.close()
                channel.send_document(stopped=True)
                return
            case _:
                raise ValueError(f"order: {order!r}, expected prepare, fill, run, check or stop")


def main(make: Any, argv: Sequence[str]) -> None:
    """Run a worker: `make()` joins the group and returns the system."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", required=True, help="path of the controller's socket")
    parser.add_argument("--session", required=True, help="what the worker calls itself to the controller")
    options = parser.parse_args(argv)
    channel = ControlChannel(options.control)
    try:
        serve(channel, options.session, make())
        os._exit(0)  # tearing an interpreter with PyTorch down takes seconds where CPUs are few
    except BaseException as error:
        traceback.print_exc()
        channel.send_document(session=options.session, error=f"{type(error).__name__}: {error}")
        os._exit(1)
