"""The certificate authority of one job: made when the job starts, forgotten when it ends.

Its key never leaves the memory of the process that made it. Whoever holds a certificate of it belongs to the job, under
the name that stands in the certificate; nothing else is trusted, no authority of the machine either.
"""

import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringweave.wire.security.credentials import Credentials
from ringweave.wire.security.identities import Identity

LIFETIME = timedelta(days=3650)
"""Longer than any job: who comes late in one shows its certificate to servers that have theirs since its begin, and
nobody renews them. What bounds their use is the job, with which all who trust the authority end (decision 0048)."""
_BACKDATED = timedelta(hours=1)
"""How far the clock of a node may be behind that of the authority's."""
_TOKEN_BYTES = 32


def utc_now() -> datetime:
    """The time of day, as certificates count it."""
    return datetime.now(UTC)


class Authority:
    """Makes the certificates of one job, and knows its token."""

    def __init__(self, job: str, lifetime: timedelta = LIFETIME, clock: Callable[[], datetime] = utc_now) -> None:
        """`lifetime` counts from the issue of each certificate, and never passes the end of the authority's own."""
        self.job = job
        self._lifetime = lifetime
        self._clock = clock
        self._key = Ed25519PrivateKey.generate()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, Identity(job=job, role="ca", name="0").job)])
        self._certificate = self._make_own()
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)

    def issue(self, role: str, name: str) -> Credentials:
        """What the process of that role and name needs to talk to the others of its job.

        Raises:
            UsageError: Role or name cannot stand in a certificate.
        """
        identity = Identity(job=self.job, role=role, name=name)
        key = Ed25519PrivateKey.generate()
        now = self._clock()
        last = min(now + self._lifetime, self._certificate.not_valid_after_utc)
        certificate = (
            self._builder(key.public_key(), x509.Name([]), now - _BACKDATED, last)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))]), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .sign(self._key, None)
        )
        return Credentials(
            identity=identity,
            authority_pem=_pem(self._certificate),
            certificate_pem=_pem(certificate),
            key_pem=_private_pem(key),
            token=self._token,
        )

    def _make_own(self) -> x509.Certificate:
        now = self._clock()
        return (
            self._builder(self._key.public_key(), self._name, now - _BACKDATED, now + 4 * self._lifetime)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self._key, None)
        )

    def _builder(
        self, key: Ed25519PublicKey, subject: x509.Name, first: datetime, last: datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(first)
            .not_valid_after(last)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private_pem(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
