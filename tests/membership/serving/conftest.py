"""What both suites of the service need."""

import pytest

from ringweave import wire


@pytest.fixture
def authority() -> wire.Authority:
    return wire.Authority("test")
