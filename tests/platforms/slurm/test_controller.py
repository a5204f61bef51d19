"""The controller dies at every boundary of a job's life, and the next one goes on: no orphan, no duplicate."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from ringweave.errors import LaunchError
from ringweave.files.file_io import replace_text
from ringweave.jobs.states import JobState
from ringweave.platforms.slurm.commands import SlurmClient
from ringweave.platforms.slurm.controller import CONTROLLER_RETRY_S, SlurmController, grant_from_environment
from ringweave.platforms.slurm.job_runtime import SlurmJobRuntime
from ringweave.platforms.slurm.registry import SlurmJobRegistry
from tests.platforms.slurm.fakes import FakeSlurm, a_grant, a_request, a_service, means
from tests.polling import wait_until

DEADLINE_S = 350.0
DAILY_STEP = 4
"""Of every day's boundaries only each fourth, and each name once; `--all-crashes` takes all."""
SOON_S = 250.0


class DiedError(BaseException):
    """kill -9."""


class World:
    """A job whose steps really run, and a controller that can be killed."""

    def __init__(self, folder: Path, dies_at: int | None = None, dies_on: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.dies_at, self.dies_on, self.passed = folder, dies_at, dies_on, list[str]()
        self.fake = FakeSlurm()
        self.service = a_service(folder, self.fake)
        self.registry = SlurmJobRegistry(folder / "state")
        self.means = means(self.fake, folder, self.on_boundary)
        self.service.submit(a_request(), base=folder)
        self.fake.states[10] = "RUNNING"
        self.grant = a_grant()
        self.deadline = time.monotonic() + DEADLINE_S

    def on_boundary(self, boundary: str) -> None:
        self.passed.append(boundary)
        if len(self.passed) == self.dies_at or boundary == self.dies_on:
            self.dies_on = ""
            raise DiedError(boundary)

    def lead(self, until) -> None:
        """Lead the job until the world looks so, with as many controllers as it takes."""
        while not until():
            with contextlib.suppress(DiedError):
                self._lead(until)

    def _lead(self, until) -> None:
        controller = SlurmController(self.registry, "text", self.grant, self.means, on_boundary=self.on_boundary)
        assert controller.claim_job()
        controller.adopt_allocation()
        while not until():
            assert time.monotonic() < self.deadline, self.service.job("text")
            if controller.reconcile_once() is None:
                return
            time.sleep(0.005)

    def state(self) -> str:
        entry = self.registry.find_by_name("text")
        return "gone" if entry is None else str(entry.job.record.state)

    def released(self) -> bool:
        entry = self.registry.find_by_name("text")
        return entry is None or entry.allocation_state.allocation is None

    def finish(self) -> None:
        (self.folder / "state" / "jobs" / "text" / "go").touch()

    def begun(self) -> Counter[str]:
        """Group -> how often an agent of it began."""
        return Counter(line.split()[0] for line in (self.folder / "begun").read_text().splitlines())

    def pid(self, group: str) -> int:
        lines = (self.folder / "begun").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(group))

    def orphans(self) -> list[int]:
        pids = [int(line.split()[1]) for line in (self.folder / "begun").read_text().splitlines()]
        return [pid for pid in pids if lives(pid)]


@pytest.fixture(autouse=True)
def _end_agents(tmp_path: Path) -> Iterator[None]:
    """No agent outlives a test that leaves its job in the middle."""
    yield
    psutil.process_iter.cache_clear()  # it would hand out earlier processes that had the same numbers
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(tmp_path)) for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def live(world: World) -> None:
    """A node is killed and replaced, all finish, and the job is deleted."""
    world.lead(lambda: world.state() == "Running")
    os.kill(world.pid("1.1"), signal.SIGKILL)
    world.lead(lambda: "1.2" in world.begun() and world.state() == "Running")
    world.finish()
    world.lead(lambda: world.state() == "Succeeded" and world.released())
    world.fake.states[10] = "COMPLETED"
    world.service.act("text", "delete")


def check(world: World) -> None:
    assert world.begun() == {"0.1": 1, "1.1": 1, "1.2": 1}, "only the killed node is replaced, once"
    assert world.orphans() == []
    assert [path.name for path in (world.folder / "state").rglob("*") if path.is_file()] == ["submit.lock"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_dies_at_every_boundary(tmp_path, request):
    step = 1 if request.config.getoption("--all-crashes") else DAILY_STEP
    world = World(tmp_path / "whole")
    live(world)
    check(world)
    seen, number, died = set(world.passed), 0, set()
    while number <= len(world.passed):  # lives differ a little in length: how far two nodes are at one look
        number += step
        world = World(tmp_path / str(number), dies_at=number)
        live(world)
        check(world)
        seen |= set(world.passed)
        died |= set(world.passed[number - 1 : number])
    for name in seen - died:
        world = World(tmp_path / name, dies_on=name)
        live(world)
        check(world)
        died |= {name} & set(world.passed)
    assert {
        "before SaveRecord",
        "grant written",
        "desired state written",
        "after ReleaseBarrier",
        "marked for removal",
    } <= died


@pytest.mark.slow
def test_a_requeued_allocation_is_adopted_without_a_charge(tmp_path):
    world = World(tmp_path)
    world.lead(lambda: world.state() == "Running")
    for group in ("0.1", "1.1"):  # as Slurm ends them; the agents say that they were ended
        root = world.registry.folder("text").group(*map(int, group.split(".")))
        replace_text(root.desired_state, '{"round": 1, "stop": true}')
    wait_until(lambda: not world.orphans(), "the agents leave")
    for group in ("0.1", "1.1"):
        root = world.registry.folder("text").group(*map(int, group.split(".")))
        replace_text(root.desired_state, '{"round": 1}')
    world.grant = a_grant(restarts=1)
    world.fake.restarts[10] = 1
    world.lead(lambda: world.begun() == {"0.1": 1, "1.1": 1, "0.2": 1, "1.2": 1} and world.state() == "Running")
    world.finish()
    world.lead(world.released)
    entry = world.registry.find_by_name("text")
    assert entry is not None
    assert [node.retries for node in entry.job.record.nodes] == [0, 0]
    assert entry.job.record.state == "Succeeded"


@pytest.mark.parametrize(("group", "rounds"), [("0.1", 1), ("0.2", 2)])
def test_what_is_kept_of_a_former_run_is_no_allocation_that_was_taken_back(tmp_path, group: str, rounds: int):
    world = World(tmp_path)
    entry = world.registry.find_by_name("text")
    assert entry is not None
    nodes = tuple(replace(node, attempt=2) for node in entry.job.record.nodes)
    world.registry.save_record("text", replace(entry.job.record, nodes=nodes, run=2), entry.allocation_state)
    world.registry.folder("text").group(*map(int, group.split("."))).root.mkdir(parents=True)
    controller = SlurmController(world.registry, "text", a_grant(), world.means)
    assert controller.claim_job()
    controller.adopt_allocation()
    entry = world.registry.find_by_name("text")
    assert entry is not None
    assert entry.job.record.round == rounds


def test_an_allocation_that_is_requeued_time_after_time_before_all_nodes_ran_is_given_up(tmp_path):
    world = World(tmp_path)

    def requeue(restarts: int):
        controller = SlurmController(world.registry, "text", a_grant(restarts=restarts), world.means)
        assert controller.claim_job()
        controller.adopt_allocation()
        entry = world.registry.find_by_name("text")
        assert entry is not None
        return entry

    assert [requeue(restarts).allocation_state.num_fruitless_requeues for restarts in range(10)] == list(range(10))
    assert requeue(9).allocation_state.num_fruitless_requeues == 9, (
        "the same allocation: its controller was started again"
    )
    assert world.state() == "Pending"
    entry = requeue(10)
    assert str(entry.job.record.outcome_reason) == (
        "preempted 10 times in a row before all nodes were running: Slurm revoked its allocation. "
        "Find out why the platform preempts the job, then ringweave retry text."
    )
    world.grant = a_grant(restarts=10)
    world.lead(world.released)
    assert world.state() == "Failed"


def test_an_allocation_that_ran_may_be_requeued_for_ever(tmp_path):
    world = World(tmp_path)
    for restarts in range(30):
        controller = SlurmController(world.registry, "text", a_grant(restarts=restarts), world.means)
        assert controller.claim_job()
        controller.adopt_allocation()
        entry = world.registry.find_by_name("text")
        assert entry is not None
        assert (entry.allocation_state.num_fruitless_requeues, entry.job.record.outcome) == (0, None)
        world.registry.save_record("text", replace(entry.job.record, state=JobState.RUNNING), entry.allocation_state)


def test_a_controller_of_a_former_allocation_leaves(tmp_path):
    world = World(tmp_path)
    former = SlurmController(world.registry, "text", a_grant(), world.means)
    assert former.claim_job()
    latter = SlurmController(world.registry, "text", a_grant(restarts=1), world.means)
    assert latter.claim_job()
    assert not former.holds_claim()
    assert former.reconcile_once() is None
    assert not former.claim_job()
    assert not SlurmController(world.registry, "text", a_grant(job_id=30), world.means).claim_job(), (
        "of an orphan of Slurm"
    )


def test_a_look_that_fails_is_tried_again(tmp_path, monkeypatch, capfd):
    world = World(tmp_path)
    controller = SlurmController(world.registry, "text", world.grant, world.means)
    assert controller.claim_job()
    for error in (OSError("Stale file handle"), LaunchError("Unable to contact slurm controller")):
        with monkeypatch.context() as patch:
            patch.setattr(SlurmJobRuntime, "observe", raising(error))
            assert controller.reconcile_or_retry() == CONTROLLER_RETRY_S
            with pytest.raises(type(error)):
                controller.reconcile_once()
        with monkeypatch.context() as patch:
            patch.setattr(SlurmJobRegistry, "find_by_name", raising(error))
            assert controller.reconcile_or_retry() == CONTROLLER_RETRY_S
        assert capfd.readouterr().err == f"look at text: {error}\n" * 2
    assert controller.holds_claim()
    assert controller.reconcile_or_retry() == 0.0, "it goes on"


def raising(error: Exception) -> Callable[..., NoReturn]:
    def fails(*_: object) -> NoReturn:
        raise error

    return fails


def test_a_job_of_slurm_whose_number_was_never_recorded_takes_over(tmp_path):
    world = World(tmp_path)
    with world.registry.locked_entry("text") as entry:
        assert entry is not None
        world.registry.save_record("text", entry.job.record, type(entry.allocation_state)())
    assert SlurmController(world.registry, "text", a_grant(job_id=10), world.means).claim_job()
    assert world.service.job("text").reason is not None
    assert len(world.fake.scripts) == 1, "and no second one is asked for"


def test_the_allocation_is_read_from_what_slurm_tells_its_jobs():
    environ = {"SLURM_JOB_ID": "12", "SLURM_HET_SIZE": "2", "SLURM_RESTART_COUNT": "3"}
    environ |= {f"SLURM_JOB_ID_HET_GROUP_{part}": str(12 + part) for part in range(2)}
    environ |= {f"SLURM_JOB_NODELIST_HET_GROUP_{part}": host for part, host in enumerate(("big", "small"))}
    grant = grant_from_environment(environ)
    assert (grant.key, grant.job_ids, grant.hosts, grant.job_id) == ("12.3", (12, 13), ("big", "small"), 12)
    assert grant_from_environment({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "big"}).key == "7.0"


def test_slurm_is_asked_by_its_own_commands(tmp_path):
    assert isinstance(World(tmp_path).means.slurm, SlurmClient)
