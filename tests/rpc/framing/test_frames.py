import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave import rpc
from ringweave.errors import MessageError, UsageError
from ringweave.rpc import framing
from tests.rpc.parts import Add

LIMITS = rpc.RpcLimits(max_body_bytes=1000, max_buffers=8, max_message_bytes=10_000, max_bytes_in_flight=10_000)


@given(
    kind=st.sampled_from(framing.FrameKind),
    call=st.integers(0, 2**64 - 1),
    name=st.text("abc.", max_size=64),
    body=st.binary(max_size=1000),
    sizes=st.lists(st.integers(0, 1250), max_size=8),
    timeout_ms=st.integers(0, 2**32 - 1),
)
def test_a_frame_reads_back_as_it_was_packed(kind, call, name, body, sizes, timeout_ms):
    data = framing.pack_frame(kind, call=call, name=name, body=body, sizes=sizes, timeout_s=timeout_ms / 1000)
    prefix = framing.parse_prefix(data, LIMITS)
    head = framing.parse_head(prefix, data[framing.PREFIX_BYTES :])
    assert (prefix.kind, prefix.call, head.name, head.body, head.sizes) == (kind, call, name, body, tuple(sizes))
    assert abs(prefix.timeout_ms - timeout_ms) <= 1
    assert prefix.total_bytes == len(data) + (sum(sizes) + framing.CHECKSUM_BYTES if sizes else 0)


def test_every_changed_bit_of_prefix_and_head_is_found():
    data = framing.pack_frame(framing.FrameKind.CALL, call=7, name="a.b", body=b"{}", sizes=[3, 4], timeout_s=1)
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(MessageError):
            framing.parse_head(framing.parse_prefix(changed, LIMITS), changed[framing.PREFIX_BYTES :])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"body": b"x" * 1001},
            r"bytes of a message's body: 1001, expected at most 1000\. Send less.*raise max_body_bytes",
        ),
        ({"sizes": [0] * 9}, r"buffers of a message: 9, expected at most 8\. .*max_buffers"),
        ({"sizes": [10_001]}, r"bytes of a message: 10001, expected at most 10000\. .*max_message_bytes"),
        ({"sizes": [2**60]}, r"bytes of a message: 1152921504606846976, expected at most 10000\."),
        ({"name": "x" * 65}, r"bytes of a message's name: 65, expected at most 64\. The bytes were damaged"),
    ],
)
def test_more_than_the_limits_is_refused_from_the_prefix_alone(options, text):
    data = framing.pack_frame(framing.FrameKind.CALL, **options)
    with pytest.raises(MessageError, match=text):
        framing.parse_prefix(data[: framing.PREFIX_BYTES], LIMITS)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: 1234567890", r"first bytes of a frame: b'GET ', expected b'RWIR'\."),
        (
            b"RWIR\x01" + bytes(39),
            r"version of a frame: 1, expected 2, which ringweave 0\.1\.0 speaks here\. Run the same",
        ),
        (b"RWIR\x02" + bytes(39), r"prefix of a frame: 'another check', .*The bytes were damaged on the way"),
    ],
)
def test_what_is_no_frame_is_refused(data, text):
    with pytest.raises(MessageError, match=text):
        framing.parse_prefix(data[: framing.PREFIX_BYTES], LIMITS)


def test_buffers_are_not_copied():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = framing.as_bytes_view(array)
    assert view.nbytes == 48
    array[0, 0] = 5
    assert np.frombuffer(view, np.float32)[0] == 5
    assert framing.as_bytes_view(np.zeros((0, 3), np.float32)).nbytes == 0


def test_buffers_that_are_not_contiguous_are_refused():
    with pytest.raises(MessageError, match=r"buffer: \(8,\), expected contiguous memory\. Copy it first"):
        framing.as_bytes_view(np.arange(10, dtype=np.float32)[::2])


def test_changed_content_is_found():
    content = bytearray(b"abcdef")
    stated = framing.pack_checksum(framing.checksum(content[:3], content[3:]))
    framing.verify_content([memoryview(content)], stated)
    content[4] ^= 1
    with pytest.raises(MessageError, match="buffers of a message: 'another check'"):
        framing.verify_content([memoryview(content)], stated)


@given(number=st.integers(-(2**63), 2**63), words=st.lists(st.text(max_size=20), max_size=5).map(tuple))
def test_messages_survive_the_wire(number, words):
    message = Add(number=number, words=words)
    assert framing.decode_message(Add, framing.encode_message(message)) == message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", r"message test\.add: .*expected a valid one \(Invalid JSON"),
        (
            b"[]",
            r"message test\.add: \[\], expected a valid one \(Input should be an object\)\. Run the same ringweave",
        ),
        (b'{"number": "1"}', r"message test\.add, number: '1', expected a valid one"),
        (b'{"number": 1.5}', r"message test\.add, number: 1\.5"),
        (b'{"extra": 1}', r"message test\.add, extra: 1, expected a valid one \(Extra inputs are not permitted\)"),
        (b"[" * 100_000, r"message test\.add: .*recursion limit"),
    ],
)
def test_messages_of_another_schema_are_refused(body, text):
    with pytest.raises(MessageError, match=text):
        framing.decode_message(Add, body)


def test_not_a_number_and_infinity_survive():
    class Loss(rpc.RpcMessage):
        kind = "test.loss"
        value: float

    assert framing.decode_message(Loss, framing.encode_message(Loss(value=float("inf")))).value == float("inf")


def test_limits_that_no_message_could_meet_are_refused():
    with pytest.raises(UsageError, match=r"max_message_bytes: 11, expected at most max_bytes_in_flight, 10\."):
        rpc.RpcLimits(max_message_bytes=11, max_bytes_in_flight=10)
    with pytest.raises(UsageError, match=r"max_calls: 0, expected more than 0\. Raise the limit\."):
        rpc.RpcLimits(max_calls=0)


def test_a_slow_link_has_time_in_proportion():
    limits = rpc.RpcLimits(patience_s=2, slowest_bytes_per_s=1000)
    assert limits.frame_timeout_s(5000) == 7
