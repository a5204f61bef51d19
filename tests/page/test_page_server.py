"""The live page and the report, by HTTP and in a real browser where there is one."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest

from ringweave.cli import main
from tests import demands, polling
from tests.ending import ended
from tests.page import chromium, synthetic
from tests.page.chromium import FOCUSED, open_page, wait_for
from tests.telemetry.examples import example


@pytest.fixture
def live_run(tmp_path: Path) -> Iterator[Path]:
    """A run directory that somebody holds, as `ringweave run` does."""
    folder = synthetic.write_run(tmp_path / "live", 8, 400, per_node=2)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield folder
    os.close(descriptor)


@pytest.fixture
def served(live_run: Path) -> Iterator[str]:
    """Address of the page of that run, with its token."""
    command = [sys.executable, "-m", "ringweave", "ui", str(live_run)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield line.split()[-1]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 0


def fetch(address: str, jar: CookieJar | None = None) -> tuple[int, str, Any]:
    opener = urllib.request.build_opener(*([urllib.request.HTTPCookieProcessor(jar)] if jar is not None else []))
    try:
        with opener.open(address, timeout=300) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@pytest.mark.slow
@pytest.mark.e2e
def test_without_the_token_nobody_sees_anything(served: str, live_run: Path) -> None:
    base = served.partition("?")[0]
    assert base.startswith("http://127.0.0.1:")
    for path in ("", "?token=wrong", "live", "live?token=wrong", "static/page.js", "static/page.css", "nothing"):
        code, text, headers = fetch(base + path)
        assert (code, text) == (403, "This page needs the address that ringweave ui has printed, with its token.\n")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    jar = CookieJar()
    code, text, headers = fetch(served, jar)
    assert (code, "<title>ringweave</title>" in text) == (200, True)
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert fetch(base + "static/page.js", jar)[0] == 200
    assert fetch(base + "static/../run_model.py", jar)[0] == 404
    assert str(live_run) not in text, "facts come by the stream alone"


@pytest.mark.slow
@pytest.mark.e2e
def test_the_stream_has_all_at_first_and_then_what_has_changed(served: str, live_run: Path) -> None:
    jar = CookieJar()
    fetch(served, jar)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    with opener.open(served.partition("?")[0] + "live", timeout=300) as stream:
        first = next_sections(stream)
        while first["counts"]["events"] < 60:
            first |= next_sections(stream)
        assert (first["head"]["state"], first["progress"]["train_step"]) == ("Running", 400)
        with (live_run / "events.jsonl").open("a") as file:
            for rank in range(8):
                event = synthetic.steps_event(rank, "n0", synthetic.BEGIN_S + 60, 20, 0.1, slow=False)
                file.write(json.dumps(event) + "\n")
        news: dict[str, Any] = {}
        while news.get("counts", first["counts"])["events"] < first["counts"]["events"] + 8:
            news |= next_sections(stream)
        assert {"steps", "ranks"} <= set(news)
        assert not {"topology", "events", "logs"} & set(news)


def next_sections(stream: Any) -> dict[str, Any]:
    line = stream.readline()
    while not line.startswith(b"data: "):
        line = stream.readline()
    return json.loads(line.removeprefix(b"data: "))


def test_a_page_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", "--on", "runs", "--html", str(tmp_path / "out.html"), str(tmp_path / "nowhere")]
    assert main.run_command_line(words) == 2
    assert "expected a folder with a run.json" in capsys.readouterr().err
    assert main.run_command_line(["report", "--html", str(tmp_path / "no" / "out.html"), "x"]) == 2
    assert "expected a file that can be written" in capsys.readouterr().err


def test_a_port_that_is_taken(served: str, live_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = re.findall(r":(\d+)/", served)[0]
    assert main.run_command_line(["ui", "--port", port, str(live_run)]) == 1
    assert "expected a free address of this machine. Choose another --host or --port" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.e2e
def test_a_page_ends_with_the_program_that_has_started_it(live_run: Path) -> None:
    command = [sys.executable, "-m", "ringweave", "ui", str(live_run)]
    starter = f"import subprocess; subprocess.run({command!r})"
    reading, writing = os.pipe()
    with ended(subprocess.Popen([sys.executable, "-c", starter], stdout=writing, text=True)) as process:
        os.close(writing)
        with os.fdopen(reading) as output:
            page = int(re.findall(r"127.0.0.1:(\d+)/", output.readline())[0])
            process.kill()
        polling.wait_until(lambda: not is_listened_at(page), lambda: "the page goes on", 60.0)


def is_listened_at(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("words", [["ui"], ["report", "--html", "out.html"]])
def test_a_run_of_another_format_is_refused_and_not_served_empty(
    words: list[str], live_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(live_run)
    started = {**next(synthetic.events(8, 1)), "format": 99}
    (live_run / "events.jsonl").write_text(json.dumps(started) + "\n")
    assert main.run_command_line([*words, str(live_run)]) == 2
    assert "format of the events file: 99, expected " in capsys.readouterr().err


@pytest.fixture
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Chromium; the test is skipped where there is none, or fails where one is demanded.

    For one test: playwright has an event loop in its thread as long as it runs, and other tests have their own.
    """
    demands.need(request.config, demands.BROWSER, chromium.problems())
    with chromium.launched() as found:
        yield found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("outcome", ["done", "failed"])
def test_a_report_from_the_disk(browser: Any, tmp_path: Path, outcome: str, scheme: str) -> None:
    folder = synthetic.write_run(tmp_path / "run", 8, 600, outcome=outcome, per_node=2)
    assert main.run_command_line(["report", "--html", str(tmp_path / "run.html"), str(folder)]) == 0
    page, troubles = open_page(browser, f"file://{tmp_path / 'run.html'}", color_scheme=scheme, offline=True)
    assert page.inner_text("#state") == {"done": "Succeeded", "failed": "Failed"}[outcome]
    assert "the others wait for rank 7" in page.inner_text("#losses").lower()
    if outcome == "failed":
        assert "rank 1 failed: <script>alert(1)</script>\\x1b[31m red ⟨U+202E⟩desrever⟨U+2066⟩" in page.inner_text(
            "#reason"
        )
        assert "<script>alert(1)</script>" in page.inner_text("#events")
    assert "rank 7 <script>alert(1)</script>\\x1b[31m" in page.inner_text("#logs")
    assert page.evaluate("document.querySelectorAll('main script').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300
    assert troubles == []


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("scheme", "outcome"),
    [("light", "failed"), pytest.param("dark", "failed", marks=pytest.mark.thorough), ("dark", "done")],
)
def test_axe_finds_nothing_serious(browser: Any, tmp_path: Path, scheme: str, outcome: str) -> None:
    folder = synthetic.write_run(tmp_path / "run", 8, 600, outcome=outcome, per_node=2)
    add_rings_and_stages(folder)
    assert main.run_command_line(["report", "--html", str(tmp_path / "run.html"), str(folder)]) == 0
    options = {"color_scheme": scheme, "bypass_csp": True}  # axe comes as another script
    page, _ = open_page(browser, f"file://{tmp_path / 'run.html'}", **options)
    for summary in page.query_selector_all("summary"):
        summary.click()
    assert chromium.serious_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300, "nothing sticks out, long texts wrap"


def add_rings_and_stages(folder: Path) -> None:
    """Add what only some runs have: rings with a parameter server, stages of a pipeline, a changed share."""
    counted = {"version": 9, "staleness": {"0": 5, "1": 4}, "pushes": {"0": 5, "1": 4}, "samples": 90}
    counted |= {"train_steps": 3, "received_bytes": 10**6, "sent_bytes": 2 * 10**6}
    shares = {"batch": 3, "shares": [32] * 8, "predicted_before_s": 0.09, "predicted_after_s": 0.07}
    stages = {"blocks": 9, "splits": [4], "compute_s": [0.1, 0.2], "speeds": [1, 1]}
    events = [
        example("rings_formed", rings=[[0, 1], [2, 3]], most_staleness_versions=4),
        example("params_counted", **counted),
        example("shares_changed", **shares),
        example("pipeline_measured", **stages, measured_s=0.4, predicted_s=0.38),
    ]
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event | {"time": synthetic.BEGIN_S + 60}) + "\n" for event in events)


@pytest.mark.slow
@pytest.mark.e2e
def test_each_demand_has_its_place(browser: Any, tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 8, 600, outcome="done", per_node=2)
    add_rings_and_stages(folder)
    assert main.run_command_line(["report", "--html", str(tmp_path / "run.html"), str(folder)]) == 0
    page, troubles = open_page(browser, f"file://{tmp_path / 'run.html'}")
    for summary in page.query_selector_all("summary"):
        summary.click()
    wanted = {
        "#tiles": ("Train step", "600", "Samples per second", "Loss", "Time computing", "Mode"),
        "#training": ("Mode sync: asked for.", "90 ms before, 70 ms after it (predicted)", "now (measured)"),
        "#nodes": ("n3", "ranks 6, 7", "Succeeded", "4.33 GB", "communication"),
        "#ranks": ("n3", "32", "2.17 GB", "wait for others", "parts of a step (measured)"),
        "#topology": ("r0", "92.8Mbit/s up", "measured, binds", "cut between r0 and core", "100 Mbit/s"),
        "#timeline": ("attempt 1: done", "0 deaths", "shares_changed"),
        "#collectives": ("multi-level", "bound (predicted)", "measured / predicted", "exact"),
        "#traffic": ("multi-level", "15 GB"),
        "#groups": ("Staleness of pushes, in versions (measured; bound 4)", "2 MB sent"),
        "#stages": ("balance (measured)", "380 ms simulated, 400 ms measured"),
        "#left-out": ("Bytes saved",),
    }
    for selector, texts in wanted.items():
        shown = page.text_content(selector)
        assert [text for text in texts if text not in shown] == [], f"{selector}: {shown}"
    assert troubles == []


@pytest.mark.slow
@pytest.mark.e2e
def test_keys_alone_suffice(browser: Any, tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", 4, 600, outcome="done", per_node=2)
    assert main.run_command_line(["report", "--html", str(tmp_path / "run.html"), str(folder)]) == 0
    page, troubles = open_page(browser, f"file://{tmp_path / 'run.html'}")
    reached: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
        if reached.count(reached[0]) > 1:
            break
        if reached[-1].startswith("Loss over time"):
            page.keyboard.press("End")
            assert re.match(r"\d\d:\d\d:\d\d: loss \d", page.inner_text("#loss .readout"))
        if reached[-1].startswith("Wait of 4 ranks"):
            page.keyboard.press("ArrowDown")
            assert re.search(r"rank [123] waited \d+ % of a step", page.inner_text("#waits .readout"))
        if reached[-1] == "Show events and output of rank 2":
            page.keyboard.press("Enter")
            assert page.input_value("#rank") == "2"
            assert "rank 2, 42 of 42 lines" in page.inner_text("#logs")
        if reached[-1] == "As a list":
            page.keyboard.press("Enter")
            assert "attempt 1: done" in page.inner_text("#timeline")
    wanted = {"Skip to the run", "theme", "Table of ranks", "rank", "search", "Events, newest last", "As a list"}
    assert wanted <= set(reached)
    assert any(each.startswith("Wait of 4 ranks") for each in reached)
    assert troubles == []


@pytest.mark.slow
@pytest.mark.e2e
def test_a_live_page_follows_the_run(browser: Any, served: str, live_run: Path) -> None:
    page, troubles = open_page(browser, served)
    wait_for(page, "#tiles", "400")
    assert "token" not in page.url
    page.focus("#ranks button")
    page.click("#timeline summary")
    page.focus("#ranks button")
    before = page.evaluate("performance.getEntriesByName('update').length")
    with (live_run / "events.jsonl").open("a") as file:
        done = {"rank": 0, "iterations": 399_999, "total": 500_000, "loss": float("nan")}
        file.write(json.dumps({"time": synthetic.BEGIN_S + 60, "kind": "iterations_done", **done}) + "\n")
        failed = example("communication_failed", time=synthetic.BEGIN_S + 60, text=synthetic.HOSTILE)
        file.write(json.dumps(failed) + "\n" + 2 * '{"time": 1.0, "kind": "schedule_measured"}\n')
    wait_for(page, "#tiles", "399,999")
    assert "nan" in page.inner_text("#tiles")
    wait_for(page, "#events", "communication_failed")
    wait_for(page, "#unread", "2 records of the event log could not be read: schedule_measured without rank (2).")
    assert page.evaluate("performance.getEntriesByName('update').length") > before
    assert page.evaluate(FOCUSED) == "Show events and output of rank 0", "an update leaves the focus"
    assert "attempt 1: goes on" in page.inner_text("#timeline"), "and what was opened"
    (live_run / "run.json").write_text((live_run / "run.json").read_text().replace('"running"', '"done"'))
    wait_for(page, "#state", "Succeeded")
    assert troubles == []
