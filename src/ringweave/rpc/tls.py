"""Certificates, credentials and mutual TLS of a job: the authority, the identities, and the check of a peer."""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import pydantic
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ringweave.errors import RefusedError, RpcError, UsageError
from ringweave.files import file_io

if TYPE_CHECKING:
    import asyncio

_IDENTITY_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_IDENTITY_URI = re.compile(r"ringweave://([^/]*)/([^/]*)/([^/]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Identity of one process of one job; written `ringweave://JOB/ROLE/NAME`."""

    job: str
    """Id of the job; processes of different jobs never talk to each other."""
    role: str
    """Role of the process: `worker`, `server`, `coordinator`."""
    name: str
    """Name within the role: a rank, a node or both, such as `3` or `a0-1`."""

    def __post_init__(self) -> None:
        for what, part in (("job", self.job), ("role", self.role), ("name", self.name)):
            if not _IDENTITY_PART.fullmatch(part):
                raise UsageError(
                    f"{what} of an identity",
                    got=part,
                    expected="1 to 63 letters, digits, dots, dashes and underscores, a letter or digit first",
                    do="Rename it",
                )

    def __str__(self) -> str:
        return f"ringweave://{self.job}/{self.role}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Parse an identity.

        Raises:
            UsageError: The text is not one.
        """
        match = _IDENTITY_URI.fullmatch(text)
        if match is None:
            raise UsageError("identity", got=text, expected="ringweave://JOB/ROLE/NAME", do="Write all three parts")
        return cls(job=match[1], role=match[2], name=match[3])


_MAX_CREDENTIALS_BYTES = 64 * 1024
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class _CredentialsFile(pydantic.BaseModel):
    """File format of credentials."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    identity: str
    authority_pem: str
    certificate_pem: str
    key_pem: str
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Certificate, key, authority certificate and token of one process of a job; secrets are never printed.

    A launcher hands them over by an inherited descriptor where it starts the process itself, otherwise in a file that
    only its owner may read; never in a run folder, on a command line or in a log.
    """

    identity: Identity
    authority_pem: str
    """Certificate of the job's authority."""
    certificate_pem: str
    key_pem: str = field(repr=False)
    token: str = field(repr=False)
    """Token of the job, the same for all processes: it protects against a lost certificate."""

    def to_text(self) -> str:
        """Return all of it, secrets included, as text for a pipe or an environment variable."""
        return _CredentialsFile(
            identity=str(self.identity),
            authority_pem=self.authority_pem,
            certificate_pem=self.certificate_pem,
            key_pem=self.key_pem,
            token=self.token,
        ).model_dump_json()

    @classmethod
    def from_text(cls, text: str | bytes, where: str = "") -> "Credentials":
        """Parse the text of `to_text`.

        Raises:
            UsageError: The text is something else; the error does not show it, since it may hold a key.
        """
        try:
            file = _CredentialsFile.model_validate_json(file_io.bounded(text, _MAX_CREDENTIALS_BYTES))
        except ValueError:
            raise UsageError(
                "credentials",
                got=f"{len(text)} characters",
                expected="what Credentials.to_text wrote",
                do="Have the job's authority issue them again",
                where=where,
            ) from None
        return cls(**(file.model_dump() | {"identity": Identity.parse(file.identity)}))

    def save(self, path: Path) -> None:
        """Write them to a new file with mode 0600; create its folder with mode 0700 if there is none.

        Raises:
            FileExistsError: There is such a file.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self.to_text())

    @classmethod
    def load(cls, path: Path) -> "Credentials":
        """Read a file that `save` wrote.

        Raises:
            UsageError: Others may read the file, or it holds something else.
        """
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise UsageError(
                    "permissions of credentials",
                    got=f"{mode:04o}",
                    expected="0600: its owner alone",
                    do=f"Others may have read the key: issue new ones, or chmod 600 {path.name}",
                    where=str(path),
                )
            return cls.from_text(file.read(_MAX_CREDENTIALS_BYTES), where=str(path))

    @classmethod
    def load_from(cls, where: str, *, keep_open: bool = False) -> "Credentials":
        """Read them from `fd:N`, an inherited descriptor, or from the path of a file with mode 0600.

        A descriptor is closed afterwards unless `keep_open`, for one that is read again.

        Raises:
            UsageError: The source holds something else.
        """
        kind, _, number = where.partition(":")
        is_descriptor = kind == "fd" and number.isdecimal()
        return cls.from_descriptor(int(number), keep_open=keep_open) if is_descriptor else cls.load(Path(where))

    def to_descriptor(self) -> int:
        """Return a sealed memory file that holds them, for `subprocess`'s `pass_fds`; the caller closes it."""
        descriptor = _write_memfd(self.to_text())
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor

    @classmethod
    def from_descriptor(cls, descriptor: int, *, keep_open: bool = False) -> "Credentials":
        """Read an inherited descriptor of `to_descriptor`, which is closed afterwards unless `keep_open`.

        Raises:
            UsageError: It holds something else.
        """
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(descriptor, "rb", closefd=not keep_open) as file:
            return cls.from_text(file.read(_MAX_CREDENTIALS_BYTES), where=f"descriptor {descriptor}")

    def tls_context(self, *, is_server: bool, requires_certificate: bool = True) -> ssl.SSLContext:
        """Return a TLS 1.3 context that requires certificates of this authority on both ends.

        Without `requires_certificate` the other end needs none, so that nothing is known of it.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses change; the name in the certificate is compared instead
        context.verify_mode = ssl.CERT_REQUIRED if requires_certificate else ssl.CERT_NONE
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority_pem)
        with _memfd_path(self.certificate_pem) as certificate, _memfd_path(self.key_pem) as key:
            context.load_cert_chain(certificate, key)  # the library reads files only: the key touches no disk
        if is_server:
            context.num_tickets = 0  # a resumed session would outlive its certificate
        context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)  # of Python 3.12; the kernel encrypts where it can
        return context

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as `peer_fingerprint` returns it at the other end."""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate_pem)).hexdigest()


def certificate_identity(sock: ssl.SSLSocket | ssl.SSLObject) -> Identity:
    """Return the identity in the certificate that the other end has shown.

    Raises:
        UsageError: The certificate names no process of a job, or none was shown.
    """
    names = [value for kind, value in (sock.getpeercert() or {}).get("subjectAltName", ()) if kind == "URI"]
    return Identity.parse(str(names[0]) if len(names) == 1 else "")


def peer_fingerprint(sock: ssl.SSLSocket | ssl.SSLObject) -> str:
    """Return the SHA-256 of the certificate that the other end has shown; empty if it has shown none."""
    certificate = sock.getpeercert(binary_form=True)
    return hashlib.sha256(certificate).hexdigest() if certificate else ""


def wrap_socket(context: ssl.SSLContext, raw: socket.socket, *, is_server: bool) -> ssl.SSLSocket:
    """Return a TLS connection whose handshake has not begun; it replaces `raw`, which is closed if that has ended.

    The context's own method leaves a connection that has ended to the garbage collector.

    Raises:
        OSError: It has ended.
    """
    try:
        raw.getpeername()
    except OSError:
        raw.close()
        raise
    return context.wrap_socket(raw, server_side=is_server, do_handshake_on_connect=False)


async def accept_stream(
    sock: socket.socket, context: ssl.SSLContext | None, handshake_s: float, limit: int
) -> "tuple[asyncio.StreamReader, asyncio.StreamWriter]":
    """Return reader and writer of an accepted connection, after the TLS handshake if there is a context.

    Raises:
        OSError: The handshake failed, or took longer than `handshake_s`.
    """
    import asyncio  # late: most processes with certificates have no event loop

    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=limit)
    protocol = asyncio.StreamReaderProtocol(reader)
    timeout = {} if context is None else {"ssl_handshake_timeout": handshake_s}
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context, **timeout)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _write_memfd(text: str) -> int:
    descriptor = os.memfd_create("ringweave-credentials", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, text.encode())
    return descriptor


@contextmanager
def _memfd_path(text: str) -> Iterator[str]:
    descriptor = _write_memfd(text)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


CERTIFICATE_LIFETIME = timedelta(days=3650)
"""Longer than any job: a late worker shows its certificate to servers that have theirs since the start, and none are
renewed. The job bounds their use: all processes that trust the authority end with it (docs/explanation/security.md)."""
_CLOCK_SKEW = timedelta(hours=1)
"""Longest lag of a node's clock behind the authority's."""
_TOKEN_BYTES = 32


def utc_now() -> datetime:
    """Return the time of day for certificates."""
    return datetime.now(UTC)


class CertificateAuthority:
    """Certificate authority of one job; it also holds the job's token.

    It is made when the job starts and forgotten when it ends. Its key never leaves the memory of its process. A process
    with a certificate of it belongs to the job, under the name in the certificate; no other authority is trusted.
    """

    def __init__(
        self, job: str, lifetime: timedelta = CERTIFICATE_LIFETIME, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """`lifetime` counts from the issue of each certificate, and never passes the end of the authority's own."""
        self.job = job
        self._lifetime = lifetime
        self._clock = clock
        self._key = Ed25519PrivateKey.generate()
        self._subject_name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, Identity(job=job, role="ca", name="0").job)]
        )
        self._certificate = self._make_root_certificate()
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)

    def issue(self, role: str, name: str) -> Credentials:
        """Issue credentials for the process of that role and name.

        Raises:
            UsageError: Role or name is not allowed in a certificate.
        """
        identity = Identity(job=self.job, role=role, name=name)
        key = Ed25519PrivateKey.generate()
        now = self._clock()
        last = min(now + self._lifetime, self._certificate.not_valid_after_utc)
        certificate = (
            self._builder(key.public_key(), x509.Name([]), now - _CLOCK_SKEW, last)
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
            authority_pem=_certificate_pem(self._certificate),
            certificate_pem=_certificate_pem(certificate),
            key_pem=_private_pem(key),
            token=self._token,
        )

    def _make_root_certificate(self) -> x509.Certificate:
        now = self._clock()
        return (
            self._builder(self._key.public_key(), self._subject_name, now - _CLOCK_SKEW, now + 4 * self._lifetime)
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
            .issuer_name(self._subject_name)
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


def _certificate_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private_pem(key: Ed25519PrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


@runtime_checkable
class PeerAuthentication(Protocol):
    """Authentication of the two ends of a connection to each other, from one end."""

    @property
    def identity(self) -> Identity: ...

    @property
    def token(self) -> str: ...

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        """Return the connection that messages use; each step blocks at most for the timeout of `raw`."""
        ...

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return the proven identity of the other end; None where nothing is proven."""
        ...


class TlsAuthentication:
    """Mutual TLS 1.3 under the authority of the job."""

    def __init__(self, credentials: Credentials) -> None:
        self.identity = credentials.identity
        self.token = credentials.token
        self._server, self._client = credentials.tls_context(is_server=True), credentials.tls_context(is_server=False)

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        """Run the TLS handshake.

        Raises:
            RefusedError: The other end has no certificate, or an invalid one.
        """
        context = self._server if is_server else self._client
        sock = wrap_socket(context, raw, is_server=is_server)
        try:
            sock.do_handshake()
        except OSError as cause:
            _close_after_alert(sock)
            if isinstance(cause, ssl.SSLError):
                raise handshake_error(cause) from cause
            raise
        return sock

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return the identity in the other end's certificate.

        Raises:
            RefusedError: The certificate names no process of a job.
        """
        assert isinstance(sock, ssl.SSLSocket), "wrap made it"
        try:
            return certificate_identity(sock)
        except UsageError as cause:
            raise RefusedError(f"certificate of the other end: {cause}") from cause


def _close_after_alert(sock: ssl.SSLSocket) -> None:
    """Close after the TLS alert with the reason has arrived: closing with bytes unread would overtake it."""
    with contextlib.suppress(OSError):
        sock.settimeout(_ALERT_LINGER_S)
        socket.socket.shutdown(sock, socket.SHUT_WR)
        for _ in range(_ALERT_LINGER_READS):
            if not socket.socket.recv(sock, 4096):
                break
    sock.close()


_ALERT_LINGER_S = 0.2
_ALERT_LINGER_READS = 8


def handshake_error(cause: ssl.SSLError) -> RpcError:
    """Explain a failed handshake; the other end of a refusal gets a TLS alert."""
    reason = cause.reason or str(cause)
    detail = getattr(cause, "verify_message", "")
    return RefusedError(
        "certificate of the other end" if detail else "TLS handshake",
        got=f"{reason}: {detail}" if detail else reason,
        expected="a valid certificate of this job's authority on both ends, over TLS 1.3",
        do=_HANDSHAKE_FIXES.get(reason, _HANDSHAKE_FIXES["" if "expired" not in detail else "CERTIFICATE_EXPIRED"]),
    )


_HANDSHAKE_FIXES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "Give the process the credentials that the job's authority issued",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "Issue new credentials, and look at the clocks of both nodes",
    "CERTIFICATE_EXPIRED": "Issue new credentials, and look at the clocks of both nodes",
    "TLSV1_ALERT_UNKNOWN_CA": "Both ends need credentials of the same job",
    "": "Both ends need credentials of the same job, and clocks that agree",
}
