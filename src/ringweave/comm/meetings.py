"""All workers of a job meet and one of them gets what each has to say: texts of bounded length, over torch's store.

For what is told once, before any process group: what each host is. Under torchrun the store is the agent's, elsewhere
rank 0 holds it at MASTER_ADDR:MASTER_PORT, as `init_process_group` would.
"""

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from ringweave import errors
from ringweave.comm import hearing
from ringweave.errors import DisagreementError, PeerError

TIMEOUT = timedelta(seconds=120)
"""Hosts of a job start at different times; a minute apart is usual where images are pulled."""
MAX_BYTES = 2**20


def gather(text: str, environ: Mapping[str, str], timeout: timedelta = TIMEOUT) -> list[str] | None:
    """The texts of all ranks in their order, on rank 0; None on the others, once rank 0 has them all.

    Args:
        text: What this rank says.
        environ: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as any launcher sets them.
        timeout: How long to wait for the others.

    Raises:
        PeerError: Some ranks did not come in time; the text names them.
        DisagreementError: What one of them said is too long, or no text.
    """
    store, rank, world_size = meet(environ, timeout)
    return exchange(store, text, rank, world_size, timeout)


def meet(environ: Mapping[str, str], timeout: timedelta = TIMEOUT) -> tuple[Store, int, int]:
    """The store of all ranks, this rank, and how many there are; arguments as of `gather`.

    The store may be rank 0's process: what is last done over it has to be an `exchange`, after which all may leave.

    Raises:
        PeerError: Rank 0 did not come in time.
    """
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    try:
        store, _, _ = next(iter(rendezvous("env://", rank, world_size, timeout=timeout)))
    except RuntimeError as cause:
        raise PeerError(_absence("rank 0", world_size, timeout, rank)) from cause
    return store, rank, world_size


def exchange(store: Store, text: str, rank: int, world_size: int, timeout: timedelta) -> list[str] | None:
    """`gather` over a store that is there.

    Raises:
        PeerError: As `gather`, and so DisagreementError.
    """
    if len(text.encode()) > MAX_BYTES:
        raise errors.CommunicationError(
            errors.explain(
                "text for the other ranks",
                got=f"{len(text.encode())} bytes",
                expected=f"at most {MAX_BYTES}",
                do="Report this: no machine should take as much",
                where=f"rank {rank}",
            )
        )
    texts = [f"discover/text/{each}" for each in range(world_size)]
    store.set(texts[rank], text)
    if rank != 0:
        _wait(store, ["discover/done"], timeout, rank, world_size)
        store.set(f"discover/left/{rank}", "1")
        return None
    _wait(store, texts, timeout, rank, world_size)
    found = [_text_of(value, each) for each, value in enumerate(store.multi_get(texts))]
    store.set("discover/done", "1")
    # The store may be this process's: it stays until the others have read that they may go.
    _wait(store, [f"discover/left/{each}" for each in range(1, world_size)], timeout, rank, world_size)
    return found


def _text_of(value: bytes, rank: int) -> str:
    what, where = "text of another rank", f"rank {rank}"
    hearing.check_length(len(value), what, most=MAX_BYTES, where=where)
    try:
        return value.decode()
    except UnicodeDecodeError as cause:
        do = "Run the same ringweave on all ranks"
        raise DisagreementError(errors.explain(what, got=value, expected="UTF-8", do=do, where=where)) from cause


def _wait(store: Store, keys: list[str], timeout: timedelta, rank: int, world_size: int) -> None:
    try:
        if keys:
            store.wait(keys, timeout)
    except RuntimeError as cause:
        absent = [
            key.rpartition("/")[2] for key in keys if key.rpartition("/")[2].isdecimal() and not store.check([key])
        ]
        who = f"rank {', '.join(absent[:8])}" if absent else "rank 0"
        raise PeerError(_absence(who, world_size, timeout, rank)) from cause


def _absence(who: str, world_size: int, timeout: timedelta, rank: int) -> str:
    return errors.explain(
        "discovery by all workers",
        got=f"{who} did not come within {timeout.total_seconds():g} s",
        expected=f"all of {world_size} ranks",
        do="Look into the log of that rank",
        where=f"rank {rank}",
    )
