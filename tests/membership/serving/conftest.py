"""What both suites of the service need."""

import pytest

from ringweave import rpc


@pytest.fixture
def authority() -> rpc.CertificateAuthority:
    return rpc.CertificateAuthority("test")
