import pytest

from ringweave import rpc
from tests.rpc.parts import Events


@pytest.fixture(scope="session")
def authority() -> rpc.CertificateAuthority:
    return rpc.CertificateAuthority("job1")


@pytest.fixture
def events() -> Events:
    return Events()
