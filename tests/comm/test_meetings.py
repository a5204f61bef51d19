from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from ringweave.comm import peer_data
from ringweave.errors import CommunicationError, PeerError


def test_rank_0_gets_all_texts_in_order() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(peer_data.exchange_texts, store, f"r{rank}", rank, 3, timedelta(seconds=20))
            for rank in range(3)
        ]
        assert [each.result() for each in asked] == [["r0", "r1", "r2"], None, None]


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(PeerError, match=r"'rank 1 did not come within 0.1 s', expected all of 2 ranks"):
        peer_data.exchange_texts(HashStore(), "", 0, 2, timedelta(seconds=0.1))


def test_a_text_without_bound_is_refused() -> None:
    with pytest.raises(CommunicationError, match="expected at most 1048576"):
        peer_data.exchange_texts(HashStore(), "x" * (peer_data.MAX_TEXT_BYTES + 1), 0, 1, timedelta(seconds=1))


class UnsentSets:
    """Store whose process may exit: of what it sets, others see only what an answered call follows."""

    def __init__(self, store: HashStore) -> None:
        self._store, self._unsent = store, []

    def set(self, key: str, value: str) -> None:
        self._unsent.append((key, value))

    def __getattr__(self, name: str) -> Any:
        for key, value in self._unsent:
            self._store.set(key, value)
        self._unsent.clear()
        return getattr(self._store, name)


def test_the_first_rank_hears_of_ranks_that_exit_at_once() -> None:
    store, others = HashStore(), timedelta(seconds=20)
    with ThreadPoolExecutor() as pool:
        for rank in (1, 2):
            pool.submit(peer_data.exchange_texts, UnsentSets(store), f"r{rank}", rank, 3, others)
        assert peer_data.exchange_texts(store, "r0", 0, 3, timedelta(seconds=10)) == ["r0", "r1", "r2"]
