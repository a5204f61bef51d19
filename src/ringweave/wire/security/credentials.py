"""What one process of a job is given to talk to the others, and the ways in which it may be handed over."""

import fcntl
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pydantic

from ringweave.errors import UsageError, explain
from ringweave.wire.security.identities import Identity

_MOST_BYTES = 64 * 1024
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class _File(pydantic.BaseModel):
    """How credentials are written."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    identity: str
    authority_pem: str
    certificate_pem: str
    key_pem: str
    token: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """A certificate, its key, the authority that both ends trust, and the job's token; secrets are never printed.

    Handed over by an inherited descriptor where a launcher starts the process itself, in a file that only its owner may
    read where it does not. Never in a run folder, on a command line or in a log.
    """

    identity: Identity
    """Who this process is."""
    authority_pem: str
    """Certificate of the job's authority."""
    certificate_pem: str
    """Certificate of this process."""
    key_pem: str = field(repr=False)
    """Its private key."""
    token: str = field(repr=False)
    """The job's token, the same for all: a second lock for a certificate that got lost."""

    def to_text(self) -> str:
        """All of it, secrets included, for a pipe or an environment."""
        return _File(
            identity=str(self.identity),
            authority_pem=self.authority_pem,
            certificate_pem=self.certificate_pem,
            key_pem=self.key_pem,
            token=self.token,
        ).model_dump_json()

    @classmethod
    def from_text(cls, text: str | bytes, where: str = "") -> "Credentials":
        """What `to_text` wrote.

        Raises:
            UsageError: It is something else; the text does not show it, since it may hold a key.
        """
        try:
            file = _File.model_validate_json(text)
        except pydantic.ValidationError:
            raise UsageError(
                explain(
                    "credentials",
                    got=f"{len(text)} characters",
                    expected="what Credentials.to_text wrote",
                    do="Have the job's authority issue them again",
                    where=where,
                )
            ) from None
        return cls(**(file.model_dump() | {"identity": Identity.parse(file.identity)}))

    def save(self, path: Path) -> None:
        """Write them to a new file that only its owner may read, in a folder made for its owner alone if there is none.

        Raises:
            FileExistsError: There is such a file.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self.to_text())

    @classmethod
    def load(cls, path: Path) -> "Credentials":
        """What `save` wrote.

        Raises:
            UsageError: Others may read the file, or it holds something else.
        """
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise UsageError(
                    explain(
                        "permissions of credentials",
                        got=f"{mode:04o}",
                        expected="0600: its owner alone",
                        do=f"Others may have read the key: issue new ones, or chmod 600 {path.name}",
                        where=str(path),
                    )
                )
            return cls.from_text(file.read(_MOST_BYTES), where=str(path))

    @classmethod
    def load_from(cls, where: str, *, keeps: bool = False) -> "Credentials":
        """From `fd:N`, a descriptor that was inherited, or from the path of a file that only its owner may read.

        A descriptor is closed if not `keeps`, which is for one that is read again.

        Raises:
            UsageError: There is something else.
        """
        kind, _, number = where.partition(":")
        is_descriptor = kind == "fd" and number.isdecimal()
        return cls.from_descriptor(int(number), keeps=keeps) if is_descriptor else cls.load(Path(where))

    def to_descriptor(self) -> int:
        """A sealed file in memory that holds them, for `subprocess`'s `pass_fds`; the caller closes it."""
        descriptor = _in_memory(self.to_text())
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return descriptor

    @classmethod
    def from_descriptor(cls, descriptor: int, *, keeps: bool = False) -> "Credentials":
        """What `to_descriptor` holds, from an inherited descriptor, which is closed if not `keeps`.

        Raises:
            UsageError: It holds something else.
        """
        os.lseek(descriptor, 0, os.SEEK_SET)
        with os.fdopen(descriptor, "rb", closefd=not keeps) as file:
            return cls.from_text(file.read(_MOST_BYTES), where=f"descriptor {descriptor}")

    def context(self, *, serves: bool) -> ssl.SSLContext:
        """TLS 1.3 and nothing older, both ends with certificates of this authority and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses move; the name in the certificate is compared instead
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority_pem)
        with _path_in_memory(self.certificate_pem) as certificate, _path_in_memory(self.key_pem) as key:
            context.load_cert_chain(certificate, key)  # the library reads files only: the key touches no disk
        if serves:
            context.num_tickets = 0  # a resumed session would outlive its certificate
        return context


def _in_memory(text: str) -> int:
    descriptor = os.memfd_create("ringweave-credentials", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, text.encode())
    return descriptor


@contextmanager
def _path_in_memory(text: str) -> Iterator[str]:
    descriptor = _in_memory(text)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
