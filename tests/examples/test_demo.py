"""The demo: what it reads out of two runs, its page, and the whole of it in a lab."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringweave import lab
from support import demo_data, demo_page
from support.demo_data import Kill, Run, Setting
from tests.ending import ended
from tests.plots.overlapping import overlaps
from tests.polling import wait_until

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
BATCH, STEPS = 8, 6
SHARES = {0: 5, 1: 3}


def lines(rank: int, step_s: float, computed_s: float, *, steps: range = range(1, STEPS + 1)) -> list[dict]:
    """A worker's curve: each step takes `step_s`, of which it computes for `computed_s`."""
    return [
        {
            "train_step": step,
            "samples": SHARES[rank],
            "loss": float(step + rank),
            "began_s": 100 + (step - 1) * step_s,
            "computed_s": 100 + (step - 1) * step_s + computed_s,
            "reduced_s": 100 + step * step_s - 0.01,
            "ended_s": 100 + step * step_s,
        }
        for step in steps
    ]


def write_run(folder: Path, curves: dict[int, list[dict]], by_schedule: dict[str, tuple[int, int]] | None) -> None:
    folder.mkdir()
    for rank, curve in curves.items():
        text = "".join(json.dumps(line) + "\n" for line in curve)
        (folder / f"steps-{rank}.jsonl").write_text(text + '{"train_step": 7, "cut')
    result = {"held_out_nats_per_byte": 2.0, "bigram_nats_per_byte": 2.5, "parameters": 1000}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "sample.txt").write_bytes(b"def <b>\n\n\tx = 1\xff\n")
    if by_schedule is not None:
        counted = {name: {"collectives": count, "bytes": size} for name, (count, size) in by_schedule.items()}
        training = {"exact": True, "samples_accounted": STEPS * BATCH}
        (folder / "run.json").write_text(json.dumps({"collectives_by_schedule": counted, "training": training}))
        events = [
            {"kind": "training_prepared", "time": 1.0, "shares": [4, 4]},
            {"kind": "shares_changed", "time": 2.0, "shares": [5, 3]},
            {"kind": "member_lost", "time": 3.0},
            {"kind": "shares_changed", "time": 4.0, "shares": [4, 4]},
        ]
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Run, Run]:
    """A run of each system: steps of 2 s and of 1 s, worker 1 of ringweave away from step 4 to 5."""
    write_run(tmp_path / "gloo", {0: lines(0, 2.0, 0.5), 1: lines(1, 2.0, 1.5)}, None)
    there = [*lines(1, 1.0, 0.5, steps=range(1, 4)), *lines(1, 1.0, 0.5, steps=range(6, 7))]
    replayed = [{**line, "began_s": 104.9, "ended_s": 104.99} for line in lines(1, 1.0, 0.5, steps=range(1, 3))]
    write_run(
        tmp_path / "ours",
        {0: lines(0, 1.0, 0.6), 1: there + replayed},
        {"multi-level": (10, 900), "ring": (2, 50), "native": (3, 50)},
    )
    uplinks = {1: {"r0->core": 10, "r1->core": 30}, 6: {"r0->core": 110, "r1->core": 130}}
    gloo = demo_data.load_run("DDP on Gloo", tmp_path / "gloo", uplinks, None)
    kill = Kill(rank=1, train_step=3, at_s=103.2)
    return gloo, demo_data.load_run("ringweave", tmp_path / "ours", uplinks, kill)


SETTING = Setting(
    uplink="100 Mbit/s",
    limits="duty cycle",
    cpus={"a": 0.5, "slow": 0.1},
    plan="the plan & its <table>",
    batch=BATCH,
    steps=range(2, 4),
    load=0.5,
    num_cpus=2,
)


def test_a_run_is_read_from_its_files(runs: tuple[Run, Run]) -> None:
    gloo, ours = runs
    assert (gloo.samples_per_s(SETTING.steps, BATCH), ours.samples_per_s(SETTING.steps, BATCH)) == (4.0, 8.0)
    assert gloo.losses[2] == pytest.approx((5 * 2 + 3 * 3) / 8), "by samples"
    assert ours.losses[4] == 4.0, "of those that were there"
    assert list(ours.lines[1]) == [1, 2, 3, 6], "what a late worker goes through again is left out"
    assert ours.lines[1][1]["ended_s"] == 101.0
    assert gloo.uplink_bytes_per_step() == 20.0
    assert ours.scheduled_fraction == pytest.approx(0.95)
    assert ours.shares == [5, 3]
    assert (ours.longest_gap_s, ours.returned_s) == (1.0, 105.0)
    assert (gloo.longest_gap_s, gloo.returned_s, gloo.scheduled_fraction) == (0.0, None, 0.0)


def test_the_times_of_a_step_add_up(runs: tuple[Run, Run]) -> None:
    times = runs[0].times(SETTING.steps)
    assert (times[0].compute_s, times[0].wait_s) == (pytest.approx(0.51), pytest.approx(1.0))
    assert times[1].wait_s == 0.0
    for each in times.values():
        assert each.compute_s + each.wait_s + each.communication_s == pytest.approx(2.0)


def test_the_page_says_it_in_words_and_pictures(runs: tuple[Run, Run], tmp_path: Path) -> None:
    page = demo_page.write(tmp_path, SETTING, *runs)
    assert page.sentence == (
        "ringweave trained 2.0 times as fast as DDP on Gloo: 8 against 4 samples a second (measured, steps 2 to 3)."
    )
    assert "Shares of a batch of 8, by measured speed: a 5, slow 3. 95.0% of the bytes" in page.shares_sentence
    assert "multi-level 10, ring 2; by Gloo, mostly small ones: 3" in page.shares_sentence
    assert "Rank 1 (node slow) was killed after step 3." in page.kill_sentence
    assert "a new worker had its place 2 s later; each sample was computed exactly once" in page.kill_sentence
    assert "2.500 by a bigram model (measured)" in page.sample_sentence
    assert "a duty cycle by SIGSTOP and SIGCONT, which stands in for quotas of control groups" in page.setting_sentence
    text = (tmp_path / "preface.html").read_text()
    images = re.findall(r"<img [^>]*>", text)
    assert len(images) == 4
    assert all(re.search(r' alt="[^"]{40,}"', image) for image in images)
    assert not re.findall(r'(?:src|href)="(?!data:)', text), "the file needs no other"
    assert "def &lt;b&gt;\n    x = 1?" in text
    assert "the plan &amp; its &lt;table&gt;" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert overlaps(demo_page.draw_page(page, SETTING, *runs)) == []


TINY = "--layers 1 --width 64 --max-bytes 300000 --held-out-windows 8 --sample-bytes 20"


@pytest.fixture
def out(tmp_path: Path, needs_lab: None) -> Path:
    return tmp_path / "out"


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(DEMO), "--out", str(out), *options]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_whole_demo_in_a_lab(out: Path) -> None:
    options = ["--steps", "22", "--batch", "8", "--warm-up", "4", "--kill-after", "8", "--script-options", TINY]
    done = subprocess.run(command(out, *options), capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"== ringweave trained \d\.\d times as fast as DDP on Gloo: \d+ against \d+ samples", done.stdout)
    assert "* multi-level" in done.stdout, "the plan"
    assert re.search(r"step \d+: rank 2 is killed", done.stdout)
    page = (out / "page.html").read_text()
    assert re.search(r'<h2 id="preface">ringweave trained \d\.\d times', page)
    assert page.count("data:image/svg+xml") == 4
    assert "<h2>Time line</h2>" in page
    record = json.loads((out / "ringweave" / "run.json").read_text())
    assert (record["outcome"], record["training"]["exact"]) == ("done", True)
    assert record["lab_quotas"] in ("cgroup v1", "cgroup v2")
    names = [name for name in lab.names() if name.startswith("demo-")]
    assert names == [], "the lab is down"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.distributed
def test_a_demo_that_is_killed_leaves_no_lab(out: Path) -> None:
    with ended(subprocess.Popen(command(out), stdout=subprocess.DEVNULL)) as process:
        name = f"demo-{process.pid}"
        wait_until(lambda: lab.is_up(name))
        wait_until(lambda: len(lab.find(name).processes()["slow"]) > 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
    wait_until(lambda: name not in lab.names())


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.distributed
def test_without_a_lab_it_trains_here_and_says_what_is_missed(tmp_path: Path) -> None:
    for name in ("unshare", "nsenter"):
        (tmp_path / name).write_text(f"#!{shutil.which('sh')}\necho 'Operation not permitted' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    tiny = "--steps 4 --layers 1 --width 32 --heads 2 --context 32 --batch 8 --max-bytes 300000 --held-out-windows 8"
    done = subprocess.run(
        command(tmp_path / "out", "--script-options", tiny),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "There can be no lab on this machine" in done.stdout
    assert "Missed: the racks, the thin uplink and the slow worker" in done.stdout
    assert "namespaces: 'Operation not permitted', expected" in done.stdout
    assert "a bigram model: " in done.stdout
    assert (tmp_path / "out" / "loss.png").exists()
