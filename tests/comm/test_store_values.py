"""What is read from the store: whoever may write there can write anything."""

import json
import random
import re
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

from ringweave import planning, topology
from ringweave.comm import failure_registry, group_info, group_plan, peer_data
from ringweave.comm.failure_registry import CollectiveFailureReport, FailureRegistry
from ringweave.comm.group_info import GroupInfo, RankInfo, RankLocation
from ringweave.comm.group_plan import PlanBroadcast
from ringweave.comm.probing import measure
from ringweave.comm.transport.interface import TransferFailedError
from ringweave.comm.tuning import control_tree
from ringweave.errors import DisagreementError, PeerError, ScheduleError
from ringweave.planning import Plan
from ringweave.planning.autotune.tuning_messages import TuningDecision
from tests.rpc.mutations import mutated

RUBBISH = [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"a": NaN}', b'{"doing": 1}', b'"x"']
PLACE = ["n0", "127.0.0.1", [], [1.0], ["eth0"], [], "host", 0.25, ["0"]]
PLAN = planning.plan_group(topology.one_machine([2]), ["node0"] * 2)
ENTRY = {
    "location": PLACE,
    "endpoints": [[[5000], "name"]],
    "token": "00" * 16,
    "versions": group_info.own_versions(),
}


@pytest.mark.parametrize("value", RUBBISH)
def test_rubbish_is_refused_by_whoever_reads(value: bytes) -> None:
    assert failure_registry.parse_failure_report(value) is None
    expected = (
        r"(where a rank of the same ringweave can be called|0 to 65536 bytes)\. Run the same ringweave on all ranks"
    )
    with pytest.raises(DisagreementError, match=rf"entry of a rank in the store: .*, expected {expected}"):
        group_info.parse_rank_info(value, 3)
    with pytest.raises(ScheduleError, match=r"plan: .*, expected the text of a plan"):
        Plan.parse(value.decode(errors="replace"))
    with pytest.raises(ScheduleError, match=r"tuning decision: .*, expected what the first rank sent"):
        TuningDecision.parse(value.decode(errors="replace"))


@pytest.mark.parametrize("what", ["entry", "plan", "NICs", "text of a machine", "tuning decision"])
def test_what_is_too_long_is_refused_by_whoever_reads(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces at the end change nothing, but for how long it is."""
    most = peer_data.MAX_PEER_BYTES if what == "NICs" else 20_000
    monkeypatch.setattr(group_info, "_MAX_RANK_INFO_BYTES", most)
    monkeypatch.setattr(group_plan, "MAX_SHARED_PLAN_BYTES", most)
    monkeypatch.setattr(peer_data, "MAX_TEXT_BYTES", most)
    monkeypatch.setattr(control_tree, "MAX_DECISION_BYTES", most)
    readers: dict[str, Callable[[bytes], object]] = {
        "entry": lambda text: group_info.parse_rank_info(text, 3),
        "plan": lambda text: stored(group_plan._PLAN_KEY, text).receive(),
        "NICs": lambda text: measure.agree_on_nics(
            stored(measure._NICS_KEY, text).store, two_nics(1), None, timedelta(seconds=5)
        ),
        "text of a machine": met,
        "tuning decision": said_from_above,
    }
    goods = {"entry": json.dumps(ENTRY).encode(), "NICs": b'{"n0": {"eth0": 1.0, "eth1": 2.0}}'}
    good = goods.get(what, json.dumps({"plan": str(PLAN), "tuned": {"3": "ring"}}).encode())
    readers[what](good.ljust(most))
    expected = rf": '{most + 1} bytes', expected 0 to {most} bytes\. Run the same ringweave on all ranks"
    with pytest.raises(DisagreementError, match=expected):
        readers[what](good.ljust(most + 1))


def test_a_report_that_is_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_registry, "_MAX_REPORT_BYTES", 100)
    report = json.dumps({"operation": "allreduce", "suspect": 1}).encode()
    assert failure_registry.parse_failure_report(report.ljust(100)) == CollectiveFailureReport(
        operation="allreduce", suspect=1
    )
    assert failure_registry.parse_failure_report(report.ljust(101)) is None


def stored(key: str, value: bytes) -> PlanBroadcast:
    """How rank 1 of two is told a plan, with that in the store."""
    store = HashStore()
    store.set(key, value)
    ranks = tuple(RankInfo(rank, RankLocation("n", "127.0.0.1"), ()) for rank in range(2))
    return PlanBroadcast(store=store, group=GroupInfo(ranks, 1, b""), timeout=timedelta(seconds=5))


def two_nics(own: int) -> GroupInfo:
    place = RankLocation(
        "n0", "127.0.1.1", ("127.0.2.1",), (1.0, 1.0), ("eth0", "eth1"), ("127.0.1.0/24", "127.0.2.0/24")
    )
    return GroupInfo(tuple(RankInfo(rank, place, ()) for rank in range(2)), own, b"")


def met(text: bytes) -> list[str] | None:
    """What rank 0 of two hears where rank 1 has put that."""
    store = HashStore()
    store.set("discover/text/1", text)
    store.set("discover/left/1", "1")
    return peer_data.exchange_texts(store, "", 0, 2, timedelta(seconds=5))


def said_from_above(text: bytes) -> str:
    """What a rank of a council hears where the one above it sends that."""
    council = control_tree.ControlTree.__new__(control_tree.ControlTree)
    council._parent, council._children = 0, []
    said = iter([len(text).to_bytes(8, "little"), text])

    def receive(parts: Sequence[tuple[torch.Tensor, int]]) -> None:
        parts[0][0].copy_(torch.frombuffer(bytearray(next(said)), dtype=torch.uint8))

    council._receive = receive  # pyrefly: ignore
    return council._broadcast("")


def test_a_length_that_is_none_is_refused_before_there_is_memory_for_it() -> None:
    for least, num_bytes in ((0, -1), (1, 0), (0, 2**40)):
        with pytest.raises(DisagreementError, match=rf"it: '{num_bytes} bytes', expected {least} to 16777216 bytes"):
            peer_data.check_length(num_bytes, "it", min_bytes=least)


@pytest.mark.parametrize("value", [*RUBBISH, b'{"n0": []}', b'{"n0": {"eth0": 0}}', b'{"n0": {"eth0": "1"}}'])
def test_rates_of_nics_that_are_none_are_a_disagreement(value: bytes) -> None:
    given = (stored(measure._NICS_KEY, value).store, two_nics(1), None, timedelta(seconds=5))
    if value == b"{}":
        assert measure.agree_on_nics(*given).own_info.location.addresses == ("127.0.1.1",)
        return
    with pytest.raises(
        DisagreementError, match=r"NICs of the nodes: .*, expected rates of NICs, as rank 0 \(node n0\)"
    ):
        measure.agree_on_nics(*given)


def test_a_text_of_a_machine_that_is_none_is_a_disagreement() -> None:
    with pytest.raises(DisagreementError, match=r"text of another rank: .*, expected UTF-8\. .* \[rank 1\]"):
        met(b"\xff\xfe")


def test_mutated_plans_are_read_or_refused() -> None:
    rng, num_refused = random.Random(9), 0
    good = json.dumps({"plan": str(PLAN), "tuned": {"3": "ring"}}).encode()
    assert stored(group_plan._PLAN_KEY, good).receive() == (PLAN, {"3": "ring"})
    for _ in range(2_000):
        try:
            plan, _ = stored(group_plan._PLAN_KEY, mutated(rng, good)).receive()
            assert isinstance(plan, Plan)
        except DisagreementError:
            num_refused += 1
    assert num_refused > 1_000


def test_mutated_entries_and_reports_are_refused_or_read() -> None:
    rng, entry = random.Random(4), json.dumps(ENTRY).encode()
    assert group_info.parse_rank_info(entry, 0)[0].location == RankLocation(
        "n0", "127.0.0.1", nics=("eth0",), host="host", cores=0.25, gpus=("0",)
    )
    report = json.dumps(
        {"operation": "allreduce", "suspect": 1, "is_hung": True, "failure": "", "disagreement": ""}
    ).encode()
    num_refused = 0
    for _ in range(10_000):
        try:
            found, token = group_info.parse_rank_info(mutated(rng, entry), 0)
            assert all(isinstance(port, int) for port in found.endpoints[0].ports) if found.endpoints else True
            assert isinstance(token, bytes)
        except DisagreementError:
            num_refused += 1
        num_refused += failure_registry.parse_failure_report(mutated(rng, report)) is None
    assert num_refused > 10_000


@pytest.mark.parametrize("cores", [-1.0, 1e-9, float("inf"), float("nan"), "1", None, []])
def test_a_part_of_a_processor_that_no_quota_leaves_is_refused(cores: object) -> None:
    with pytest.raises(DisagreementError, match=r"entry of a rank in the store: .*, expected where a rank of the same"):
        group_info.parse_rank_info(json.dumps({**ENTRY, "location": [*PLACE[:7], cores, []]}).encode(), 3)


def of_versions(**changes: object) -> bytes:
    return json.dumps({**ENTRY, "versions": {**group_info.own_versions(), **changes}}).encode()


def test_a_rank_of_another_protocol_is_refused_and_both_versions_are_named() -> None:
    expected = (
        r"protocol of rank 3: '2 \(ringweave 0\.2\.0\)', expected 1 \(ringweave 0\.1\.0\), as this rank has\. "
        r"Install the same ringweave on all nodes\. \[rank 3\]"
    )
    with pytest.raises(DisagreementError, match=expected):
        group_info.parse_rank_info(of_versions(protocol=2, ringweave="0.2.0"), 3)
    assert group_info.parse_rank_info(of_versions(ringweave="0.2.0"), 3)[0].global_rank == 3
    laid_out_otherwise = json.dumps({"versions": {"protocol": 2, "ringweave": "0.2.0"}, "place": {}}).encode()
    with pytest.raises(DisagreementError, match=expected):
        group_info.parse_rank_info(laid_out_otherwise, 3)


@pytest.mark.parametrize("torch_version", ["2.12.1", "3.13.0", "none", ""])
def test_a_rank_with_another_minor_version_of_torch_is_refused(torch_version: str) -> None:
    own = re.escape(torch.__version__)
    expected = (
        rf"torch of rank 3: '{torch_version}', expected {own}, as this rank has, or another patch release of it\. "
    )
    with pytest.raises(DisagreementError, match=expected + r"Install the same minor version of torch on all nodes"):
        group_info.parse_rank_info(of_versions(torch=torch_version), 3)


def test_patch_releases_and_builds_of_torch_may_be_mixed() -> None:
    major, minor, *_ = torch.__version__.split(".")
    for other in (f"{major}.{minor}.9", f"{major}.{minor}.0+cu128", f"{major}.{minor}.1rc2"):
        assert group_info.parse_rank_info(of_versions(torch=other), 3)[0].global_rank == 3


@pytest.mark.parametrize(
    "change",
    [{"suspect": []}, {"suspect": True}, {"is_hung": 1}, {"operation": None}, {"failure": {}}, {"more": 1}],
)
def test_a_report_of_wrong_types_is_none(change: dict) -> None:
    good = {"operation": "allreduce", "suspect": None, "is_hung": False, "failure": "", "disagreement": ""}
    assert failure_registry.parse_failure_report(json.dumps(good).encode()) == CollectiveFailureReport(
        operation="allreduce", suspect=None
    )
    assert failure_registry.parse_failure_report(json.dumps(good | change).encode()) is None


def test_a_rank_whose_report_is_rubbish_is_one_that_did_not_report() -> None:
    store, clock = HashStore(), SimpleNamespace(now_s=0.0)
    ranks = tuple(RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), ()) for rank in range(3))
    store.set("failure/1", b"[" * 100_000)
    store.set("failure/2", json.dumps({"operation": "allreduce #7", "suspect": 1}).encode())

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    board = FailureRegistry(store, GroupInfo(ranks, 0, b""), clock=lambda: clock.now_s, sleep=sleep)
    board.publish(CollectiveFailureReport(operation="allreduce #7", suspect=1))
    error = board.diagnose(TransferFailedError(1, "connection closed", hung=False), "allreduce #7")
    assert isinstance(error, PeerError)
    assert "rank 1 (node n1) is gone" in str(error)


@pytest.mark.parametrize("value", [b"{}", b"rubbish", b'{"plan": "x", "tuned": 3}', b"[" * 100_000])
def test_a_plan_that_is_none_is_a_disagreement(value: bytes) -> None:
    store = HashStore()
    ranks = tuple(RankInfo(rank, RankLocation("n", "127.0.0.1"), ()) for rank in range(2))
    store.set(group_plan._PLAN_KEY, value)
    post = PlanBroadcast(store=store, group=GroupInfo(ranks, 1, b""), timeout=timedelta(seconds=5))
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
    ranks = tuple(RankInfo(rank, RankLocation(f"n{rank}", "127.0.0.1"), ()) for rank in range(2))
    board = FailureRegistry(store, GroupInfo(ranks, 1, b""))  # pyrefly: ignore
    failure = TransferFailedError(0, "reset", hung=False)
    errors: list[Exception] = []

    def fail() -> None:
        board.publish(CollectiveFailureReport(operation="allreduce", suspect=0))
        errors.append(board.diagnose(failure, "allreduce"))

    failing = threading.Thread(target=fail, daemon=True)
    failing.start()
    assert store.called.wait(400)
    board.stop_waiting()
    failing.join(400)
    store.is_reached.set()
    assert [type(error) for error in errors] == [PeerError]
    assert str(errors[0]).startswith("allreduce: rank 0 (node n0) is gone (the store of the run is gone as well)")
