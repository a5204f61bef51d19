from pathlib import Path

import pytest

from ringweave.environment import TUNING, WorkerEnvironment


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
