"""The verbs of jobs on plain runs: `ringweave status RUN_DIR` and others, on runs of real workers."""

import json
import re
import signal

import pytest

from tests.launcher.conftest import ringweave

pytestmark = pytest.mark.distributed

WAIT = """
    import time
    print("rank", os.environ["RANK"], "waits", flush=True)
    time.sleep(600)
"""


def view(path: object) -> dict:
    done = ringweave("status", str(path), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_is_seen_and_stopped_by_its_run_directory(start, script) -> None:
    run = start("--workers", "2,1", script(WAIT))
    run.wait_printed("waits", 3)
    path = str(run.run_dir)
    seen = view(path)
    assert (seen["state"], seen["workers"], seen["platform"]) == ("Running", 3, "runs")
    assert [(node["name"], node["workers"]) for node in seen["nodes"]] == [("node0", 2), ("node1", 1)]
    assert ringweave("why", path).stdout == f"{path} is Running: no reason to wait.\n"
    assert sorted(ringweave("logs", path).stdout.splitlines()) == [f"[{rank}] rank {rank} waits" for rank in range(3)]
    assert ringweave("logs", path, "--rank", "2").stdout == "[2] rank 2 waits\n"
    assert "worker_started" in ringweave("events", path).stdout
    refused = ringweave("suspend", path)
    assert refused.returncode == 2
    assert "'a run without a job', expected stop. Submit a job for that" in refused.stderr
    assert ringweave("stop", path).returncode == 0
    assert run.wait_ended() == 1
    assert view(path)["state"] == "Stopped"
    refused = ringweave("stop", path)
    assert (refused.returncode, refused.stderr) == (
        2,
        f"ringweave: error: run {path}: 'ended', expected one that runs. Nothing to do.\n",
    )


def test_ends_of_runs(start, script) -> None:
    done = start("--workers", "1", script("print('fine')"))
    assert done.wait_ended() == 0
    assert view(done.run_dir)["state"] == "Succeeded"
    killed = start("--workers", "1", script(WAIT))
    killed.wait_printed("waits")
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    seen = view(killed.run_dir)
    assert seen["state"] == "Failed"
    assert seen["reason"]["text"] == "its command was killed, and the workers ended with it"


def test_a_folder_of_something_else_is_named(tmp_path) -> None:
    (tmp_path / "run.json").write_text("[]")
    refused = ringweave("status", str(tmp_path))
    assert refused.returncode == 2
    assert f"run.json of {tmp_path}: 'another file', expected the record of a run." in refused.stderr
    refused = ringweave("status", "nothing", "--on", "runs")
    assert "run: 'nothing', expected a folder with a run.json. Give the path of its run directory" in refused.stderr


FLOOD = """
    print("rank", rank, "begins", flush=True)
    if rank == 0:
        for _ in range(300):
            sys.stdout.write("x" * 100_000)
        print("\\nlast of 0")
    else:
        for number in range(300_000):
            print("line", number, "y" * 80)
"""
GONE = re.compile(r"\[[01]\] \[ringweave\] (\d+) earlier lines are gone")


@pytest.mark.slow
def test_logs_of_workers_that_print_without_end_are_limited_and_followed(start, script) -> None:
    limits = ("--log-max-size", "256KiB", "--log-max-files", "3")
    run = start("--workers", "2", *limits, script(FLOOD))
    run.wait_printed("begins", 2)
    path = str(run.run_dir)
    followed = ringweave("logs", path, "--rank", "1", "--follow").stdout.splitlines()
    assert run.wait_ended() == 0, run.stderr
    for rank in range(2):
        files = list((run.run_dir / "logs").glob(f"rank-{rank}.log*"))
        assert len(files) == 3
        assert sum(each.stat().st_size for each in files) <= 3 * 2**18
    gone = sum(int(match[1]) for line in followed if (match := GONE.match(line)))
    numbers = [int(line.split()[2]) for line in followed if line.startswith("[1] line")]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 299_999
    assert gone + len(followed) - sum(map(bool, map(GONE.match, followed))) == 300_001
    later = ringweave("logs", path).stdout.splitlines()
    assert sum(map(bool, map(GONE.match, later))) == 2
    assert {"[0] last of 0", f"[1] line 299999 {'y' * 80}"} <= set(later)


def test_events_of_a_run_are_followed_to_its_end(start, script) -> None:
    run = start("--workers", "2", script("print('begins', flush=True)\ntime.sleep(1)"))
    run.wait_printed("begins", 2)
    followed = ringweave("events", str(run.run_dir), "--follow").stdout.splitlines()
    assert run.wait_ended() == 0
    listed = ringweave("events", str(run.run_dir)).stdout.splitlines()[1:]
    assert [line.split() for line in followed] == [line.split() for line in listed]
    assert [line.split()[2] for line in followed][::5] == ["run_started", "run_ended"]
    refused = ringweave("events", str(run.run_dir), "--follow", "--json")
    assert "-o: 'json', expected table with --follow, which never ends." in refused.stderr


SLOW_RANK = """
import gc, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(192, 6)), batch_size=8)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader, mode="sync")
model.module.register_forward_hook(lambda *_: time.sleep(0.1 if rank == 2 else 0.0))
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_says_which_rank_the_others_wait_for_and_what_would_help(start, script) -> None:
    run = start("--workers", "3", script(SLOW_RANK))
    assert run.wait_ended() == 0, run.stderr
    (line,) = [each for each in run.stderr.splitlines() if "time is lost" in each]
    assert line.startswith("ringweave: forward: ")
    assert "The others wait for rank 2 on node " in line
    assert "Use --mode balanced" in line
    answered = ringweave("why", str(run.run_dir)).stdout.splitlines()
    assert line.removeprefix("ringweave: ") in answered
    (loss,) = [
        each for each in json.loads(ringweave("why", str(run.run_dir), "--json").stdout)["losses"] if each["rank"]
    ]
    assert (loss["cause"], loss["rank"]) == ("forward", 2)
    assert loss["cost"] > 0.3
