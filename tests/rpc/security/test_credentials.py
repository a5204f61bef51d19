import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from ringweave import rpc
from ringweave.errors import UsageError
from ringweave.rpc.tls import utc_now


def test_an_identity_prints_and_parses_back() -> None:
    identity = rpc.Identity(job="job-1", role="worker", name="a0.3")
    assert str(identity) == "ringweave://job-1/worker/a0.3"
    assert rpc.Identity.parse(str(identity)) == identity


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-a", "x" * 64, "a\n", "ä"])
def test_names_that_cannot_stand_in_a_certificate_are_refused(authority: rpc.CertificateAuthority, name: str) -> None:
    with pytest.raises(UsageError, match=r"name of an identity: .*, expected 1 to 63 letters.* Rename it\."):
        authority.issue("worker", name)


@pytest.mark.parametrize("text", ["", "ringweave://a/b", "http://a/b/c", "ringweave://a/b/c/d", "ringweave://a/b/"])
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="identity"):
        rpc.Identity.parse(text)


def test_a_certificate_names_job_role_and_name_and_ends_soon(authority: rpc.CertificateAuthority) -> None:
    credentials = authority.issue("worker", "3")
    certificate = x509.load_pem_x509_certificate(credentials.certificate_pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["ringweave://job1/worker/3"]
    left = certificate.not_valid_after_utc - utc_now()
    assert timedelta(days=3649) < left <= timedelta(days=3650)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_no_certificate_outlives_its_authority() -> None:
    now = [utc_now()]
    authority = rpc.CertificateAuthority("job1", timedelta(days=1), clock=lambda: now[0])
    now[0] += timedelta(days=3, hours=12)
    credentials = authority.issue("worker", "0")
    own = x509.load_pem_x509_certificate(credentials.authority_pem.encode())
    issued = x509.load_pem_x509_certificate(credentials.certificate_pem.encode())
    assert issued.not_valid_after_utc == own.not_valid_after_utc


def test_secrets_are_not_printed(authority: rpc.CertificateAuthority) -> None:
    credentials = authority.issue("worker", "0")
    shown = repr(credentials)
    assert "PRIVATE" not in shown
    assert credentials.token not in shown


def test_credentials_survive_text_and_file(authority: rpc.CertificateAuthority, tmp_path: Path) -> None:
    credentials = authority.issue("worker", "0")
    assert rpc.Credentials.from_text(credentials.to_text()) == credentials
    path = tmp_path / "keys" / "worker-0"
    credentials.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert rpc.Credentials.load(path) == credentials
    with pytest.raises(FileExistsError):
        credentials.save(path)


def test_a_file_that_others_may_read_is_refused(authority: rpc.CertificateAuthority, tmp_path: Path) -> None:
    path = tmp_path / "worker-0"
    authority.issue("worker", "0").save(path)
    path.chmod(0o640)
    with pytest.raises(
        UsageError, match=r"permissions of credentials: '0640', expected 0600: its owner alone\..*worker-0"
    ):
        rpc.Credentials.load(path)


def test_a_child_gets_them_by_a_descriptor(authority: rpc.CertificateAuthority) -> None:
    credentials = authority.issue("worker", "7")
    descriptor = credentials.to_descriptor()
    code = "import sys; from ringweave import rpc; c = rpc.Credentials.from_descriptor(int(sys.argv[1])); "
    told = subprocess.run(
        [sys.executable, "-c", code + "rpc.TlsAuthentication(c); print(c.identity)", str(descriptor)],
        pass_fds=[descriptor],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "ringweave://job1/worker/7"
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    os.close(descriptor)


def test_a_descriptor_that_is_kept_can_be_read_again_and_is_closed_by_who_reads_it_last(
    authority: rpc.CertificateAuthority,
) -> None:
    credentials = authority.issue("worker", "7")
    where = f"fd:{(descriptor := credentials.to_descriptor())}"
    assert rpc.Credentials.load_from(where, keep_open=True) == credentials
    assert rpc.Credentials.load_from(where) == credentials
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"identity": 3}', "\x00"])
def test_damaged_credentials_are_refused_without_showing_them(text: str) -> None:
    with pytest.raises(UsageError, match=r"credentials: '\d+ characters', expected what Credentials.to_text wrote"):
        rpc.Credentials.from_text(text)
