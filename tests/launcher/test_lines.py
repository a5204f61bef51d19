import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.launcher.output import MAX_LINE_BYTES, LineSplitter, ProgressBarThrottle


def split(*received: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for part in received for line in splitter.feed(part)] + splitter.flush()


@pytest.mark.parametrize(
    ("received", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"1%\r2%\r3%\nend\n", [b"3%", b"end"]),
        (b"\r1%\r2%", [b"2%"]),
        (b"1%\r2%\r", [b"2%"]),
        (b"1%\rdone\n", [b"done"]),
        (b"\r\r\n", [b""]),
        (b"\xff\x00\n\xfe", [b"\xff\x00", b"\xfe"]),
    ],
)
def test_lines_whatever_the_pieces(received: bytes, lines: list[bytes]) -> None:
    assert split(received) == lines
    assert split(*(received[i : i + 1] for i in range(len(received)))) == lines


@given(st.lists(st.binary(max_size=20)), st.data())
def test_without_returns_nothing_is_lost(parts: list[bytes], data: st.DataObject) -> None:
    text = b"\n".join(part.replace(b"\r", b"").replace(b"\n", b"") for part in parts)
    cut = data.draw(st.integers(0, len(text)))
    assert b"\n".join(split(text[:cut], text[cut:])) == text.removesuffix(b"\n")


def test_a_bar_keeps_its_newest_state_and_no_more() -> None:
    splitter = LineSplitter()
    for number in range(1000):
        assert splitter.feed(b"\r%d of 1000" % number) == []
        assert splitter.unfinished == b"%d of 1000" % number
    assert splitter.flush() == [b"999 of 1000"]
    assert splitter.flush() == []


def test_endless_lines_are_cut() -> None:
    splitter = LineSplitter()
    pieces = [piece for _ in range(10) for piece in splitter.feed(b"x" * MAX_LINE_BYTES)]
    assert all(len(piece) == MAX_LINE_BYTES for piece in pieces)
    assert b"".join(pieces + splitter.flush()) == b"x" * 10 * MAX_LINE_BYTES
    assert [len(line) for line in split(b"y" * (MAX_LINE_BYTES + 1) + b"\n")] == [MAX_LINE_BYTES, 1]


def test_an_unfinished_line_is_due_when_it_changed_and_time_has_passed() -> None:
    thinner = ProgressBarThrottle(5.0, now_s=0.0)
    assert not thinner.is_due(b"1%", 4.9)
    assert thinner.is_due(b"2%", 5.0)
    assert not thinner.is_due(b"2%", 20.0), "it did not change"
    assert thinner.is_due(b"3%", 20.0)
    assert not thinner.is_due(b"", 40.0), "there is nothing to show"


def test_a_line_that_is_printed_in_pieces_is_none_that_has_no_end() -> None:
    thinner = ProgressBarThrottle(5.0, now_s=0.0, stable_s=5.0)
    assert not thinner.is_due(b"loss ", 60.0), "the rest of it comes in a moment"
    assert thinner.finish([b"loss 0.5"], 60.1) == [b"loss 0.5"]
    assert not thinner.is_due(b"1%", 70.0)
    assert thinner.is_due(b"9%", 75.0)


def test_a_finished_line_starts_the_time_again() -> None:
    thinner = ProgressBarThrottle(5.0, now_s=0.0)
    assert thinner.finish([b"a"], 4.0) == [b"a"]
    assert not thinner.is_due(b"1%", 8.0)


def test_what_was_shown_unfinished_is_not_shown_again() -> None:
    thinner = ProgressBarThrottle(5.0, now_s=0.0)
    assert thinner.is_due(b"100%", 5.0)
    assert thinner.finish([b"100%", b"bye"], 6.0) == [b"bye"]
    assert thinner.finish([b"100%"], 7.0) == [b"100%"]
    assert thinner.finish([b"", b""], 7.0) == [b"", b""]
