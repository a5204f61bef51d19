"""What is read from the store: whoever may write there can write anything."""

import json
import random
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from ringweave.comm import choosing, faults, members
from ringweave.comm.choosing import Sending
from ringweave.comm.faults import FaultBoard, Report
from ringweave.comm.members import Member, Members, Place
from ringweave.comm.transport.seam import TransferFailedError
from ringweave.errors import DisagreementError, PeerError, ScheduleError
from ringweave.planning import Plan
from ringweave.planning.adapting import Ruling
from tests.wire.test_bad_bytes import mutated

RUBBISH = [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"a": NaN}', b'{"doing": 1}', b'"x"']
PLACE = ["n0", "127.0.0.1", [], [1.0], ["eth0"], [], "host", 0.25]
ENTRY = {"place": PLACE, "entrances": [[[5000], "name"]], "token": "00" * 16}


@pytest.mark.parametrize("value", RUBBISH)
def test_rubbish_is_refused_by_whoever_reads(value: bytes) -> None:
    assert faults.parse(value) is None
    with pytest.raises(DisagreementError, match=r"entry of a rank in the store: .*, expected where a rank of the same"):
        members.read_entry(value, 3)
    with pytest.raises(ScheduleError, match=r"plan: .*, expected the text of a plan"):
        Plan.parse(value.decode(errors="replace"))
    with pytest.raises(ScheduleError, match=r"ruling: .*, expected what the first rank sent"):
        Ruling.parse(value.decode(errors="replace"))


def test_mutated_entries_and_reports_are_refused_or_read() -> None:
    rng, entry = random.Random(4), json.dumps(ENTRY).encode()
    assert members.read_entry(entry, 0)[0].place == Place("n0", "127.0.0.1", nics=("eth0",), host="host", cores=0.25)
    report = json.dumps({"doing": "allreduce", "suspect": 1, "hung": True, "failure": "", "disagreement": ""}).encode()
    num_refused = 0
    for _ in range(10_000):
        try:
            found, token = members.read_entry(mutated(rng, entry), 0)
            assert all(isinstance(port, int) for port in found.entrances[0].ports) if found.entrances else True
            assert isinstance(token, bytes)
        except DisagreementError:
            num_refused += 1
        num_refused += faults.parse(mutated(rng, report)) is None
    assert num_refused > 10_000


@pytest.mark.parametrize("cores", [-1.0, 1e-9, float("inf"), float("nan"), "1", None, []])
def test_a_part_of_a_processor_that_no_quota_leaves_is_refused(cores: object) -> None:
    with pytest.raises(DisagreementError, match=r"entry of a rank in the store: .*, expected where a rank of the same"):
        members.read_entry(json.dumps({**ENTRY, "place": [*PLACE[:-1], cores]}).encode(), 3)


@pytest.mark.parametrize(
    "change",
    [{"suspect": []}, {"suspect": True}, {"hung": 1}, {"doing": None}, {"failure": {}}, {"more": 1}],
)
def test_a_report_of_wrong_types_is_none(change: dict) -> None:
    good = {"doing": "allreduce", "suspect": None, "hung": False, "failure": "", "disagreement": ""}
    assert faults.parse(json.dumps(good).encode()) == Report(doing="allreduce", suspect=None)
    assert faults.parse(json.dumps(good | change).encode()) is None


def test_a_rank_whose_report_is_rubbish_is_one_that_did_not_report() -> None:
    store, clock = HashStore(), SimpleNamespace(now_s=0.0)
    ranks = tuple(Member(rank, Place(f"n{rank}", "127.0.0.1"), ()) for rank in range(3))
    store.set("fault/1", b"[" * 100_000)
    store.set("fault/2", json.dumps({"doing": "allreduce #7", "suspect": 1}).encode())

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    board = FaultBoard(store, Members(ranks, 0, b""), clock=lambda: clock.now_s, sleep=sleep)
    board.report(Report(doing="allreduce #7", suspect=1))
    error = board.explain(TransferFailedError(1, "connection closed", hung=False), "allreduce #7")
    assert isinstance(error, PeerError)
    assert "rank 1 (node n1) is gone" in str(error)


@pytest.mark.parametrize("value", [b"{}", b"rubbish", b'{"plan": "x", "tuned": 3}', b"[" * 100_000])
def test_a_plan_that_is_none_is_a_disagreement(value: bytes) -> None:
    store = HashStore()
    ranks = tuple(Member(rank, Place("n", "127.0.0.1"), ()) for rank in range(2))
    store.set(choosing._KEY, value)
    post = Sending(store=store, members=Members(ranks, 1, b""), timeout=timedelta(seconds=5))
    expected = r"plan of the group: .*, expected the plan that rank 0 \(node n\) made\. Run the same ringweave on all"
    with pytest.raises(DisagreementError, match=expected):
        post.receive()


class SilentStore:
    """Its host is cut off: no call returns, until it is reached again."""

    def __init__(self) -> None:
        self.called, self.is_reached = threading.Event(), threading.Event()

    def set(self, key: str, value: str) -> None:
        self._wait()

    def check(self, keys: list[str]) -> bool:
        self._wait()
        return False

    def _wait(self) -> None:
        self.called.set()
        self.is_reached.wait(400)


def test_who_is_aborted_waits_no_longer_for_a_store_that_is_silent() -> None:
    """Its reduction would else fail only when the node of the store is reached again."""
    store = SilentStore()
    ranks = tuple(Member(rank, Place(f"n{rank}", "127.0.0.1"), ()) for rank in range(2))
    board = FaultBoard(store, Members(ranks, 1, b""))  # pyrefly: ignore
    failure = TransferFailedError(0, "reset", hung=False)
    errors: list[Exception] = []

    def fail() -> None:
        board.report(Report(doing="allreduce", suspect=0))
        errors.append(board.explain(failure, "allreduce"))

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    assert store.called.wait(400)
    board.give_up()
    failing.join(400)
    store.is_reached.set()
    assert [type(error) for error in errors] == [PeerError]
    assert str(errors[0]).startswith("allreduce: rank 0 (node n0) is gone (the store of the run is gone as well)")
