"""A short run of `bench/fuzz.py`, and everything that it has ever found: all parsers read or refuse it."""

import resource
import time
from pathlib import Path

import pytest

from bench import fuzz
from ringweave.errors import RingweaveError
from ringweave_bench.untrusted_parsers import UntrustedParser, untrusted_parsers
from tests import effort

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(scope="module")
def parsers() -> list[UntrustedParser]:
    return untrusted_parsers()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mutated_messages_are_read_or_refused(parsers: list[UntrustedParser]) -> None:
    total = effort.share_of(60_000)
    reports = [
        fuzz.fuzz(parser, count, seed=7) for parser, count in zip(parsers, fuzz.share_out(parsers, total), strict=True)
    ]
    assert [str(report) for report in reports if report.findings] == []
    assert sum(report.num_messages for report in reports) > 0.9 * total
    assert 0.5 < sum(report.num_refused for report in reports) / total < 0.99


def test_messages_that_were_findings_are_read_or_refused(parsers: list[UntrustedParser]) -> None:
    by_folder = {parser.name.replace(" ", "-"): parser for parser in parsers}
    found = sorted(path for path in CORPUS.glob("*/*"))
    for path in found:
        report = fuzz.FuzzReport(path.parent.name)
        with fuzz.bounds():
            fuzz.try_message(by_folder[path.parent.name], path.read_bytes(), report)
        assert not report.findings, f"{path}: {report}"
    assert len(found) > 3


def parse_badly(message: bytes) -> object:
    """Fail in each way that is a finding, by the first byte."""
    match message[:1]:
        case b"e":
            raise KeyError(message)
        case b"r":
            raise RingweaveError("refused")
        case b"h":
            begin_s = time.thread_time()
            while time.thread_time() - begin_s < 60:
                pass
        case b"m":
            own_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            return bytearray(fuzz.peak_bytes() - own_bytes + 2**27).count(1)  # beyond what other tests had before
        case b"b":
            return bytearray(2**40)
    return None


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (b"e", "KeyError in test_fuzzing.py"),
        (b"h", "more than 2 s of processor time"),
        (b"m", "more memory than the bound"),
        (b"b", "MemoryError in test_fuzzing.py"),
        (b"r", ""),
        (b"x", ""),
    ],
)
def test_what_a_parser_must_not_do_is_a_finding(message: bytes, found: str) -> None:
    parser = UntrustedParser(name="bad", parse=parse_badly, seeds=(b"x",))
    report = fuzz.FuzzReport("bad")
    with fuzz.bounds():
        fuzz.try_message(parser, message, report)
    assert found in str(report)
    assert bool(report.findings) == bool(found)
    assert report.num_refused == (message == b"r")


def test_mutations_follow_the_seed_and_change_something() -> None:
    parser = UntrustedParser(name="any", parse=len, seeds=(b'{"a": [1, 2, "text"], "b": null}',))
    first, again, other = (
        [each for each, _ in zip(fuzz.mutations(parser, seed), range(500), strict=False)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(set(first)) > 400
    assert max(map(len, first)) <= 65_536
