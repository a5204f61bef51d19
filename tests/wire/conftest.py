import pytest

from ringweave import wire
from tests.wire.parts import Events


@pytest.fixture(scope="session")
def authority() -> wire.Authority:
    return wire.Authority("job1")


@pytest.fixture
def events() -> Events:
    return Events()
