import pytest

from ringweave.errors import UsageError
from ringweave.jobs import modes


def test_the_script_decides_before_the_launcher_and_auto_last() -> None:
    assert modes.decide_mode("sync", "balanced", 4) == ("sync", "the script asks for it")
    assert modes.decide_mode("auto", "sync", 4) == ("sync", "--mode or RINGWEAVE_MODE asks for it")
    assert modes.decide_mode("auto", None, 4)[0] == "balanced"
    assert modes.decide_mode("auto", "auto", 1) == ("sync", "there is only one worker")


@pytest.mark.parametrize("name", ["ps", "ps-hra"])
def test_modes_with_a_server_are_taken(name: str) -> None:
    assert modes.check_mode(name) == name
    assert modes.decide_mode("auto", name, 4)[0] == name


@pytest.mark.parametrize(("name", "mend"), [("balance", 'Did you mean "balanced"?'), ("x", "Name one of them.")])
def test_unknown_modes_are_refused(name: str, mend: str) -> None:
    with pytest.raises(UsageError) as caught:
        modes.check_mode(name)
    assert str(caught.value) == f"mode: {name!r}, expected one of auto, sync, balanced, ps-hra, ps, local. {mend}"
