"""Data from other ranks: decoded with length limits, gathered over the store, waited for with a timeout."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from ringweave import errors
from ringweave.errors import DisagreementError, PeerError, ScheduleError
from ringweave.files import file_io

_POLL_S = 0.02
_ResultT = TypeVar("_ResultT")


class BackgroundCall(Future[_ResultT]):
    """A call that may block for ever, in a daemon thread that is abandoned when the wait for it ends.

    torch waits for a silent store without end, and a wait in Gloo's constructor cannot be interrupted.
    """

    def __init__(self, call: Callable[[], _ResultT], name: str) -> None:
        """Start the call at once, in a thread of that name."""
        super().__init__()
        threading.Thread(target=self._run, args=(self, call), name=name, daemon=True).start()

    @staticmethod
    def _run(future: Future[_ResultT], call: Callable[[], _ResultT]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # the waiting thread raises it
            future.set_exception(error)
            del future  # else the error would refer to itself through the traceback

    def wait_result(self, timeout_s: float, is_cancelled: Callable[[], bool]) -> _ResultT:
        """Return the call's result.

        Args:
            timeout_s: Limit; infinite where the call has a limit of its own.
            is_cancelled: Whether the caller has stopped waiting.

        Raises:
            Exception: The call's own exception.
            TimeoutError: The call did not return within `timeout_s`, or was cancelled.
        """
        deadline_s, is_last = time.monotonic() + timeout_s, False
        while not is_last:
            is_last = is_cancelled() or time.monotonic() > deadline_s
            if futures.wait([self], _POLL_S).done:
                return self.result()
        raise TimeoutError(f"no answer within {timeout_s:g} s, or it was given up")


def run_at_once(actions: Sequence[Callable[[], object]]) -> None:
    """Run blocking actions at the same time, the first one in this thread; return when all have ended."""
    calls = [BackgroundCall(each, "ringweave at once") for each in actions[1:]]
    for action in actions[:1]:
        action()
    for call in calls:
        call.result()


MAX_PEER_BYTES = file_io.MAX_JSON_BYTES
"""Limit on data from a rank, where no smaller one is known."""
_FIX = "Run the same ringweave on all ranks, and keep others out of the store"

_DecodedT = TypeVar("_DecodedT")


def decode_peer_data(
    value: bytes,
    description: str,
    convert: Callable[[Any], _DecodedT],
    *,
    expected: str,
    max_bytes: int = MAX_PEER_BYTES,
    where: str = "",
) -> _DecodedT:
    """Convert a JSON value from another rank; the data is not trusted.

    Args:
        value: The received bytes.
        description: Name of the value, for the error.
        convert: Converts the parsed value; may raise any lookup, type or value error.
        expected: Completes "expected ..." in the error.
        max_bytes: Largest size.
        where: Place, for the error.

    Raises:
        DisagreementError: It is too long, or not as expected.
    """
    check_length(len(value), description, max_bytes=max_bytes, where=where)
    try:
        return convert(file_io.parse_json(value, max_bytes))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, ScheduleError) as cause:
        raise DisagreementError(description, got=value, expected=expected, do=_FIX, where=where) from cause


def require_object(value: Any) -> dict[str, Any]:
    """Return `value` if it is a JSON object; a `convert` for `decode_peer_data`."""
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value


def check_length(
    num_bytes: int, description: str, *, min_bytes: int = 0, max_bytes: int = MAX_PEER_BYTES, where: str = ""
) -> None:
    """Refuse a length outside of the limits, before memory is allocated for it.

    Raises:
        DisagreementError: The length is outside.
    """
    if not min_bytes <= num_bytes <= max_bytes:
        got, expected = f"{num_bytes} bytes", f"{min_bytes} to {max_bytes} bytes"
        raise DisagreementError(description, got=got, expected=expected, do=_FIX, where=where)


GATHER_TIMEOUT = timedelta(seconds=120)
"""Hosts of a job start at different times; a minute apart is usual where images are pulled."""
MAX_TEXT_BYTES = 2**20


def connect_store(environ: Mapping[str, str]) -> tuple[Store, int, int]:
    """Return the store of all ranks, this rank and the world size.

    The store may be in rank 0's process: the last operation on it has to be `exchange_texts`, after which all may exit.

    `environ`: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as any launcher sets them.

    Raises:
        PeerError: Rank 0 did not come within `GATHER_TIMEOUT`.
    """
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=GATHER_TIMEOUT)))
    except RuntimeError as cause:
        raise PeerError(_absence_text("rank 0", world_size, GATHER_TIMEOUT, rank)) from cause
    return store, rank, world_size


def exchange_texts(store: Store, text: str, rank: int, world_size: int, timeout: timedelta) -> list[str] | None:
    """Return the texts of all ranks in order on rank 0; None on the others, once rank 0 has them all.

    Raises:
        PeerError: Some ranks did not come within `timeout`; the text names them.
        DisagreementError: A received text is too long, or no text.
    """
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise errors.CommunicationError(
            "text for the other ranks",
            got=f"{len(text.encode())} bytes",
            expected=f"at most {MAX_TEXT_BYTES}",
            do="Report this: no machine should take as much",
            where=f"rank {rank}",
        )
    texts = [f"discover/text/{each}" for each in range(world_size)]
    store.set(texts[rank], text)
    if rank != 0:
        _wait_for_keys(store, ["discover/done"], timeout, rank, world_size)
        store.set(f"discover/left/{rank}", "1")
        store.check(["discover/done"])  # answered after `set`, which has no answer: an exit may leave it in a tunnel
        return None
    _wait_for_keys(store, texts, timeout, rank, world_size)
    found = [_decode_text(value, each) for each, value in enumerate(store.multi_get(texts))]
    store.set("discover/done", "1")
    # This process may host the store, so it stays until the others have left.
    _wait_for_keys(store, [f"discover/left/{each}" for each in range(1, world_size)], timeout, rank, world_size)
    return found


def _decode_text(value: bytes, rank: int) -> str:
    description, where = "text of another rank", f"rank {rank}"
    check_length(len(value), description, max_bytes=MAX_TEXT_BYTES, where=where)
    try:
        return value.decode()
    except UnicodeDecodeError as cause:
        do = "Run the same ringweave on all ranks"
        raise DisagreementError(description, got=value, expected="UTF-8", do=do, where=where) from cause


def _wait_for_keys(store: Store, keys: list[str], timeout: timedelta, rank: int, world_size: int) -> None:
    try:
        if keys:
            store.wait(keys, timeout)
    except RuntimeError as cause:
        absent = [
            key.rpartition("/")[2] for key in keys if key.rpartition("/")[2].isdecimal() and not store.check([key])
        ]
        absent_text = f"rank {', '.join(absent[:8])}" if absent else "rank 0"
        raise PeerError(_absence_text(absent_text, world_size, timeout, rank)) from cause


def _absence_text(absent_text: str, world_size: int, timeout: timedelta, rank: int) -> str:
    return errors.explain(
        "discovery by all workers",
        got=f"{absent_text} did not come within {timeout.total_seconds():g} s",
        expected=f"all of {world_size} ranks",
        do="Look into the log of that rank",
        where=f"rank {rank}",
    )
