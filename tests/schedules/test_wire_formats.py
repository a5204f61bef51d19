"""Codecs of wire formats: sizes, errors, encoding again, error feedback, and bytes that no encoder has written."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ringweave.errors import ScheduleError
from ringweave.schedules import wire_formats
from ringweave.schedules.wire_formats import EXACT, FORMATS, INT8, WireFormat
from tests import effort

LENGTHS = (1, 2, 63, 64, 129, 1000, 40_001)
LOSSY = [each for each in FORMATS.values() if each is not EXACT]
every_format = pytest.mark.parametrize("wire_format", FORMATS.values(), ids=lambda each: each.name)


def some_values(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Of all magnitudes, with zeros and blocks of one magnitude among them."""
    values = rng.standard_normal(count) * 10.0 ** np.repeat(rng.integers(-30, 30, -(-count // 50)), 50)[:count]
    values[rng.random(count) < 0.1] = 0.0
    return values.astype(np.float32)


def encoded(wire_format: WireFormat, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    found = np.empty(wire_format.encoded_bytes(len(values)), np.uint8)
    wire_formats.encode(wire_format, values, found)
    return found


def decoded(wire_format: WireFormat, values: NDArray[np.float32]) -> NDArray[np.float32]:
    found = np.empty(len(values), np.float32)
    wire_formats.decode(wire_format, encoded(wire_format, values), found)
    return found


def largest_of_blocks(wire_format: WireFormat, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest absolute value of each value's block."""
    width = wire_format.block_values or 1
    padded = np.abs(np.concatenate([values, np.zeros(-len(values) % width, np.float32)])).reshape(-1, width)
    return np.repeat(padded.max(axis=1), width)[: len(values)]


@pytest.mark.parametrize(("name", "size"), [("exact", 1020), ("bf16", 510), ("int8", 257), ("int4", 132), ("int2", 68)])
def test_size_follows_from_the_number_of_values(name: str, size: int) -> None:
    assert wire_formats.format_named(name).encoded_bytes(255) == size


def test_unknown_format_is_refused() -> None:
    text = "wire format: 'int7', expected one of exact, bf16, int8, int4, int2. Name one of these."
    with pytest.raises(ScheduleError) as refused:
        wire_formats.format_named("int7")
    assert str(refused.value) == text


@every_format
@pytest.mark.parametrize("count", LENGTHS)
def test_error_is_at_most_the_stated_one(wire_format: WireFormat, count: int) -> None:
    values = some_values(np.random.default_rng(count), count)
    error = np.abs(decoded(wire_format, values).astype(np.float64) - values)
    tiny = 2.0**-126 if wire_format.block_values else 2.0**-133
    assert (error <= wire_format.relative_error * largest_of_blocks(wire_format, values) + tiny).all()
    if wire_format is not EXACT and count > 1:
        assert error.any()


@every_format
@pytest.mark.parametrize("count", LENGTHS)
def test_encoding_again_changes_nothing(wire_format: WireFormat, count: int) -> None:
    once = decoded(wire_format, some_values(np.random.default_rng(count), count))
    assert decoded(wire_format, once).tobytes() == once.tobytes()
    for start in range(0, count, 3 * (wire_format.block_values or 100)):  # any parts of a block
        part = once[start : start + 41].copy()
        assert decoded(wire_format, part).tobytes() == part.tobytes()


@every_format
def test_sender_holds_what_the_receiver_gets(wire_format: WireFormat) -> None:
    values = some_values(np.random.default_rng(1), 40_001)
    kept, received = values.copy(), np.empty_like(values)
    message = np.empty(wire_format.encoded_bytes(len(values)), np.uint8)
    wire_formats.encode(wire_format, kept, message, rounds=True)
    wire_formats.decode(wire_format, message, received)
    assert kept.tobytes() == received.tobytes()
    assert message.tobytes() == encoded(wire_format, values).tobytes()


@pytest.mark.parametrize("wire_format", LOSSY, ids=lambda each: each.name)
def test_residual_carries_every_error_over(wire_format: WireFormat) -> None:
    rng, count, num_messages = np.random.default_rng(2), 20_000, 64
    values = rng.standard_normal(count).astype(np.float32)
    residual, total = np.zeros(count, np.float32), np.zeros(count, np.float64)
    for _ in range(num_messages):
        kept = values.copy()
        wire_formats.encode(wire_format, kept, None, residual=residual, rounds=True)
        total += kept
    np.testing.assert_allclose(total + residual, num_messages * values.astype(np.float64), atol=1e-3)
    # What is left does not grow with the number of messages: the mean of all is exact in the end.
    assert np.abs(residual).max() <= 2 * wire_format.relative_error * (np.abs(values).max() + np.abs(residual).max())


@pytest.mark.parametrize("wire_format", LOSSY, ids=lambda each: each.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_shows_and_leaves_no_residual(wire_format: WireFormat, bad: float) -> None:
    values = np.ones(300, np.float32)
    values[150] = bad
    residual = np.zeros(300, np.float32)
    wire_formats.encode(wire_format, values, None, residual=residual, rounds=True)
    assert not np.isfinite(values[150])
    assert np.isfinite(values[:128]).all()
    assert np.isfinite(residual).all()


def test_largest_and_smallest_numbers_do_not_fail() -> None:
    info = np.finfo(np.float32)
    values = np.repeat(np.array([info.max, -info.max, info.tiny, info.smallest_subnormal], np.float32), 128)
    for each in FORMATS.values():
        residual = np.zeros(len(values), np.float32)
        wire_formats.encode(each, values.copy(), None, residual=residual, rounds=True)
        assert np.isfinite(residual).all()


@every_format
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_length_is_refused(wire_format: WireFormat, change: int) -> None:
    message = np.zeros(wire_format.encoded_bytes(500) + change, np.uint8)
    expected = f"{wire_format.encoded_bytes(500)} for 500 values"
    text = (
        f"bytes of {wire_format.name} message: {len(message)}, expected {expected}. Run the same version of ringweave"
    )
    with pytest.raises(ScheduleError, match=text):
        wire_formats.decode(wire_format, message, np.zeros(500, np.float32))


def test_mutated_messages_decode_or_are_refused() -> None:
    """100,000 in the thorough run: each decodes to as many values, the same each time, or has a wrong length."""
    rng = np.random.default_rng(20261128)
    for number in range(effort.share_of(100_000)):
        wire_format = LOSSY[number % len(LOSSY)]
        count = int(rng.integers(1, 400))
        message = encoded(wire_format, some_values(rng, count))
        mutated = mutate(rng, message)
        values, again = np.full(count, 7, np.float32), np.zeros(count, np.float32)
        if len(mutated) != len(message):
            with pytest.raises(ScheduleError):
                wire_formats.decode(wire_format, mutated, values)
            assert (values == 7).all()
            continue
        wire_formats.decode(wire_format, mutated, values)
        wire_formats.decode(wire_format, mutated, again)
        assert values.tobytes() == again.tobytes()


def mutate(rng: np.random.Generator, message: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bits flipped, bytes replaced, cut, repeated or random throughout."""
    kind, mutated = int(rng.integers(5)), message.copy()
    at = int(rng.integers(len(message)))
    if kind == 0:
        mutated[at] ^= np.uint8(1 << int(rng.integers(8)))
    elif kind == 1:
        mutated[at] = rng.choice([0, 1, 127, 128, 254, 255])
    elif kind == 2:
        mutated = mutated[:at]
    elif kind == 3:
        mutated = np.concatenate([mutated, mutated[at:]])
    else:
        mutated = rng.integers(0, 256, len(message), dtype=np.uint8)
    return mutated


def test_int8_takes_about_a_quarter() -> None:
    assert INT8.ratio == pytest.approx(0.252, abs=1e-3)
    assert INT8.encoded_bytes(6_250_000) / 25e6 == pytest.approx(INT8.ratio, rel=1e-6)
