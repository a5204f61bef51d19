"""Transfer of GPU tensors through host memory while a train step runs: two pinned buffers, however large the tensors.

A thread copies a chunk into one buffer while the other one is on its way. The copies have a stream of their own, which
first waits for what the script's stream had done when the transfer was made. Messages follow each other in the order of
tensors, so that a rank needs one transfer for all that it sends, and one for all that it receives.
"""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 8 * 2**20
"""Bytes of a buffer; a copy over PCIe takes a millisecond, long beside its start."""


def pinned_bytes(num_bytes: int) -> Tensor:
    """Allocate pinned host memory, uint8 [num_bytes]."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def bytes_on_device(tensor: Tensor) -> Tensor:
    """Bytes of a tensor where it is, uint8 [bytes]; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class StagedTransfer:
    """Sends or receives tensors in a thread; `wait` returns when all have left or arrived."""

    def __init__(
        self,
        items: Sequence[tuple[Tensor, int]],
        device: torch.device,
        exchange: Callable[[Tensor, int], dist.Work | None],
        *,
        is_sending: bool,
        chunk_bytes: int = CHUNK_BYTES,
        allocate: Callable[[int], Tensor] = pinned_bytes,
    ) -> None:
        """Start the transfer.

        Args:
            items: Bytes (uint8, of any device) and the peer to which they go or from which they come.
            device: The GPU.
            exchange: Starts to send or receive bytes in host memory: `isend` or `irecv`.
            is_sending: True to send.
            chunk_bytes: Bytes of each of the two buffers, at most.
            allocate: Allocates a buffer.
        """
        self._items, self._device, self._exchange, self._chunk_bytes = items, device, exchange, chunk_bytes
        self._error: BaseException | None = None
        self._ready = torch.cuda.current_stream(device).record_event()
        largest = max((raw.numel() for raw, _ in items), default=0)
        self._buffers = [allocate(min(largest, chunk_bytes)) for _ in range(2)] if items else []
        self._thread = threading.Thread(target=self._run, args=(self._send if is_sending else self._receive,))
        self._thread.start()

    def wait(self) -> None:
        """Wait until all tensors have left or arrived.

        Raises:
            RuntimeError: A peer has gone, or the GPU refused.
        """
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(f"transfer of blocks: {self._error}") from self._error

    def _run(self, transfer: Callable[[torch.cuda.Stream], None]) -> None:
        try:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
            stream.wait_event(self._ready)
            with torch.cuda.stream(stream):
                transfer(stream)
        except Exception as error:
            self._error = error

    def _chunks(self) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Yield (index of the buffer, its part, the tensor's part, peer) for each message."""
        place = 0
        for raw, peer in self._items:
            for first in range(0, raw.numel(), self._chunk_bytes):
                part = raw[first : first + self._chunk_bytes]
                yield place, self._buffers[place][: part.numel()], part, peer
                place = 1 - place

    def _send(self, stream: torch.cuda.Stream) -> None:
        under_way: list[dist.Work | None] = [None, None]
        for place, buffer, part, peer in self._chunks():
            _wait_work(under_way[place])
            buffer.copy_(part, non_blocking=True)
            stream.synchronize()
            under_way[place] = self._exchange(buffer, peer)
        for work in under_way:
            _wait_work(work)

    def _receive(self, stream: torch.cuda.Stream) -> None:
        copied: list[torch.Event | None] = [None, None]
        arriving: tuple[dist.Work | None, int, Tensor, Tensor] | None = None
        for place, buffer, part, peer in self._chunks():
            event = copied[place]
            if event is not None:
                event.synchronize()
            work = self._exchange(buffer, peer)
            self._put(arriving, copied, stream)
            arriving = work, place, buffer, part
        self._put(arriving, copied, stream)
        stream.synchronize()

    @staticmethod
    def _put(
        arriving: tuple[dist.Work | None, int, Tensor, Tensor] | None,
        copied: list[torch.Event | None],
        stream: torch.cuda.Stream,
    ) -> None:
        """Copy the message before the newest one to the GPU, once it has arrived."""
        if arriving is not None:
            work, place, buffer, part = arriving
            _wait_work(work)
            part.copy_(buffer, non_blocking=True)
            copied[place] = stream.record_event()


def _wait_work(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
