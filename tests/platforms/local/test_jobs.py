"""Whole lives of jobs with real supervisors, agents and workers; the workers are plain Python."""

import os
import pty
import signal
import sys
from pathlib import Path

import psutil
import pytest

from ringweave.errors import JobError
from ringweave.jobs.records import JobRecord
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms.api import LogQuery
from ringweave.platforms.local.job_folder import REGISTRY
from ringweave.platforms.local.registry import LocalJobRegistry
from ringweave.platforms.remote import RemotePlatform
from tests.platforms.local.conftest import Here, Running, processes_of
from tests.platforms.served import TOKEN, served
from tests.polling import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# By name: for a script that imports ringweave, the launcher of each node would import torch beforehand.
PRINTING = """
import importlib, os
ringweave = importlib.import_module("ringweave")
with ringweave.Iterations() as iterations:
    iterations.done(3, 0.25)
keys = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK RINGWEAVE_NODE RINGWEAVE_DATA MINE".split()
print(*(os.environ[key] for key in keys), os.getcwd())
"""
UNTIL = """
import os, pathlib, sys, time
print("begun", flush=True)
deadline = time.monotonic() + 300
while not pathlib.Path("finish").exists():
    assert time.monotonic() < deadline
    time.sleep(0.02)
"""


def text_of(here: Here, **query: object) -> list[str]:
    return [line.text for line in here.service.logs("job", LogQuery(**query))]


def test_workers_have_the_ranks_of_the_whole_job_and_all_is_removed_by_ttl(here: Here) -> None:
    here.submit(PRINTING, 2, 1, environment={"MINE": "yes"}, data="/data", ttl_s=3600.0)
    job = here.wait_state("Succeeded")
    assert text_of(here) == [
        f"{rank} {local} 3 {count} {node} n{node} /data yes {here.folder}"
        for rank, local, count, node in ((0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1, 1))
    ]
    assert text_of(here, node="n1") == text_of(here, rank=2)
    assert [(node.iterations, node.last_loss) for node in job.nodes] == [(3, 0.25)] * 2
    assert {event.kind for event in job.events} >= {"AttemptStarted", "Succeeded"}
    runs = Path(job.files) / "n1"
    names = {str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()}
    expected = {"logs/rank-2.log", "run.json", "events.jsonl", "cluster.yaml"}
    assert names == {f"1/round-1/{name}" for name in expected} | {"1/agent.log", "1/script/script.py"}
    here.service.act("job", "delete")
    here.wait_gone()
    here.wait_nothing_left()


def test_what_is_kept_is_removed_after_the_ttl(here: Here) -> None:
    here.submit("print(1)", 1, ttl_s=0.5)
    here.wait_gone()
    here.wait_nothing_left()


def test_a_group_that_is_killed_alone_is_replaced_and_pays(here: Here) -> None:
    here.submit(UNTIL, 1, 2, max_retries=1)
    here.wait(lambda job: text_of(here).count("begun") == 3)
    agent = next(p.process for p in processes_of(here.state) if p.command[-2:] == ["1", "1"])
    agent.send_signal(signal.SIGKILL)
    job = here.wait(lambda job: job.state == "Running" and job.round == 2)
    here.wait(lambda job: text_of(here).count("begun") == 6)
    assert [(node.retries, node.attempts[-1].attempt) for node in job.nodes] == [(0, 1), (1, 2)]
    assert job.nodes[1].attempts[0].text == "its agent was killed"
    assert (job.nodes[1].attempts[0].cause, job.nodes[1].attempts[0].charged) == ("Platform", True)

    worker = here_worker(here, "n1")
    worker.send_signal(signal.SIGKILL)
    job = here.wait_state("Failed")
    assert job.reason is not None
    assert job.reason.code == "BackoffLimitExceeded"
    assert "was killed by SIGKILL" in job.reason.text
    assert text_of(here, node="n1", attempt=1) == text_of(here, node="n1", attempt=2) == ["begun", "begun"]


def here_worker(here: Here, node: str):
    return next(
        p.process for p in processes_of(here.state) if p.environ.get("RINGWEAVE_NODE") == node and "RANK" in p.environ
    )


FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("a", flush=True)
    time.sleep(0.5)
    print("b", end="")
    sys.exit(3)
"""


def test_logs_are_followed_to_the_end_and_an_error_of_the_script_is_not_tried_again(here: Here) -> None:
    here.submit(FAILS, 1, 1)
    assert text_of(here, follow=True) == ["a", "b"]
    job = here.wait_state("Failed")
    assert job.reason is not None
    assert (job.reason.code, job.round, job.run) == ("NonZeroExitCode", 1, 1)
    assert "rank 1 ended with exit code 3" in job.reason.text
    assert [node.retries for node in job.nodes] == [0, 0]


def test_it_outlives_the_terminal_that_it_was_submitted_in(here: Here) -> None:
    (here.folder / "script.py").write_text(UNTIL)
    job = ["--name", "job", "--script", "script.py", "--cpu-workers", "2", "--capacity", "1,1", "--min-per-node", "1"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here.folder)
        environ = {**os.environ, "XDG_STATE_HOME": str(here.state.parent)}
        os.execve(sys.executable, [sys.executable, "-m", "ringweave", "submit", "-y", *job], environ)
    wait_until(lambda: (here.state / REGISTRY).exists() and bool(here.service.jobs()), "its submission")
    here.wait_state("Running")
    (before,) = led_by(here, "supervisor_main")
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGHUP, "who followed it has gone with the terminal"
    assert [each.process for each in led_by(here, "supervisor_main")] == [before.process]
    own = {os.getsid(each.process.pid) for each in processes_of(here.state)}
    assert pid not in own, "nothing of the job belongs to the terminal's session"
    (here.folder / "finish").touch()
    job = here.wait_state("Succeeded")
    assert (job.round, [node.retries for node in job.nodes]) == (1, [0, 0])


def test_suspend_resume_stop_and_retry(here: Here) -> None:
    here.submit(UNTIL, 1, 1, suspend=True)
    job = here.wait_state("Suspended")
    assert job.reason is not None
    assert job.reason.hint == "ringweave resume job"
    here.service.act("job", "resume")
    here.wait_state("Running")
    here.service.act("job", "suspend")
    here.wait(lambda job: job.reason is not None and job.reason.code == "Suspended")
    here.service.act("job", "resume")
    here.wait_state("Running")
    here.service.act("job", "stop")
    here.wait_state("Stopped")
    with pytest.raises(JobError, match=r"stop of job job: 'Stopped', expected a job that has not ended\. Remove it"):
        here.service.act("job", "stop")
    (here.folder / "finish").touch()
    here.service.act("job", "retry")
    assert not here.service.job("job").state.is_end
    job = here.wait_state("Succeeded")
    assert job.run == 2
    assert [node.retries for node in job.nodes] == [0, 0]


def led_by(here: Here, module: str) -> list[Running]:
    return [p for p in processes_of(here.state) if f"ringweave.platforms.local.{module}" in p.command]


def kill_supervisor(here: Here) -> psutil.Process:
    """The one that the agents start in its place."""
    (before,) = led_by(here, "supervisor_main")
    before.process.send_signal(signal.SIGKILL)

    def others() -> list[psutil.Process]:
        return [each.process for each in led_by(here, "supervisor_main") if each.process != before.process]

    wait_until(lambda: bool(others()), "another supervisor")
    return others()[0]


def wait_registered(here: Here, state: str, round_: int) -> JobRecord:
    """As the registry has it: where no supervisor lives a look by the service would start one."""
    found: list[JobRecord] = []

    def holds() -> bool:
        entry = LocalJobRegistry(here.state / REGISTRY).find_by_name("job")
        assert entry is not None
        found.append(entry.job.record)
        return (found[-1].state, found[-1].round) == (state, round_)

    wait_until(holds, lambda: f"{state} in round {round_}; last seen {found[-1]}")
    return found[-1]


@pytest.mark.thorough  # daily: the next one, which needs it
def test_agents_bring_back_a_supervisor_that_is_killed(here: Here) -> None:
    here.submit(UNTIL, 1, 1)
    here.wait_state("Running")
    kill_supervisor(here)
    (here.folder / "finish").touch()
    wait_registered(here, "Succeeded", 1)


def test_a_supervisor_that_was_brought_back_leads_on_when_its_agent_goes_back_to_the_gate(here: Here) -> None:
    here.submit(UNTIL, 1, 1)
    here.wait_state("Running")
    brought_back = kill_supervisor(here)
    (other,) = [each for each in led_by(here, "agent_main") if each.process.pid != brought_back.ppid()]
    other.process.send_signal(signal.SIGKILL)
    wait_registered(here, "Running", 2)
    assert [each.process for each in led_by(here, "supervisor_main")] == [brought_back]
    (here.folder / "finish").touch()
    record = wait_registered(here, "Succeeded", 2)
    node = int(other.command[-2])
    assert [record.nodes[index].retries for index in (node, 1 - node)] == [1, 0], "who was killed alone pays, and once"


def test_a_script_that_came_by_the_remote_protocol_runs(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    home = here.folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (here.folder / "script.py").write_text("import os; print(os.getcwd())")
    nodes = (NodeRequest(name="n0", capacity=1),)
    request = JobRequest(name="job", num_workers=1, script="script.py", nodes=nodes, device="cpu", min_per_node=1)
    with served(here.service) as adapter:
        RemotePlatform(f"http://127.0.0.1:{adapter.server_port}", TOKEN).submit(request, base=here.folder)
    here.wait(lambda job: job.state.is_end)
    assert text_of(here) == [str(home)]
