"""The page of a run in headless Chromium: how soon it paints, what an update takes, its console, and sizes of reports.

    PYTHONPATH=. python bench/page.py                       # 4 minutes on a quiet machine; Debian's chromium
    PYTHONPATH=. python bench/page.py --loads 2 --updates 5 --steps 10000
    PYTHONPATH=. python bench/page.py --pictures FOLDER      # also each page as a picture, light and dark

Runs: live of 8 ranks, finished, failed, and 64 ranks x 100,000 steps, live and as a file; they are written by
tests/page/synthetic.py, and the live ones get a window of steps of every rank each second. An update is the script of
the page from news to the new drawing; the longest frame has styles, layout and painting as well (Chromium's long
animation frames, which begin at 50 ms: less is not listed). The last row is the size of a report of an hour of 64 ranks
with full logs. Exit code 1 if a page paints later than after 1 s, an update or a frame after the load takes more than
100 ms, a console has an error, axe-core finds something serious, or that report is larger than 5 MB. All numbers are
measured; medians, greatest in brackets.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.page import chromium, synthetic

MOST_PAINT_MS, MOST_UPDATE_MS, MOST_REPORT_MB = 1000.0, 100.0, 5.0
STEP_S, HOUR_S, LOG_LINES = 0.1, 3600, 400
READ = """() => {
  const updates = performance.getEntriesByName("update");
  return {paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
    drawn: updates[0].startTime + updates[0].duration, updates: updates.slice(1).map(each => each.duration)};
}"""
WATCH = """window.frames_ms = []; new PerformanceObserver(list => list.getEntries().forEach(
  each => window.frames_ms.push(each.duration))).observe({type: "long-animation-frame"});"""


@dataclass(kw_only=True)
class Row:
    """Measurements of one page."""

    name: str
    paint_ms: list[float] = field(default_factory=list)
    drawn_ms: list[float] = field(default_factory=list)
    updates_ms: list[float] = field(default_factory=list)
    frames_ms: list[float] = field(default_factory=list)
    """Frames of 50 ms and more after the load."""
    findings: list[str] = field(default_factory=list)
    """What axe-core finds serious or critical, in light and in dark."""
    errors: list[str] = field(default_factory=list)
    report_mb: float | None = None

    def problems(self) -> list[str]:
        """Return the bars that are missed."""
        late = max(self.paint_ms, default=0.0) > MOST_PAINT_MS
        slow = max((*self.updates_ms, *self.frames_ms), default=0.0) > MOST_UPDATE_MS
        large = (self.report_mb or 0.0) > MOST_REPORT_MB
        found = {"paint": late, "update": slow, "console": bool(self.errors), "axe": bool(self.findings), "size": large}
        return [name for name, is_missed in found.items() if is_missed]

    def line(self) -> str:
        """Return a row of the table."""
        frames = f"{max(self.frames_ms):.0f} ms" if self.frames_ms else "below 50 ms" if self.paint_ms else "–"
        size = "–" if self.report_mb is None else f"{self.report_mb:.2f} MB"
        counts = [str(len(each)) if self.paint_ms else "–" for each in (self.errors, self.findings)]
        verdict = ", ".join(self.problems()) or "met"
        times = map(_text, (self.paint_ms, self.drawn_ms, self.updates_ms))
        return f"| {' | '.join([self.name, *times, frames, *counts, size, verdict])} |"


def _text(values_ms: Sequence[float]) -> str:
    return f"{statistics.median(values_ms):.0f} ms ({max(values_ms):.0f})" if values_ms else "–"


def watch(browser: Any, row: Row, address: str, updates: int) -> None:
    """Open the page once, wait for so many updates, and note what it took."""
    page, errors = chromium.open_page(browser, address, offline=address.startswith("file:"))
    page.wait_for_timeout(500)
    page.evaluate(WATCH)
    deadline_s = time.monotonic() + 10 + 3 * updates
    while len(page.evaluate(READ)["updates"]) < updates and time.monotonic() < deadline_s:
        page.wait_for_timeout(200)
    found = page.evaluate(READ)
    if len(found["updates"]) < updates:
        errors.append(f"{len(found['updates'])} updates, expected {updates}")
    row.paint_ms.append(found["paint"])
    row.drawn_ms.append(found["drawn"])
    row.updates_ms += found["updates"]
    row.frames_ms += page.evaluate("window.frames_ms")
    row.errors += errors
    page.context.close()


def look_over(browser: Any, row: Row, address: str, pictures: Path | None) -> None:
    """Have axe-core look at the page, with all lists open, in light and in dark; take pictures."""
    for scheme in ("light", "dark"):
        page, _ = chromium.open_page(browser, address, color_scheme=scheme, bypass_csp=True)
        page.wait_for_timeout(1500)
        if pictures:
            name = re.sub(r"\W+", "-", row.name)
            page.screenshot(path=pictures / f"{name}-{scheme}.png", full_page=True)
        for summary in page.query_selector_all("summary"):
            summary.click()
        row.findings += [f"axe, {scheme}: {impact}, {rule}" for impact, rule in chromium.serious_findings(page)]
        page.context.close()


@contextlib.contextmanager
def served(folder: Path, num_ranks: int, per_node: int) -> Iterator[str]:
    """Serve a run that goes on: a window of steps of every rank, and a loss, each second; yields the address."""
    ended = threading.Event()

    def go_on() -> None:
        lines = (folder / "events.jsonl").read_text().splitlines()
        events = list(map(json.loads, lines))
        last_s = events[-1]["time"]
        done = next(event["iterations"] for event in reversed(events) if event["kind"] == "iterations_done")
        with (folder / "events.jsonl").open("a") as file:
            for second in itertools.count(1):
                if ended.wait(1.0):
                    return
                done += round(1 / STEP_S)
                reported = {"rank": 0, "iterations": done, "total": 10**6, "loss": 2.0 / second}
                news = [{"time": last_s + second, "kind": "iterations_done", **reported}]
                for rank in range(num_ranks):
                    node, is_slow = f"n{rank // per_node}", rank == num_ranks - 1
                    news.append(synthetic.steps_event(rank, node, last_s + second, 10, STEP_S, slow=is_slow))
                file.write("".join(json.dumps(event) + "\n" for event in news))
                file.flush()

    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as a run does that goes on
    command = [sys.executable, "-m", "ringweave", "ui", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            ended.set()
            thread.join()
            process.terminate()  # not SIGINT, which is ignored below nohup
            os.close(descriptor)


def report(folder: Path) -> tuple[str, float]:
    """Write the report of a run; return its address and its size in MB."""
    path = folder.with_suffix(".html")
    command = [sys.executable, "-m", "ringweave", "report", "--html", str(path), str(folder)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return f"file://{path}", path.stat().st_size / 1e6


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Measure all pages."""
    runs = (("8 ranks", 8, 600, 2), (f"64 ranks x {options.steps:,} steps", 64, options.steps, 8))
    with chromium.launched() as browser:
        for name, num_ranks, num_steps, per_node in runs:
            row = Row(name=f"live, {name}")
            run = synthetic.write_run(folder / f"live-{num_ranks}", num_ranks, num_steps, per_node=per_node)
            for _ in range(options.loads):
                with served(run, num_ranks, per_node) as address:
                    watch(browser, row, address, options.updates)
            with served(run, num_ranks, per_node) as address:
                look_over(browser, row, address, options.pictures)
            yield row
        files = (("done", *runs[0]), ("failed", *runs[0]), ("done", *runs[1]))
        for outcome, name, num_ranks, num_steps, per_node in files:
            row = Row(name=f"{outcome}, {name}, file")
            run = folder / f"{outcome}-{num_ranks}"
            synthetic.write_run(run, num_ranks, num_steps, outcome=outcome, per_node=per_node)
            address, row.report_mb = report(run)
            for _ in range(options.loads):
                watch(browser, row, address, 0)
            look_over(browser, row, address, options.pictures)
            yield row
    run = synthetic.write_run(folder / "hour", 64, round(HOUR_S / STEP_S), outcome="done")
    for path in (run / "logs").iterdir():
        path.write_text("".join(f"step {number}: {'loss 1.2345 ' * 8}\n" for number in range(LOG_LINES)))
    yield Row(name="an hour of 64 ranks, full logs, file", report_mb=report(run)[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=5, help="times each page is opened")
    parser.add_argument("--updates", type=int, default=10, help="updates of a live page at each of them")
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the pages")
    options = parser.parse_args()
    if problems := chromium.problems():
        sys.exit(" ".join(problems))
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    heads = ("page", "first paint", "all drawn", "update", "longest frame later", "errors", "axe", "size", "bars")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    is_missed = False
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(options, Path(folder)):
            print(row.line(), flush=True)
            for error in (*row.errors, *row.findings):
                print(f"  {error}", file=sys.stderr)
            is_missed |= bool(row.problems())
    sys.exit(is_missed)


if __name__ == "__main__":
    main()
