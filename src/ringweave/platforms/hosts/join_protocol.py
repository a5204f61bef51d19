"""Joining of a run by a host that ssh does not reach: tokens of one use, the seats that they open, and the listener.

A line `HOST:PORT#TOKEN` holds the public key of the job's authority and a secret. The joiner checks the server's
certificate by that key before it sends anything. From the secret follow a proof, which it sends, and a key, which never
leaves it: the entry keeps the digest of the proof, and the host's credentials encrypted by the key.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import ipaddress
import json
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ringweave.environment import is_same_minor
from ringweave.errors import JobError, RefusedError, UsageError, explain
from ringweave.files import file_io
from ringweave.jobs.states import JobState, Reason
from ringweave.platforms.hosts.messages import HOST_ROLE, JOINER_ROLE, JoinAnswer, JoinRequest
from ringweave.platforms.hosts.run_entry import HostEndpoint, JoinSeat, RunEntry, RunEvent
from ringweave.relayed_address import is_relayed
from ringweave.rpc import Credentials, Identity, RpcCall, RpcHandler, RpcLimits, RpcServer, tls
from ringweave.rpc.handshake import TurnedAwayError

DEFAULT_EXPIRY_S = 600.0
MAX_CLOCK_DIFFERENCE_S = 600.0
"""Larger differences would make certificates invalid, and logs hard to read."""
CONNECTION_LIFETIME_S = 30.0
"""Time after which a joiner's connection is cut, whatever it does; it sends one message."""
LIMITS = RpcLimits(
    max_body_bytes=16 * 1024,
    max_buffers=1,
    max_message_bytes=1024,
    max_bytes_in_flight=16 * 1024,
    max_calls=1,
    max_connections=16,
    max_unauthenticated=16,
)
BURST, ATTEMPTS_PER_S = 20, 1.0
MAX_ADDRESSES = 1024
REFUSAL_DELAY_S = 0.2
"""Time before a refusal is answered, so that one connection cannot ask without end."""
_KEY_BYTES, _SECRET_BYTES, _CHECK_BYTES = 32, 24, 4


class JoinRefusedError(JobError):
    """A host may not join, with one word for the reason."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinToken:
    """Token of one use; its text goes into the line that is typed on the joining host."""

    authority_key: bytes
    """Public key of the job's authority."""
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls, authority_pem: str) -> "JoinToken":
        """Return a fresh token for a run with this authority."""
        return cls(authority_key=public_key_of(authority_pem), secret=secrets.token_bytes(_SECRET_BYTES))

    @property
    def proof(self) -> str:
        """Proof that its sender has the token; the key for the credentials does not follow from it."""
        return hashlib.sha256(b"ringweave join proof" + self.secret).hexdigest()

    def seal(self, credentials: Sequence[Credentials]) -> str:
        """Return credentials encrypted, so that only the token opens them."""
        return self._fernet().encrypt(json.dumps([each.to_text() for each in credentials]).encode()).decode()

    def unseal(self, sealed: str) -> list[Credentials]:
        """Return the credentials that `seal` has encrypted.

        Raises:
            UsageError: They are encrypted for another token, or belong to another authority.
        """
        try:
            found = [
                Credentials.from_text(text) for text in file_io.parse_json(self._fernet().decrypt(sealed.encode()))
            ]
        except InvalidToken as error:
            do = "Start the run again"
            expected = "some that the token opens"
            raise UsageError("credentials of this host", got="others", expected=expected, do=do) from error
        if any(public_key_of(each.authority_pem) != self.authority_key for each in found):
            raise UsageError(_foreign_text("credentials of this host"))
        return found

    def __str__(self) -> str:
        content = self.authority_key + self.secret
        return base64.urlsafe_b64encode(content + _check(content)).decode()

    @classmethod
    def parse(cls, text: str) -> "JoinToken":
        """Parse the text of a token.

        Raises:
            UsageError: It is none: cut or mistyped.
        """
        try:
            content = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            content = b""
        body = content[: _KEY_BYTES + _SECRET_BYTES]
        if len(content) != _KEY_BYTES + _SECRET_BYTES + _CHECK_BYTES or content[len(body) :] != _check(body):
            do = "Copy the whole line that ringweave run printed"
            raise UsageError("token", got=f"{len(text)} characters", expected="80 that fit together", do=do)
        return cls(authority_key=body[:_KEY_BYTES], secret=body[_KEY_BYTES:])

    def _fernet(self) -> Fernet:
        return Fernet(base64.urlsafe_b64encode(hashlib.sha256(b"ringweave join key" + self.secret).digest()))


def _check(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_CHECK_BYTES]


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinLine:
    """The words that follow `ringweave join`."""

    address: str
    port: int
    token: JoinToken

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}#{self.token}"

    @classmethod
    def parse(cls, text: str) -> "JoinLine":
        """Parse `HOST:PORT#TOKEN`.

        Raises:
            UsageError: It has another form; the error does not show the token.
        """
        where, _, token = text.strip().partition("#")
        host, _, port = where.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536) or not token:
            do = "Copy the whole line that ringweave run printed"
            raise UsageError("address to join", got=where, expected="HOST:PORT#TOKEN", do=do)
        return cls(address=host.strip("[]"), port=int(port), token=JoinToken.parse(token))


def make_seat(host: int, token: JoinToken, credentials: Sequence[Credentials], expires_s: float) -> JoinSeat:
    """Return the seat that a token opens."""
    return JoinSeat(host=host, proof_digest=_digest(token.proof), sealed=token.seal(credentials), expires_s=expires_s)


def take_seat(entry: RunEntry, request: JoinRequest, now: float) -> tuple[RunEntry, JoinSeat]:
    """Return the entry in which the joiner has its seat, and the seat. The caller commits the entry first of all.

    A joiner that asks again, since an answer was lost, gets its own seat again.

    Raises:
        JoinRefusedError: The token is unknown, used or expired, or the run has ended.
    """
    seat = find_seat(entry, request, now)
    if seat.used_by:
        return entry, seat
    taken = replace(seat, used_by=request.joiner)
    old = entry.hosts[seat.host]
    is_called = not is_relayed(request.address)
    endpoint = HostEndpoint(
        node=old.node,
        destination="",
        address=request.address,
        port=request.port,
        relay_port=request.relay_port if is_called else 0,
    )
    place = f"({request.address})" if is_called else "by relays: it calls out, and cannot be called"
    text = f"host {old.node} joined from {request.hostname} {place}"
    event = RunEvent(key=f"host{seat.host}/joined", time_s=now, kind="HostJoined", text=text)
    changed = replace(
        entry,
        hosts=tuple(endpoint if index == seat.host else host for index, host in enumerate(entry.hosts)),
        seats=tuple(taken if each == seat else each for each in entry.seats),
        events=(*entry.events, event),
    )
    return changed, taken


def find_seat(entry: RunEntry, request: JoinRequest, now: float) -> JoinSeat:
    """Return the seat that a request may take, or has taken.

    Raises:
        JoinRefusedError: The token is unknown, used or expired, or the run has ended.
    """
    digest = _digest(request.proof)
    found = [seat for seat in entry.seats if hmac.compare_digest(seat.proof_digest, digest)]
    if not found:
        _refuse("unknown", "none of this run", "Copy the whole line that ringweave run printed")
    seat = found[0]
    if seat.used_by and not hmac.compare_digest(seat.used_by, request.joiner):
        _refuse("used", "used already", "Start the run again for a fresh line; each serves one host once")
    if entry.job.record.outcome is not None or entry.job.desired.delete:
        _refuse("ended", "one of a run that has ended", "Start the run again")
    if not seat.used_by and now >= seat.expires_s:
        at = datetime.fromtimestamp(seat.expires_s, UTC).strftime("%H:%M:%S UTC")
        _refuse("expired", f"expired at {at}", "Start the run again; --join-expiry gives more time")
    return seat


def check_joiner(request: JoinRequest, entry: RunEntry, seat: JoinSeat, own: Mapping[str, object], now: float) -> None:
    """Refuse a host that differs in what a run needs equal; its token stays unused.

    `own`: versions of ringweave and torch on a host of the run.

    Raises:
        JoinRefusedError: ringweave or torch differ, a clock is off, or GPUs are missing.
    """
    try:
        ipaddress.ip_address(request.address)
    except ValueError:
        do = "Give it with --address"
        _refuse("unfit", request.address, do, what="address of the joining host", expected="an IP address")
    others = [host.address for host in entry.hosts if host.address and host.node != entry.hosts[seat.host].node]
    if is_relayed(request.address) and any(":" in each or each == request.address for each in others):
        do = "Give the address at which others reach it with --address, such as that of a VPN"
        expected = "one that others can call, or another relayed one, and IPv4 addresses of all hosts"
        _refuse("unfit", "none that can be called", do, what="address of the joining host", expected=expected)
    for name in ("ringweave", "torch"):
        theirs = getattr(request, name)
        if theirs != str(own[name]) and not (name == "torch" and is_same_minor(theirs, str(own[name]))):
            do = f"Install {name} {own[name]} there, and type the line again"
            _refuse("unfit", theirs, do, what=f"{name} on the joining host", expected=f"{own[name]}, as on the others")
    if abs(request.time_s - now) > MAX_CLOCK_DIFFERENCE_S:
        do = "Set it, or start its time service: timedatectl set-ntp true"
        got = f"{request.time_s - now:+.0f} s from the others'"
        _refuse("unfit", got, do, what="clock of the joining host", expected="the same time")
    workers = entry.job.counts[entry.job.used_nodes[seat.host]]
    if entry.job.request.device == "cuda" and request.gpus < workers:
        do = "Name fewer workers in --hosts, or join from another host"
        expected = f"{workers}, one for each of its workers"
        _refuse("unfit", request.gpus, do, what="GPUs of the joining host", expected=expected)


def unreachable_text(request: JoinRequest, problem: str) -> str:
    """Return the text for a joiner that the run cannot connect to; its token stays unused."""
    do = "Open that port in its firewall, or give the address at which others reach it with --address"
    expected = f"a listener at {request.address} port {request.port}"
    return explain("connection to the joining host", got=problem, expected=expected, do=do)


def _refuse(reason: str, got: object, do: str, *, what: str = "token", expected: str = "") -> NoReturn:
    expected = expected or "one that this run has printed and nobody has used"
    raise JoinRefusedError(reason, explain(what, got=got, expected=expected, do=do))


def waiting_reason(state: JobState, unjoined: Sequence[str], reason: Reason | None) -> Reason | None:
    """Return the reason of a run for people: the hosts that have not joined yet, else the given one."""
    is_waiting, is_training = state is JobState.PENDING, state is JobState.RUNNING and reason is None
    if not unjoined or not (is_waiting or is_training):
        return reason
    named = f"{'host' if len(unjoined) == 1 else 'hosts'} {', '.join(unjoined)}"
    hint = "Type the line there that ringweave run printed; after it has expired, start the run again"
    if is_training:
        return Reason(code="NotJoined", text=f"{named} may join; the others train", hint=hint)
    text = f"waits for {named} to join; no node starts before all are ready"
    return Reason(code="NotJoined", text=text, hint=hint)


def join_hint(unjoined: Sequence[str], lines: Mapping[str, str]) -> str:
    """Return the lines to type on the hosts that have not joined; empty if none is known here."""
    return "; ".join(f"on {name}: ringweave join {lines[name]}" for name in unjoined if name in lines)


class JoinerAuthentication:
    """TLS of a joiner, which trusts the one authority whose public key is in its token."""

    token = ""

    def __init__(self, authority_key: bytes) -> None:
        self._authority_key = authority_key
        self._server: Identity | None = None
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE  # verify_host_certificate does it: by a key, not by a certificate

    @property
    def identity(self) -> Identity:
        assert self._server is not None, "the server's certificate names the job"
        return Identity(job=self._server.job, role=JOINER_ROLE, name="new")

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        """Run the TLS handshake, and check the server's certificate.

        Raises:
            RefusedError: The server is no host of the token's run.
        """
        assert not is_server, "a joiner only calls"
        sock = self._context.wrap_socket(raw)
        try:
            self._server = verify_host_certificate(sock.getpeercert(binary_form=True) or b"", self._authority_key)
        except RefusedError:
            sock.close()
            raise
        return sock

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return the identity in the server's certificate."""
        del sock
        return self._server


def verify_host_certificate(der: bytes, authority_key: bytes, now: datetime | None = None) -> Identity:
    """Return the identity of a host service, by its certificate. TLS has proved that the other end has its key.

    Raises:
        RefusedError: Another authority has signed it, it is not valid now, or it names no host service.
    """
    try:
        certificate = x509.load_der_x509_certificate(der)
        Ed25519PublicKey.from_public_bytes(authority_key).verify(
            certificate.signature, certificate.tbs_certificate_bytes
        )
    except (ValueError, InvalidSignature, x509.InvalidVersion) as error:
        raise RefusedError(_foreign_text("authority of the run")) from error
    now = now or datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        do = "Set the clock of this host: timedatectl set-ntp true"
        raise RefusedError("certificate of the run", got="not valid now", expected="a valid one", do=do)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    identity = Identity.parse(names.get_values_for_type(x509.UniformResourceIdentifier)[0])
    if identity.role != HOST_ROLE:
        raise RefusedError("role of the other end", got=identity.role, expected=HOST_ROLE, do="Call a host")
    return identity


def public_key_of(certificate_pem: str) -> bytes:
    """Return the public key of a certificate."""
    key = x509.load_pem_x509_certificate(certificate_pem.encode()).public_key()
    assert isinstance(key, Ed25519PublicKey), "authorities have such keys"
    return key.public_bytes_raw()


def _foreign_text(what: str) -> str:
    do = "Copy the line that this very run has printed; if it is the right one, somebody else answers there"
    return explain(what, got="another one", expected="the one that is in the token", do=do)


def _digest(proof: str) -> str:
    return hashlib.sha256(proof.encode()).hexdigest()


class AttemptLimiter:
    """Limit on attempts: so many at once, and so many per second on the whole."""

    def __init__(self, burst: int, rate_per_s: float, now_s: float) -> None:
        self._burst, self._rate_per_s = burst, rate_per_s
        self._free, self._then_s = float(burst), now_s

    def admit(self, now_s: float) -> bool:
        """Return whether another attempt may be looked at now."""
        self._free = min(self._burst, self._free + (now_s - self._then_s) * self._rate_per_s)
        self._then_s = now_s
        if self._free < 1.0:
            return False
        self._free -= 1.0
        return True


class JoinListener:
    """Listens for joiners, and counts those that it refuses in `refusals`."""

    def __init__(
        self,
        credentials: Credentials,
        admit: Callable[[JoinRequest], JoinAnswer],
        clock: Callable[[], float] = time.monotonic,
        refusal_delay_s: float = REFUSAL_DELAY_S,
    ) -> None:
        """`admit` gives a joiner its seat, or raises `JoinRefusedError`."""
        self._authentication = JoinListenerAuthentication(credentials, clock)
        self._admit = admit
        self._refusal_delay_s = refusal_delay_s
        self._closing = threading.Event()
        self._server = RpcServer(
            self._authentication,
            [RpcHandler(message=JoinRequest, handle=self._handle)],
            limits=LIMITS,
            roles=(JOINER_ROLE,),
            write_event=print_refusal,
        )
        self.refusals = self._server.refusals

    def start(self, host: str, port: int) -> int:
        """Listen; return the port.

        Raises:
            OSError: Address or port is not available.
        """
        return self._server.start(host, port).port

    def close(self) -> None:
        self._closing.set()
        self._server.close(timeout_s=1.0)

    def cut_late(self) -> None:
        """Cut connections that are older than a joiner needs."""
        self._authentication.cut_late()

    def _handle(self, call: RpcCall) -> JoinAnswer:
        try:
            return self._admit(call.message)
        except JoinRefusedError as error:
            self.refusals.add(error.reason, "joiner", 0, str(error))
            self._closing.wait(self._refusal_delay_s)
            raise


class JoinListenerAuthentication:
    """TLS of a host towards joiners, which have no certificate: they check the host, and show a proof later."""

    token = ""

    def __init__(self, credentials: Credentials, clock: Callable[[], float]) -> None:
        self.identity = credentials.identity
        self._clock = clock
        self._context = credentials.tls_context(is_server=True, requires_certificate=False)
        self._lock = threading.Lock()
        self._limiters: dict[str, AttemptLimiter] = {}
        self._sockets: list[tuple[float, socket.socket]] = []

    def secure_socket(self, raw: socket.socket, *, is_server: bool) -> socket.socket:
        """Run the TLS handshake.

        Raises:
            TurnedAwayError: This address has called too often.
        """
        assert is_server, "a host never joins its own run"
        self._count_attempt(raw.getpeername()[0])
        sock = tls.wrap_socket(self._context, raw, is_server=True)
        with self._lock:
            self._sockets.append((self._clock(), sock))
        try:
            sock.do_handshake()
        except OSError:
            sock.close()
            raise
        return sock

    def peer_identity(self, sock: socket.socket) -> Identity | None:
        """Return None: nothing is proven yet."""
        del sock

    def cut_late(self) -> None:
        """Cut connections that are older than `CONNECTION_LIFETIME_S`."""
        with self._lock:
            for then_s, sock in self._sockets:
                if sock.fileno() >= 0 and self._clock() - then_s > CONNECTION_LIFETIME_S:
                    with contextlib.suppress(OSError):  # its caller has reset it while a refusal waits
                        socket.socket.shutdown(sock, socket.SHUT_RDWR)
            self._sockets = [each for each in self._sockets if each[1].fileno() >= 0]

    def _count_attempt(self, address: str) -> None:
        now_s = self._clock()
        with self._lock:
            limiter = self._limiters.pop(address, None) or AttemptLimiter(BURST, ATTEMPTS_PER_S, now_s)
            if len(self._limiters) >= MAX_ADDRESSES:
                self._limiters.pop(next(iter(self._limiters)))
            self._limiters[address] = limiter
            is_admitted = limiter.admit(now_s)
        if not is_admitted:
            expected = f"at most {BURST} at once, and {ATTEMPTS_PER_S:g} per second"
            do = "Wait a minute, then type the line again"
            raise TurnedAwayError(
                "busy", explain("attempts to join", got=f"more from {address}", expected=expected, do=do)
            )


def print_refusal(kind: str, **fields: object) -> None:
    """Write a refusal into the log of the service; the caller limits their number."""
    del kind
    print(
        f"{fields['service']} refused {fields['peer']} ({fields['reason']}, {fields['refusals']}): {fields['text']}",
        file=sys.stderr,
        flush=True,
    )
