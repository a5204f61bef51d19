import base64
import json
import random
import re
import tracemalloc
import zlib

import pytest

from ringweave import rpc
from ringweave.errors import TrainingError
from ringweave.membership.membership_records import MemberDirective, Membership, MemberStatus
from ringweave.membership.messages import StatusReport, WatchUpdate
from ringweave.training.elastic import recovery
from tests.rpc.mutations import mutated


def test_a_layout_comes_back_as_it_was() -> None:
    for layout in ([], [[3, "float32", "cpu"], [2, "bfloat16", "cuda"]]):
        assert recovery.layout_of_text(recovery.layout_to_text(layout)) == layout
    assert recovery.layout_to_text([]) == "", "which is told from one that there is"


def test_thousands_of_buckets_that_are_all_different_fit_into_what_members_say_and_hear() -> None:
    sizes = random.Random(7)
    layout = [[sizes.randrange(1, 10**8), "bfloat16", "cuda"] for _ in range(5000)]
    status = MemberStatus(member="0.0", has_state=True, layout=recovery.layout_to_text(layout))
    stand = StatusReport(generation_id=(1, 1), status=status)
    order = MemberDirective(generation_id=(1, 1), membership=Membership(generation_id=(1, 1), statuses=(status,)))
    for message in (stand, WatchUpdate(revision=1, is_active=True, directive=order)):
        assert len(message.model_dump_json()) < rpc.RpcLimits().max_body_bytes / 4


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def test_a_text_that_becomes_a_thousand_times_as_much_takes_no_memory() -> None:
    text = packed(b"[" + b"[1,   " * 30_000_000)
    assert len(text) < 2 * 256 * 1024
    tracemalloc.start()
    with pytest.raises(TrainingError, match="layout of the buckets: "):
        recovery.layout_of_text(text)
    with pytest.raises(
        TrainingError, match="4194304 bytes and more, or the begin of some', expected all of at most 4194"
    ):
        recovery.layout_of_text(packed(b" " * 10_000_000))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 30_000_000


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ([[0, "float32", "cpu"]], "0.0: Input should be greater than 0"),
        ([[1 << 60, "float32", "cpu"]], "0.0: Input should be less than 281474976710656"),
        ([[1, "float32"]], "0.2: Field required"),
        ([[1, "float32", "cpu"], [True, "float32", "cpu"]], "1.0: Input should be a valid integer"),
        ([[1, "save", "cpu"]], "0.1: Value error, no dtype of torch"),
        ([[1, "float32", "../cpu"]], "0.2: String should match pattern"),
        ({"a": 1}, "all of it: Input should be a valid "),
        ([[[]]], "0.0: Input should be a valid integer"),
    ],
)
def test_a_layout_that_is_none_is_refused(layout: object, text: str) -> None:
    with pytest.raises(TrainingError) as error:
        recovery.layout_of_text(packed(json.dumps(layout).encode()))
    assert re.match(f"layout of the buckets: ['\"]{re.escape(text)}", str(error.value))
    assert "expected elements, dtype and device of each bucket. Run the same ringweave on all" in str(error.value)


def test_mutated_layouts_are_refused_or_read() -> None:
    rng, layout = random.Random(3), [[random.Random(1).randrange(1, 10**6), "float32", "cpu"] for _ in range(20)]
    text, words, num_refused = recovery.layout_to_text(layout).encode(), json.dumps(layout).encode(), 0
    for _ in range(5_000):
        for said in (mutated(rng, text).decode("latin-1"), packed(mutated(rng, words))):
            try:
                assert all(len(bucket) == 3 and bucket[0] > 0 for bucket in recovery.layout_of_text(said))
            except TrainingError:
                num_refused += 1
    assert num_refused > 5_000
