"""Mutated messages for all parsers of bytes that come from another process or a file.

    PYTHONPATH=. python bench/fuzz.py [--total N] [--seed S] [--only TEXT] [--findings FOLDER]
    PYTHONPATH=. python bench/fuzz.py --coverage --only TEXT --total N      # guided by coverage; needs atheris

Each parser gets an equal part of the total, slow ones a tenth. Exit code 1: there are findings.

A finding is an error that is no refusal, more than a second of processor time, more memory than 64 MiB and 32 times the
message, or the end of the process. `tests/benchmarks/corpus` keeps what was found, and a test parses it again.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringweave_bench.untrusted_parsers import UntrustedParser

MAX_CPU_S, MAX_WALL_S = 1.0, 120.0
MAX_GROWTH_BYTES, MAX_GROWTH_FACTOR = 64 * 2**20, 32
"""Growth of the process by one message: so many bytes, and so many times the message."""
ADDRESS_SPACE_BYTES = 4 * 2**30
"""What the process may map beside what it has at the start: a larger allocation is a MemoryError."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null|[A-Za-z_]\w*|[\[\]{}:,]')
_VALUES = [
    *(b"null", b"true", b"false", b"0", b"-1", b"1", b"1e400", b"-1e400", b"NaN", b"Infinity", b"1.5", b'""', b'"x"'),
    *(b"[]", b"{}", b'{"a": 1}', b"[1, 2]", b'"\\ud800"', b'"\\u0000"', b"9" * 400, b"9" * 5000, b"2147483648"),
    *(b"9223372036854775808", b"-9223372036854775809", b"[" * 300, b'{"a":' * 300 + b"1" + b"}" * 300),
    *(b'"' + b"a" * 5000 + b'"', b'"\xe2\x80\xae\x1b[31m\\n"', b'"../../x"', b'"' + b"[" * 300 + b'"'),
]


def load_parsers(*, is_guided: bool) -> "list[UntrustedParser]":
    """Import and return all parsers; atheris counts the branches of modules that are imported here."""
    if is_guided:
        import atheris

        with atheris.instrument_imports(include=["ringweave", "json"], enable_loader_override=False):
            from ringweave_bench import untrusted_parsers
    else:
        from ringweave_bench import untrusted_parsers
    return untrusted_parsers.untrusted_parsers()


def change_token(rng: random.Random, good: bytes) -> bytes:
    """Replace, double, drop or exchange tokens of a text, so that most of the rest stays well-formed."""
    places = [match.span() for match in _TOKEN.finditer(good)] or [(0, len(good))]
    start, stop = rng.choice(places)
    other_start, other_stop = rng.choice(places)
    match rng.randrange(4):
        case 0:
            return good[:start] + good[other_start:other_stop] + good[stop:]
        case 1:
            return good[:start] + good[min(stop, other_stop) :]
        case 2:
            return good[:stop] + good[start:stop] * rng.choice((1, 2, 50)) + good[stop:]
        case _:
            return good[:start] + rng.choice(_VALUES) + good[stop:]


def change_number(rng: random.Random, good: bytes) -> bytes:
    """Set 1, 2, 4 or 8 bytes to a number at a limit."""
    size = rng.choice((1, 2, 4, 8))
    data, at = bytearray(good), rng.randrange(max(1, len(good) - size + 1))
    number = rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2 ** (8 * size - 1) - 1, len(good)))
    data[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, rng.choice(("little", "big")))
    return bytes(data)


def mutations(parser: "UntrustedParser", seed: int) -> Iterator[bytes]:
    """Yield messages with something wrong, without end: one change, or a few."""
    from tests.rpc.mutations import mutated

    rng = random.Random(f"{parser.name} {seed}")
    changes = (mutated, change_token, change_token, change_number)
    while True:
        data = rng.choice(parser.seeds)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = rng.choice(changes)(rng, data.ljust(32) if len(data) < 32 else data)[:65536]
        yield data


class CpuTimeError(Exception):
    """A parser has used too much processor time."""


@dataclass(slots=True)
class Finding:
    """Messages on which a parser failed in one way."""

    parser: str
    what: str
    message: bytes
    count: int = 1


@dataclass(slots=True)
class FuzzReport:
    """Result for one parser."""

    parser: str
    num_messages: int = 0
    num_refused: int = 0
    slowest_s: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, what: str, message: bytes) -> None:
        """Add a finding, or count one that is known."""
        if what in self.findings:
            self.findings[what].count += 1
        else:
            self.findings[what] = Finding(self.parser, what, message)

    def __str__(self) -> str:
        text = (
            f"{self.parser}: {self.num_messages} messages, {self.num_refused} refused, slowest {self.slowest_s:.3f} s"
        )
        lines = [f"  FINDING {each.count} x {each.what}: {each.message[:80]!r}" for each in self.findings.values()]
        return "\n".join([text, *lines])


def try_message(parser: "UntrustedParser", message: bytes, report: FuzzReport) -> None:
    """Parse one message, and note what happened."""
    before_bytes, begin_s = peak_bytes(), time.thread_time()
    report.num_messages += 1
    signal.setitimer(signal.ITIMER_PROF, 2 * MAX_CPU_S)
    try:
        parser.parse(message)
    except parser.refusals:
        report.num_refused += 1
    except CpuTimeError as error:
        report.add(str(error), message)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        report.add(f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}", message)
        if isinstance(error, KeyboardInterrupt):
            raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took_s, grown_bytes = time.thread_time() - begin_s, peak_bytes() - before_bytes
    report.slowest_s = max(report.slowest_s, took_s)
    if took_s > MAX_CPU_S:
        report.add("more than a second of processor time", message)
    if grown_bytes > MAX_GROWTH_BYTES + MAX_GROWTH_FACTOR * len(message):
        report.add("more memory than the bound", message)


def peak_bytes() -> int:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Bound the processor time of each message, and the address space of the process, for the length of the block."""

    def end(*_: object) -> None:
        raise CpuTimeError(f"more than {2 * MAX_CPU_S:g} s of processor time")

    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGPROF, end)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, previous)


def fuzz(parser: "UntrustedParser", num_messages: int, seed: int) -> FuzzReport:
    """Parse so many mutated messages, after the good ones."""
    report = FuzzReport(parser.name)
    for good in parser.seeds:  # imports and caches are not the first message's
        with contextlib.suppress(*parser.refusals):
            parser.parse(good)
    with bounds():
        for message, _ in zip(mutations(parser, seed), range(num_messages), strict=False):
            faulthandler.dump_traceback_later(MAX_WALL_S, exit=True)
            try_message(parser, message, report)
    faulthandler.cancel_dump_traceback_later()
    return report


def share_out(parsers: "list[UntrustedParser]", total: int) -> list[int]:
    """Return the number of messages of each parser."""
    weights = [0.1 if parser.is_slow else 1.0 for parser in parsers]
    return [max(1, round(total * weight / sum(weights))) for weight in weights]


def save_findings(folder: Path, report: FuzzReport) -> None:
    """Save the message of each finding below the folder, as the corpus has it."""
    for finding in report.findings.values():
        path = folder / report.parser.replace(" ", "-") / hashlib.sha256(finding.message).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(finding.message)


def fuzz_by_coverage(parser: "UntrustedParser", total: int, seed: int) -> None:
    """Let atheris guide the mutations by coverage of ringweave's code; it ends the process at the first finding."""
    import atheris

    report = FuzzReport(parser.name)

    def run(message: bytes) -> None:
        try_message(parser, message, report)
        if report.findings:
            raise RuntimeError(str(report))

    folder = Path("/tmp/ringweave-fuzz-corpus") / parser.name.replace(" ", "-").replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    for index, good in enumerate(parser.seeds):
        (folder / f"seed-{index}").write_bytes(good)
    atheris.Setup(
        [sys.argv[0], f"-runs={total}", f"-seed={seed}", "-max_len=4096", "-rss_limit_mb=8192", str(folder)], run
    )
    with bounds():
        atheris.Fuzz()


def main() -> int:
    """Fuzz the parsers that the options name."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--total", type=int, default=1_000_000, help="messages of all parsers together")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="part of a parser's name")
    options.add_argument("--coverage", action="store_true", help="guide the mutations by coverage, with atheris")
    options.add_argument("--findings", type=Path, help="folder for messages of findings")
    given = options.parse_args()
    parsers = [parser for parser in load_parsers(is_guided=given.coverage) if given.only in parser.name]
    if given.coverage:
        fuzz_by_coverage(parsers[0], given.total, given.seed)
    reports = []
    for parser, count in zip(parsers, share_out(parsers, given.total), strict=True):
        reports.append(fuzz(parser, count, given.seed))
        print(reports[-1], flush=True)
        if given.findings:
            save_findings(given.findings, reports[-1])
    num_findings = sum(len(report.findings) for report in reports)
    summary = {
        "parsers": len(reports),
        "messages": sum(report.num_messages for report in reports),
        "refused": sum(report.num_refused for report in reports),
        "findings": num_findings,
        "slowest_s": max(report.slowest_s for report in reports),
        "peak_bytes": peak_bytes(),
        "seed": given.seed,
    }
    print(json.dumps(summary))
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
