import pytest

from ringweave.environment import TUNING, WorkerEnvironment


@pytest.mark.parametrize(("tuning", "text"), [(True, "1"), (False, "0"), (None, None)])
def test_tuning_is_on_off_or_left_open(tuning: bool | None, text: str | None) -> None:
    environ = WorkerEnvironment(tuning=tuning).to_environ()
    assert environ.get(TUNING) == text
    assert WorkerEnvironment.from_environ(environ) == WorkerEnvironment(tuning=tuning)
    assert WorkerEnvironment.from_environ({TUNING: ""}).tuning is None
