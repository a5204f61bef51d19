import sys
from typing import Any

import pytest

from ringweave.training.elastic import member_details, member_process


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.setattr(sys, "last_value", None, raising=False)


class Ending:
    """Whatever ends with the process; notes who says that it is through."""

    has_stopped = False

    def __init__(self) -> None:
        self.left: list[bool] = []

    def leave_membership(self, *, is_finished: bool) -> None:
        self.left.append(is_finished)

    def leave_group(self) -> None: ...

    def close(self, **_: Any) -> None: ...


@pytest.mark.parametrize(
    ("status", "has_failed"), [((), False), ((None,), False), ((0,), False), ((1,), True), (("no data",), True)]
)
def test_a_script_that_exits_with_a_failure_is_not_through(status: tuple[Any, ...], has_failed: bool) -> None:
    member_details.record_exit_failures()
    with pytest.raises(SystemExit) as raised:
        sys.exit(*status)
    assert raised.value.code == (status[0] if status else None)
    assert member_details.script_has_failed() is has_failed
    agent: Any = Ending()
    others: Any = Ending()
    member_process.shut_down_member(agent, others, others, others)
    assert agent.left == ([] if has_failed else [True])


def test_a_script_that_an_exception_ends_is_not_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not member_details.script_has_failed()
    monkeypatch.setattr(sys, "last_value", KeyError("x"))
    assert member_details.script_has_failed()
