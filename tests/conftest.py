"""What all tests share."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long examples take to make and to run depends on what else runs; pytest's own time-out ends what hangs.
settings.register_profile("ringweave", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ringweave")


def pytest_configure() -> None:
    """Who starts tests in the background or under nohup has them ignore signals, and so would all that tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--all-crashes", action="store_true", help="kill the operator at every boundary of every life")
    parser.addoption("--kubeconfig", help="run tests/kube against this API server instead of the fake")
    parser.addoption("--mutations", type=int, default=100, help="wrong messages sent to a parameter server")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """`check_golden(path, text)`: the file holds exactly this text; with --update-golden it is written."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{path} differs; run pytest with --update-golden if it should"

    return check
