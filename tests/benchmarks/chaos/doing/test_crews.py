"""Which process a fault hits, by the events of the job and the processes of the lab."""

from pathlib import Path

import pytest

from ringweave.lab import lab_state
from ringweave.telemetry import EVENTS_FORMAT, EventLog
from ringweave_bench.chaos import fault_injector, fault_script
from ringweave_bench.chaos.fault_injector import LabProcessTable

COORDINATOR = "python -m ringweave.membership.main --host 10.99.0.1"
SERVER = "python -m ringweave.param_server.main --host 10.99.0.1"


class FakeLab:
    """Says which processes are in it."""

    def __init__(self, found: dict[str, list[int]]) -> None:
        self._found = found

    def processes(self) -> dict[str, list[int]]:
        return self._found


@pytest.fixture
def log(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl")


def crew(log: EventLog, monkeypatch: pytest.MonkeyPatch, lines: dict[int, str]) -> LabProcessTable:
    monkeypatch.setattr(lab_state, "command_line", lambda pid: lines[pid])
    return LabProcessTable(FakeLab({"a": list(lines)}), log.path)  # pyrefly: ignore - it asks for processes only


def lead(log: EventLog, server: int, claim: int) -> None:
    log.write("params_leader_changed", node="a", server=server, term=server, record=claim, members=[server], reason="x")


def attempt(log: EventLog, number: int) -> None:
    of = {"command": [], "cluster": "c", "world_size": 2, "cluster_text": ""}
    log.write("run_started", format=EVENTS_FORMAT, attempt=number, **of)


def test_the_process_of_a_rank_is_the_last_that_said_so(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew(log, monkeypatch, {})
    for pid in (10, 20):
        log.write("worker_watched", rank=1, node="a", pid=pid)
        assert found.worker_pid(1) == pid
    assert found.worker_pid(0) is None


def say(log: EventLog, term: int, number: int = 1) -> None:
    log.write(
        "generation_begun",
        term=term,
        reported_in_term=term,
        number=number,
        part="",
        members=["0.0"],
        newcomers=[],
        committed=0,
    )


def test_the_coordinator_that_decides_is_the_one_whose_term_the_last_epoch_is_of(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = {7: f"{COORDINATOR} --index 0", 8: "python -m x", 9: "sh -c x", 10: f"{COORDINATOR} --index 1 --standby"}
    found = crew(log, monkeypatch, lines)
    attempt(log, 1)
    assert found.service_pid(fault_script.COORDINATOR) is None, "nobody decides before the first epoch"
    for term, deciding, other in ((1, 7, 10), (2, 10, 7)):
        say(log, term)
        assert (found.service_pid(fault_script.COORDINATOR), found.service_pid(fault_script.STANDBY)) == (
            deciding,
            other,
        )
    attempt(log, 2)
    assert found.service_pid(fault_script.COORDINATOR) is None, "terms of another attempt say nothing"


def test_a_coordinator_that_has_taken_over_decides_though_no_epoch_followed(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is killed and started again as a standby; nobody comes or goes, so 1 only says the epoch that there is."""
    lines = {7: f"{COORDINATOR} --index 0", 10: f"{COORDINATOR} --index 1 --standby"}
    processes: dict[str, list[int]] = {"a": [7, 10]}
    monkeypatch.setattr(lab_state, "command_line", lambda pid: lines[pid])
    found = LabProcessTable(FakeLab(processes), log.path)  # pyrefly: ignore - it asks for processes only
    attempt(log, 1)
    say(log, 1)
    assert found.service_pid(fault_script.COORDINATOR) == 7
    processes["a"] = [10]
    assert [found.service_pid(name) for name in (fault_script.COORDINATOR, fault_script.STANDBY)] == [None, None]
    lines[11] = f"{COORDINATOR} --index 0 --standby"
    processes["a"] = [10, 11]
    assert found.service_pid(fault_script.COORDINATOR) is None, "what was started in its place decides nothing"
    assert found.service_pid(fault_script.STANDBY) is None, "and the other one is about to decide"
    say(log, 1)
    assert (found.service_pid(fault_script.COORDINATOR), found.service_pid(fault_script.STANDBY)) == (10, 11)


def test_the_server_that_leads_is_the_one_that_said_so_last(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew(log, monkeypatch, {7: f"{SERVER} --index 0", 8: f"{SERVER} --index 1 --other 10.99.0.1:3"})
    assert found.service_pid(fault_script.SERVER) is None, "the job has none"
    log.write("server_started", node="a", pid=7, address="10.99.0.1:3")
    assert (found.service_pid(fault_script.SERVER), found.service_pid(fault_script.SERVER_STANDBY)) == (7, 8)
    lead(log, 1, 3)
    log.write("server_started", node="a", pid=9, address="10.99.0.1:3")
    assert (found.service_pid(fault_script.SERVER), found.service_pid(fault_script.SERVER_STANDBY)) == (8, 7)
    assert found.service_pid(fault_script.COORDINATOR) is None


def test_a_service_without_another_one_has_no_standby(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew(log, monkeypatch, {7: f"{SERVER} --index 0"})
    log.write("server_started", node="a", pid=7, address="10.99.0.1:3")
    assert (found.service_pid(fault_script.SERVER), found.service_pid(fault_script.SERVER_STANDBY)) == (7, None)


@pytest.mark.parametrize("module", ["ringweave.membership.main", "ringweave.param_server.main"])
def test_a_service_is_known_by_its_command_line(module: str) -> None:
    line = f"python -m {module} --host 10.99.0.1 --index 1 --standby"
    assert fault_injector.is_service_process(line, module, 1)
    assert not fault_injector.is_service_process(line, module, 0)
    assert not fault_injector.is_service_process(line, "ringweave.x", 1)
    assert not fault_injector.is_service_process(f"python -m {module}", module, 0)
    assert not fault_injector.is_service_process(f"python -m {module} --index", module, 0)
    assert not fault_injector.is_service_process(f"vim {module}.py --index 0", module, 0)
    assert fault_injector.is_job_process(line)


def test_nothing_but_workers_and_services_is_the_jobs() -> None:
    assert fault_injector.is_job_process("python /x/programs/watched.py train.py")
    assert not fault_injector.is_job_process("vim ringweave.param_server.main.py")
    assert not fault_injector.is_job_process("")
