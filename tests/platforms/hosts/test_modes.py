"""Training modes on hosts, with real services on loopback addresses and real workers."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.launcher.small_training import SUM, epoch, prepared
from tests.launcher.test_serving_runs import SCRIPT
from tests.platforms.hosts.conftest import FakeHosts

pytestmark = pytest.mark.slow


def events_of(folder: Path) -> list[dict]:
    paths = sorted((folder / "hosts").rglob("events.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def run_in_mode(hosts: FakeHosts, mode: str) -> tuple[Path, str]:
    """Train three epochs of 130 samples on two hosts; return the run directory and what the command said."""
    folder = hosts.write_script(SCRIPT)
    done = hosts.run("run", "--hosts", "a:2,b:1", "--mode", mode, "--run-dir", "out", "train.py", timeout_s=300.0)
    assert done.returncode == 0, done.stderr
    sums = {line.split()[-1] for line in done.stdout.splitlines() if " sum " in line}
    assert len(sums) == 1  # all workers have the same parameters at the end
    return folder / "out", done.stderr


def test_rings_and_a_parameter_server(hosts: FakeHosts) -> None:
    folder, said = run_in_mode(hosts, "ps-hra")
    assert "ringweave: trained in mode ps-hra: " in said
    events = events_of(folder)
    assert {"server_started", "rings_formed", "server_exited"} <= {event["kind"] for event in events}
    counted = [event for event in events if event["kind"] == "params_counted"][-1]
    assert counted["samples"] == 390


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["balanced", "auto"])
def test_shares_and_the_planners_choice(hosts: FakeHosts, mode: str) -> None:
    folder, said = run_in_mode(hosts, mode)
    trained = json.loads((folder / "run.json").read_text())["training"]
    assert trained["exact"]
    assert mode in ("auto", trained["mode"])
    assert f"ringweave: trained in mode {trained['mode']}: " in said
    assert ". 390 samples in 3 epochs, each exactly once.\n" in said


RINGS_SCRIPT = f"""{prepared(num_samples=96, batch=24, lr=0.1, shuffles=True)}
here = pathlib.Path({{folder!r}})
for epoch in loader.epochs(4):
{epoch(indent=4)}
    if epoch in (0, 2):
        (here / f"waits-{{{{epoch}}}}-{{{{os.environ['RANK']}}}}").touch()
        while not (here / f"killed-{{{{epoch}}}}").exists():
            time.sleep(0.05)
{SUM}"""


def events_on(hosts: FakeHosts, *names: str) -> list[dict]:
    paths = [path for name in names for path in hosts.run_files(name) if path.name == "events.jsonl"]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def last_leader(hosts: FakeHosts) -> tuple[int, int, int]:
    """Server, term and number of members of the newest leadership record."""
    found = [each for each in events_on(hosts, "a", "b") if each["kind"] == "params_leader_changed"]
    newest = max(found, key=lambda each: each["record"], default=None)
    return (newest["server"], newest["term"], len(newest["members"])) if newest else (-1, -1, 0)


@pytest.mark.thorough
def test_a_worker_and_the_leading_server_are_killed_and_the_standby_takes_over(hosts: FakeHosts) -> None:
    folder = hosts.write_script(RINGS_SCRIPT.format(folder=str(hosts.root)))
    words = ("run", "--hosts", "a,b,c", "--mode", "ps-hra", "--elastic", "1:3", "--standby", "--run-dir", "out")
    command = hosts.start(*words, "train.py")

    def wait(number: int, ranks: range, leader: tuple[int, int, int]) -> None:
        paths = [hosts.root / f"waits-{number}-{rank}" for rank in ranks]

        def holds() -> bool:
            assert command.poll() is None, command.communicate()
            return all(path.exists() for path in paths) and last_leader(hosts) == leader

        hosts.wait(holds, f"all wait after epoch {number}, and {leader} leads", 240.0)

    def kill(name: str, kind: str) -> None:
        os.kill([each for each in events_on(hosts, name) if each["kind"] == kind][-1]["pid"], signal.SIGKILL)

    wait(0, range(3), (0, 0, 2))
    kill("c", "worker_started")
    kill("a", "server_started")
    wait(0, range(3), (1, 1, 2))  # the killed one follows
    (hosts.root / "killed-0").touch()
    wait(2, range(2), (1, 1, 2))
    kill("b", "server_started")
    wait(2, range(2), (0, 2, 2))
    (hosts.root / "killed-2").touch()
    output, errors = command.communicate(timeout=240.0)
    assert command.returncode == 0, errors
    assert len({line.split()[-1] for line in output.splitlines() if " sum " in line}) == 1
    events = events_of(folder / "out")
    accounted = {each["epoch"]: each["samples"] for each in events if each["kind"] == "samples_accounted"}
    assert accounted == dict.fromkeys(range(4), 96)
    counted = max((each for each in events if each["kind"] == "params_counted"), key=lambda each: each["version"])
    assert counted["version"] >= 4 * 96 // 24, "a batch of all rings is at least one push"
