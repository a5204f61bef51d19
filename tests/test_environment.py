from pathlib import Path

import pytest

from ringweave.environment import MAX_LOSS_INCREASE, PORTS, TUNING, WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.ports import PortRange


@pytest.mark.parametrize(("tuning", "text"), [(True, "1"), (False, "0"), (None, None)])
def test_tuning_is_on_off_or_left_open(tuning: bool | None, text: str | None) -> None:
    environ = WorkerEnvironment(tuning=tuning).to_environ()
    assert environ.get(TUNING) == text
    assert WorkerEnvironment.from_environ(environ) == WorkerEnvironment(tuning=tuning)
    assert WorkerEnvironment.from_environ({TUNING: ""}).tuning is None


def test_events_go_to_the_run_or_to_where_the_environment_says() -> None:
    run, given = Path("/runs/1"), Path("/logs/e.jsonl")
    assert WorkerEnvironment(run_dir=run, events=given).events_path == run / "events.jsonl"
    assert WorkerEnvironment(events=given).events_path == given
    assert WorkerEnvironment().events_path is None
    assert WorkerEnvironment.from_environ(WorkerEnvironment(events=given).to_environ()).events == given


def test_the_range_of_ports_is_read_and_written() -> None:
    environment = WorkerEnvironment(ports=PortRange(29_500, 29_599))
    assert environment.to_environ() == {PORTS: "29500-29599"}
    assert WorkerEnvironment.from_environ(environment.to_environ()) == environment
    with pytest.raises(UsageError, match=r"^ports: '29500', expected FIRST-LAST, .* \[RINGWEAVE_PORTS\]$"):
        WorkerEnvironment.from_environ({PORTS: "29500"})


def test_the_largest_loss_increase_is_read_and_written() -> None:
    environment = WorkerEnvironment(max_loss_increase="0.5%")
    assert environment.to_environ() == {MAX_LOSS_INCREASE: "0.5%"}
    assert WorkerEnvironment.from_environ(environment.to_environ()) == environment
    told = (
        r"^largest loss increase: '1', expected a number above 0 and up to 100 with a percent sign. .* \[RINGWEAVE_MAX"
    )
    with pytest.raises(UsageError, match=told):
        WorkerEnvironment.from_environ({MAX_LOSS_INCREASE: "1"})
