import pytest

from ringweave.errors import UsageError
from ringweave.planning import modes


def test_the_script_decides_before_the_launcher_and_auto_last() -> None:
    assert modes.decide("sync", "balanced", 4) == ("sync", "the script asks for it")
    assert modes.decide("auto", "sync", 4) == ("sync", "ringweave run --mode asks for it")
    assert modes.decide("auto", None, 4)[0] == "balanced"
    assert modes.decide("auto", "auto", 1) == ("sync", "there is one worker, and nobody to share with")


@pytest.mark.parametrize("name", ["ps", "ps-hra"])
def test_modes_that_are_not_there_yet_say_so(name: str) -> None:
    text = (
        rf"^mode: '{name}', expected one of auto, sync, balanced\. {name} needs the asynchronous parameter server, "
        r"which is not there yet; balanced comes nearest\. \[--mode\]$"
    )
    with pytest.raises(UsageError, match=text):
        modes.check_name(name, where="--mode")


@pytest.mark.parametrize(("name", "mend"), [("balance", 'Did you mean "balanced"?'), ("x", "Name one of them.")])
def test_unknown_modes_are_refused(name: str, mend: str) -> None:
    with pytest.raises(UsageError) as caught:
        modes.check_name(name)
    assert str(caught.value) == f"mode: {name!r}, expected one of auto, sync, balanced. {mend}"
