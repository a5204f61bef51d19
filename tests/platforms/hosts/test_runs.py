"""`ringweave run --hosts`, attach and the verbs on runs, with real services on loopback addresses."""

import json
import os
import signal
import time

import pytest

from tests.platforms.hosts.conftest import FakeHosts

HELLO = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["RINGWEAVE_NODE"], sys.argv[1:])
print(open("data.txt").read())
"""
UNTIL_FILE = """
import os, time
print("rank", os.environ["RANK"], "begins", flush=True)
while not os.path.exists({path!r}):
    time.sleep(0.05)
print("rank", os.environ["RANK"], "ends", flush=True)
"""


def begun(hosts: FakeHosts, number: int = 3) -> bool:
    """Whether all workers have begun."""
    logs = [path for name in hosts.names for path in hosts.run_files(name) if path.name.startswith("rank-")]
    return sum("begins" in path.read_text() for path in logs) == number


def wait_nothing_left(hosts: FakeHosts) -> None:
    """Wait until no process and no file of a run is left on the hosts."""
    hosts.wait(lambda: not any(hosts.processes(each) or hosts.run_files(each) for each in hosts.names), "nothing left")


def test_output_is_merged_and_nothing_is_left(hosts: FakeHosts) -> None:
    folder = hosts.write_script(HELLO)
    (folder / "data.txt").write_text("some data")
    done = hosts.run("run", "--hosts", "a:2,b,c:1", "--run-dir", "out", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank, node in enumerate(["a", "a", "b", "c"]):
        assert f"[{rank}] rank {rank} of 4 on {node} ['--lr', '0.1']" in lines
        assert f"[{rank}] some data" in lines
        assert "some data" in (folder / "out" / "logs" / f"rank-{rank}.log").read_text()
    record = json.loads((folder / "out" / "run.json").read_text())
    assert (record["outcome"], record["exit_code"], record["world_size"]) == ("done", 0, 4)
    assert (folder / "out" / "hosts" / "b" / "b" / "1" / "round-1" / "events.jsonl").exists()
    wait_nothing_left(hosts)
    assert hosts.ask("jobs", "--on", "hosts").stdout == "no jobs\n"


def test_the_first_cause_is_reported(hosts: FakeHosts) -> None:
    folder = hosts.write_script("import os\nif os.environ['RANK'] == '1': raise ValueError('no such file')\n")
    done = hosts.run("run", "--hosts", "a,b", "--run-dir", "out", "train.py")
    assert done.returncode == 1
    assert "s: rank 1 on node b raised ValueError: no such file.\n" in done.stderr
    assert "Last lines of out/logs/rank-1.log:\n    Traceback (most recent call last):" in done.stderr
    record = json.loads((folder / "out" / "run.json").read_text())
    assert (record["outcome"], record["cause"]) == ("failed", "rank 1 on node b raised ValueError: no such file")
    wait_nothing_left(hosts)


def test_ctrl_c_ends_the_run(hosts: FakeHosts) -> None:
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    command = hosts.start("run", "--hosts", "a,b", "train.py")
    hosts.wait(lambda: begun(hosts, 2), "workers begin")
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 1
    assert "stopping all workers" in errors
    assert " s by SIGINT.\n" in errors
    wait_nothing_left(hosts)


@pytest.mark.thorough  # daily: the command is killed in test_verbs_work_from_the_start_and_from_any_host
@pytest.mark.parametrize("how", ["detached", "killed", "hung up"])
def test_the_command_may_go_and_come_back(hosts: FakeHosts, how: str) -> None:
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    words = ["run", "--hosts", "a,b", "--name", "mine", *(["--detach"] if how == "detached" else []), "train.py"]
    command = hosts.start(*words)
    if how == "detached":
        _, errors = command.communicate(timeout=300)
        assert command.returncode == 0
        assert "it continues without this command: ringweave attach mine, ringweave stop mine" in errors
    hosts.wait(lambda: begun(hosts, 2), "workers begin")
    if how != "detached":
        os.killpg(command.pid, signal.SIGKILL if how == "killed" else signal.SIGHUP)
        command.communicate(timeout=300)
    assert hosts.ask("status", "mine").stdout.startswith("mine: Running")
    (hosts.root / "end").touch()
    done = hosts.run("attach", "mine")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] rank {r} {w}" for r in range(2) for w in ("begins", "ends")]
    wait_nothing_left(hosts)


def test_verbs_work_from_the_start_and_from_any_host(hosts: FakeHosts) -> None:
    """They need no command that follows the run: it is killed."""
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    command = hosts.start("run", "--hosts", "a,b,c", "--name", "mine", "train.py")
    hosts.wait(lambda: begun(hosts), "workers begin")
    os.killpg(command.pid, signal.SIGKILL)
    command.communicate(timeout=300)
    for host in (None, "c"):
        assert hosts.ask("status", "mine", host=host).stdout.startswith("mine: Running")
        assert hosts.ask("why", "mine", host=host).stdout == "mine is Running: no reason to wait.\n"
        lines = hosts.ask("logs", "mine", host=host).stdout.splitlines()
        assert sorted(lines) == [f"[{rank}] rank {rank} begins" for rank in range(3)]
        assert "node b, attempt 1 was created" in hosts.ask("events", "mine", host=host).stdout
        assert "mine" in hosts.ask("jobs", "--on", "hosts", host=host).stdout
    scaled = hosts.ask("scale", "mine", "--workers", "1")
    expected = "run: 'mine', expected a run with --elastic MIN:MAX. Start it again with ringweave run --elastic."
    assert (scaled.returncode, scaled.stdout, scaled.stderr) == (2, "", f"ringweave: error: {expected}\n")
    stopped = hosts.ask("stop", "mine", host="b")
    assert (stopped.returncode, stopped.stdout) == (0, "mine: it will stop\n")
    hosts.wait_state("Stopped")
    assert "mine: Stopped" in hosts.ask("status", "mine").stdout
    assert hosts.ask("stop", "mine").returncode == 2
    assert hosts.ask("delete", "mine").stdout == "mine: removed\n"
    wait_nothing_left(hosts)
    gone = hosts.ask("status", "mine", "--on", "hosts")
    assert gone.returncode == 2
    assert "run: 'mine', expected a run that was started here, or has this host." in gone.stderr


@pytest.mark.thorough
def test_a_finished_run_is_kept_until_it_is_deleted(hosts: FakeHosts) -> None:
    hosts.write_script("print('done')")
    assert hosts.run("run", "--hosts", "a,b,c", "--name", "mine", "--detach", "train.py").returncode == 0
    hosts.wait_state("Succeeded")
    for name in hosts.names:
        hosts.kill(name, "ringweave.platforms.hosts.service")
    assert hosts.ask("status", "mine").stdout.startswith("mine: Succeeded")
    assert sorted(hosts.ask("logs", "mine").stdout.splitlines()) == [f"[{rank}] done" for rank in range(3)]
    assert hosts.ask("delete", "mine").returncode == 0
    wait_nothing_left(hosts)


@pytest.mark.parametrize("victim", ["a", pytest.param("b", marks=pytest.mark.thorough)])
def test_the_run_survives_the_death_of_a_host_service(hosts: FakeHosts, victim: str) -> None:
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    command = hosts.start("run", "--hosts", "a,b,c", "--name", "mine", "train.py")
    hosts.wait(lambda: begun(hosts), "workers begin")
    hosts.kill(victim, "ringweave.platforms.hosts.service")
    time.sleep(1.0)
    (hosts.root / "end").touch()
    out, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    assert sorted(out.splitlines()) == [f"[{r}] rank {r} {w}" for r in range(3) for w in ("begins", "ends")]
    wait_nothing_left(hosts)


def test_a_submitted_job_runs_on_the_hosts_of_its_file(hosts: FakeHosts) -> None:
    folder = hosts.write_script(HELLO)
    (folder / "data.txt").write_text("some data")
    nodes = "[{name: a, capacity: 2}, {name: b, capacity: 1}, {name: c, capacity: 2}]"
    job = f"name: filed\ncpu_workers: 4\nscript: train.py\ndirectory: .\nmin_per_node: 2\nnodes: {nodes}\n"
    (folder / "job.yaml").write_text(job)
    done = hosts.run("submit", "--on", "hosts", "--yes", "job.yaml")
    assert done.returncode == 0, done.stderr
    assert "[3] rank 3 of 4 on c []" in done.stdout.splitlines()
    assert hosts.ask("delete", "filed").returncode == 0
    wait_nothing_left(hosts)


def test_a_run_on_this_machine_outlives_its_command_without_ssh(hosts: FakeHosts) -> None:
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    (hosts.root / "bin" / "ssh").write_text("#!/bin/sh\nexit 9\n")
    started = hosts.run("run", "--workers", "2", "--name", "here", "--detach", "train.py")
    assert started.returncode == 0, started.stderr
    assert "here: 2 workers on localhost (2)" in started.stderr
    attached = hosts.start("attach", "here")
    hosts.wait(lambda: "here: Running" in hosts.ask("status", "here").stdout, "it runs")
    (hosts.root / "end").touch()
    out, errors = attached.communicate(timeout=300)
    assert attached.returncode == 0, errors
    assert sorted(out.splitlines()) == [
        f"[{rank}] rank {rank} {word}" for rank in (0, 1) for word in ("begins", "ends")
    ]


def test_workers_of_several_nodes_are_not_detached(hosts: FakeHosts) -> None:
    hosts.write_script("")
    done = hosts.run("run", "--workers", "2,1", "--detach", "train.py")
    text = "--detach: '--workers 2,1', expected one node. Give one number of workers, or leave it out."
    assert (done.returncode, done.stderr) == (2, f"ringweave: error: {text}\n")


@pytest.mark.thorough
def test_each_host_of_an_elastic_run_keeps_spares_and_none_is_left(hosts: FakeHosts) -> None:
    imports_itself = 'import os\nos.environ.setdefault("OMP_NUM_THREADS", "1")\n'
    hosts.write_script(imports_itself + UNTIL_FILE.format(path=str(hosts.root / "end")))
    command = hosts.start("run", "--hosts", "a,b,c", "--elastic", "2:3", "--spares", "1", "train.py")

    def ready(name: str) -> int:
        logs = [path for path in hosts.run_files(name) if path.name == "events.jsonl"]
        return sum(path.read_text().count('"spare_ready"') for path in logs)

    hosts.wait(lambda: begun(hosts) and [ready(name) for name in "abc"] == [1, 1, 1], "a spare on each host", 120.0)
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=300)
    assert command.returncode == 1, errors
    wait_nothing_left(hosts)
