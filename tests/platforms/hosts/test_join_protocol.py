"""Tokens of joining hosts: their text, the check of the server, and seats that are given once, whoever leads."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringweave.errors import ConnectionLostError, RefusedError, RemoteError, RpcError, UsageError
from ringweave.jobs import admission
from ringweave.jobs.admission import PermissionCache
from ringweave.jobs.records import JobRecord
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState, make_reason
from ringweave.platforms.hosts import join_protocol
from ringweave.platforms.hosts.host_list import parse_hosts
from ringweave.platforms.hosts.join_protocol import (
    AttemptLimiter,
    JoinerAuthentication,
    JoinLine,
    JoinListener,
    JoinRefusedError,
    JoinToken,
)
from ringweave.platforms.hosts.messages import HOST_ROLE, JoinAnswer, JoinRequest, RunStatusRequest
from ringweave.platforms.hosts.quorum_election import LEASE_S, Ballot, Leadership, is_quorum
from ringweave.platforms.hosts.run_entry import ENTRY_JSON, HostEndpoint, RunEntry
from ringweave.platforms.submission import JobOrigin
from ringweave.rpc import CertificateAuthority, Credentials, RpcClient, TlsAuthentication
from tests.polling import wait_until

PATIENCE_S = 60.0
NOW = 1_800_000_000.0
AUTHORITY = CertificateAuthority("train-1")
HOST, JOINED = AUTHORITY.issue("host", "a"), AUTHORITY.issue("host", "join-1")
TOKEN = JoinToken.create(HOST.authority_pem)
OWN = {"ringweave": "1", "torch": "2"}


def entry_with_seat(num_reached: int = 2, *, token: JoinToken = TOKEN, device: str = "cpu") -> RunEntry:
    """Entry of a run on hosts h0, h1, ..., and one that joins."""
    names = [*(f"h{index}" for index in range(num_reached)), "join-1"]
    nodes = tuple(NodeRequest(name=name, capacity=1, max_retries=0) for name in names)
    request = JobRequest(
        name="train", num_workers=len(names), script="t.py", directory=".", nodes=nodes, device=device, min_per_node=1
    )
    permissions = PermissionCache(admission.OPEN_POLICY.find_permission)
    job = admission.admit_job(request, requester="me", existing=[], permissions=permissions, now=NOW)
    reached = [HostEndpoint(node=name, destination=name, address="127.0.0.1", port=1) for name in names[:-1]]
    return RunEntry(
        run_id="train-1",
        version=(1, 1),
        hosts=(*reached, HostEndpoint(node="join-1", destination="", address="", port=0)),
        voters=tuple(range(num_reached)),
        job=job,
        origin=JobOrigin(directory="/", script_text=None, environ={}),
        seats=(join_protocol.make_seat(num_reached, token, [JOINED], NOW + 600),),
    )


def request_of(number: int = 1, token: JoinToken = TOKEN, **other: object) -> JoinRequest:
    fields: dict[str, object] = {
        "proof": token.proof,
        "joiner": f"{number:032x}",
        "address": "127.0.0.9",
        "port": 4000 + number,
        "hostname": f"box{number}",
        "ringweave": "1",
        "torch": "2",
        "time_s": NOW,
        "gpus": 0,
    }
    return JoinRequest(**(fields | other))  # type: ignore[arg-type]


def test_a_line_is_parsed_as_it_is_printed() -> None:
    for address in ("10.0.0.1", "host.example", "fe80::1"):
        line = JoinLine(address=address, port=4000, token=TOKEN)
        assert JoinLine.parse(f" {line}\n") == line
    assert len(str(TOKEN)) == 80


@pytest.mark.parametrize("text", ["", "a", "a:1", "a:1#", ":1#x", "a:x#x", "a:70000#x"])
def test_another_form_is_refused_without_the_token(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        JoinLine.parse(text)
    where = text.partition("#")[0]
    assert str(caught.value) == (
        f"address to join: {where!r}, expected HOST:PORT#TOKEN. Copy the whole line that ringweave run printed."
    )


@given(st.integers(0, 79), st.sampled_from("abcXYZ019-_!"))
def test_a_mistyped_token_is_noticed_before_anything_is_sent(position: int, letter: str) -> None:
    text = str(TOKEN)
    changed = text[:position] + letter + text[position + 1 :]
    for wrong in {changed, text[:position], text + letter} - {text}:
        with pytest.raises(UsageError) as caught:
            JoinToken.parse(wrong)
        assert str(caught.value) == (
            f"token: '{len(wrong)} characters', expected 80 that fit together. Copy the whole line that ringweave run "
            "printed."
        )


def test_neither_entry_nor_request_nor_texts_show_the_secret() -> None:
    shown = ENTRY_JSON.dump(entry_with_seat()) + request_of().model_dump_json() + repr(TOKEN) + repr(request_of())
    for secret in (TOKEN.secret.hex(), str(TOKEN)[43:75], JOINED.key_pem.splitlines()[1], JOINED.token):
        assert secret not in shown
    assert TOKEN.proof not in ENTRY_JSON.dump(entry_with_seat()) + repr(request_of())


def test_the_token_alone_opens_the_credentials() -> None:
    assert TOKEN.unseal(TOKEN.seal([JOINED, HOST])) == [JOINED, HOST]
    other = JoinToken.create(HOST.authority_pem)
    with pytest.raises(UsageError) as caught:
        other.unseal(TOKEN.seal([JOINED]))
    assert str(caught.value) == (
        "credentials of this host: 'others', expected some that the token opens. Start the run again."
    )


def test_credentials_of_another_authority_are_refused() -> None:
    foreign = CertificateAuthority("train-1").issue("host", "join-1")
    with pytest.raises(UsageError, match=r"^credentials of this host: 'another one', expected the one that is in the"):
        TOKEN.unseal(TOKEN.seal([foreign]))


def test_hosts_that_join_are_numbered() -> None:
    hosts = parse_hosts("a:2,join:1,join").hosts
    assert [(host.node, host.workers, host.joins) for host in hosts] == [
        ("a", 2, False),
        ("join-1", 1, True),
        ("join-2", 1, True),
    ]
    with pytest.raises(UsageError) as caught:
        parse_hosts("join:2")
    assert str(caught.value) == (
        "--hosts: 'join:2', expected a host that others can join. Name a host that ssh reaches as well: a:2,join:1. "
        "A host called join is user@join."
    )


def test_a_seat_is_taken_once() -> None:
    entry, seat = join_protocol.take_seat(entry_with_seat(), request_of(1), NOW)
    assert entry.hosts[2] == HostEndpoint(node="join-1", destination="", address="127.0.0.9", port=4001)
    assert [event.text for event in entry.events] == ["host join-1 joined from box1 (127.0.0.9)"]
    assert (entry.unjoined, ENTRY_JSON.parse(ENTRY_JSON.dump(entry))) == ((), entry)
    assert TOKEN.unseal(seat.sealed) == [JOINED]
    assert join_protocol.take_seat(entry, request_of(1), NOW + 1000) == (entry, seat), (
        "its answer was lost, so it asks again"
    )
    with pytest.raises(JoinRefusedError) as caught:
        join_protocol.take_seat(entry, request_of(2), NOW)
    assert (caught.value.reason, str(caught.value)) == (
        "used",
        "token: 'used already', expected one that this run has printed and nobody has used. Start the run again for a "
        "fresh line; each serves one host once.",
    )


def ended(entry: RunEntry) -> RunEntry:
    record: JobRecord = replace(entry.job.record, outcome=JobState.FAILED)
    return replace(entry, job=replace(entry.job, record=record))


@pytest.mark.parametrize(
    ("reason", "text", "entry", "now", "token"),
    [
        (
            "unknown",
            "token: 'none of this run', expected one that this run has printed and nobody has used. Copy the whole "
            "line that ringweave run printed.",
            entry_with_seat(),
            NOW,
            JoinToken.create(HOST.authority_pem),
        ),
        (
            "expired",
            "token: 'expired at 08:10:00 UTC', expected one that this run has printed and nobody has used. Start the "
            "run again; --join-expiry gives more time.",
            entry_with_seat(),
            NOW + 600,
            TOKEN,
        ),
        (
            "ended",
            "token: 'one of a run that has ended', expected one that this run has printed and nobody has used. Start "
            "the run again.",
            ended(entry_with_seat()),
            NOW,
            TOKEN,
        ),
    ],
)
def test_tokens_that_do_not_count(reason: str, text: str, entry: RunEntry, now: float, token: JoinToken) -> None:
    with pytest.raises(JoinRefusedError) as caught:
        join_protocol.take_seat(entry, request_of(token=token), now)
    assert (caught.value.reason, str(caught.value)) == (reason, text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"ringweave": "0"},
            "ringweave on the joining host: '0', expected 1, as on the others. Install ringweave 1 there, and type the "
            "line again.",
        ),
        (
            {"torch": "None"},
            "torch on the joining host: 'None', expected 2, as on the others. Install torch 2 there, and type the line "
            "again.",
        ),
        (
            {"time_s": NOW - 700},
            'clock of the joining host: "-700 s from the others\'", expected the same time. Set it, or start its time '
            "service: timedatectl set-ntp true.",
        ),
        (
            {"address": "box"},
            "address of the joining host: 'box', expected an IP address. Give it with --address.",
        ),
    ],
)
def test_an_unfit_host_does_not_use_the_token_up(change: dict[str, object], text: str) -> None:
    entry = entry_with_seat()
    with pytest.raises(JoinRefusedError) as caught:
        join_protocol.check_joiner(request_of(**change), entry, entry.seats[0], OWN, NOW)
    assert (caught.value.reason, str(caught.value)) == ("unfit", text)
    join_protocol.check_joiner(request_of(), entry, entry.seats[0], OWN, NOW)


def test_a_host_without_gpus_cannot_join_a_run_on_gpus() -> None:
    entry = entry_with_seat(device="cuda")
    with pytest.raises(JoinRefusedError) as caught:
        join_protocol.check_joiner(request_of(), entry, entry.seats[0], OWN, NOW)
    assert str(caught.value) == (
        "GPUs of the joining host: 0, expected 1, one for each of its workers. Name fewer workers in --hosts, or join "
        "from another host."
    )


def test_a_host_that_cannot_be_called_is_told_so() -> None:
    assert join_protocol.unreachable_text(request_of(), "Connection refused") == (
        "connection to the joining host: 'Connection refused', expected a listener at 127.0.0.9 port 4001. Open that "
        "port in its firewall, or give the address at which others reach it with --address."
    )


def test_a_host_that_only_calls_out_gets_its_seat_at_a_relayed_address() -> None:
    request = request_of(address="127.64.1.2", relay_port=77)
    entry = entry_with_seat()
    join_protocol.check_joiner(request, entry, entry.seats[0], OWN, NOW)
    changed, _ = join_protocol.take_seat(entry, request, NOW)
    assert changed.hosts[2] == HostEndpoint(node="join-1", destination="", address="127.64.1.2", port=4001)
    assert changed.events[-1].text == ("host join-1 joined from box1 by relays: it calls out, and cannot be called")
    called, _ = join_protocol.take_seat(entry, request_of(relay_port=77), NOW)
    assert called.hosts[2].relay_port == 77


@pytest.mark.parametrize("other", ["fd00::1", "127.64.1.2"])
def test_a_relayed_address_needs_others_that_can_have_it_too(other: str) -> None:
    entry = entry_with_seat()
    entry = replace(entry, hosts=(replace(entry.hosts[0], address=other), *entry.hosts[1:]))
    with pytest.raises(JoinRefusedError) as caught:
        join_protocol.check_joiner(request_of(address="127.64.1.2"), entry, entry.seats[0], OWN, NOW)
    assert str(caught.value) == (
        "address of the joining host: 'none that can be called', expected one that others can call, or another "
        "relayed one, and IPv4 addresses of all hosts. Give the address at which others reach it with --address, "
        "such as that of a VPN."
    )


def test_the_reason_of_a_pending_run_names_hosts_and_lines() -> None:
    given_reason = make_reason("NotReady", nodes="node join-1", job="train", node="join-1")
    reason = join_protocol.waiting_reason(JobState.PENDING, ["join-1", "join-2"], given_reason)
    assert str(reason) == (
        "waits for hosts join-1, join-2 to join; no node starts before all are ready. Type the line there that "
        "ringweave run printed; after it has expired, start the run again."
    )
    assert join_protocol.waiting_reason(JobState.PENDING, [], given_reason) is given_reason
    assert join_protocol.waiting_reason(JobState.FAILED, ["join-1"], None) is None
    training = join_protocol.waiting_reason(JobState.RUNNING, ["join-1"], None)
    assert training is not None
    assert training.text == "host join-1 may join; the others train"
    assert join_protocol.waiting_reason(JobState.RUNNING, ["join-1"], given_reason) is given_reason
    assert join_protocol.join_hint(["join-1", "join-2"], {"join-2": "a:1#T"}) == "on join-2: ringweave join a:1#T"


# The check of the server by the joiner.


def der_of(credentials: Credentials) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return x509.load_pem_x509_certificate(credentials.certificate_pem.encode()).public_bytes(Encoding.DER)


def test_a_server_is_known_by_the_key_of_its_authority() -> None:
    assert str(join_protocol.verify_host_certificate(der_of(HOST), TOKEN.authority_key)) == "ringweave://train-1/host/a"
    foreign = CertificateAuthority("train-1").issue("host", "a")
    for der in (der_of(foreign), b"", der_of(HOST)[:-1]):
        with pytest.raises(RefusedError) as caught:
            join_protocol.verify_host_certificate(der, TOKEN.authority_key)
        assert str(caught.value) == (
            "authority of the run: 'another one', expected the one that is in the token. Copy the line that this very "
            "run has printed; if it is the right one, somebody else answers there."
        )
    with pytest.raises(RefusedError) as caught:
        join_protocol.verify_host_certificate(der_of(AUTHORITY.issue("worker", "0")), TOKEN.authority_key)
    assert str(caught.value) == "role of the other end: 'worker', expected host. Call a host."
    with pytest.raises(RefusedError) as caught:
        join_protocol.verify_host_certificate(der_of(HOST), TOKEN.authority_key, datetime.now(UTC) - timedelta(days=2))
    assert str(caught.value) == (
        "certificate of the run: 'not valid now', expected a valid one. Set the clock of this host: timedatectl "
        "set-ntp true."
    )


# One-time use under changes of the leader.


@dataclass
class JoinHost:
    """A host with what it has on its disk."""

    leadership: Leadership
    entry: RunEntry


@dataclass
class JoinWorld:
    """Hosts that give a seat away as the host service does: commit on a quorum, then hand the credentials out."""

    hosts: list[JoinHost]
    now_s: float = 0.0
    cuts: set[frozenset[int]] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    """Joiners that have got the credentials."""

    def reached(self, one: int) -> list[int]:
        return [each for each in range(len(self.hosts)) if each != one and frozenset((one, each)) not in self.cuts]

    def push(self, index: int) -> set[int]:
        """Let a leader hand its entry to all that it reaches; return the hosts that have it."""
        host, saved = self.hosts[index], {index}
        term = host.leadership.ballot.term
        for other in self.reached(index):
            peer = self.hosts[other]
            if peer.leadership.accept_leader(term, index, self.now_s):
                peer.entry = max(peer.entry, host.entry, key=lambda entry: entry.version)
                host.leadership.note_contact(other, self.now_s)
                saved.add(other)
            else:
                host.leadership.step_down(peer.leadership.ballot.term)
                return {index}
        return saved

    def ask(self, index: int, joiner: int) -> None:
        """Let a joiner ask a host for the seat."""
        host = self.hosts[index]
        if not host.leadership.holds_lease(self.now_s):
            return
        try:
            changed, _ = join_protocol.take_seat(host.entry, request_of(joiner), NOW)
        except JoinRefusedError:
            return
        host.entry = replace(changed, version=(host.leadership.ballot.term, host.entry.version[1] + 1))
        saved = self.push(index)
        if host.leadership.is_leader and is_quorum(saved, host.leadership.voters):
            self.served.add(joiner)
            assert len(self.served) == 1, "two joiners have one seat"

    def campaign(self, index: int) -> None:
        host, others = self.hosts[index], self.reached(index)
        if not host.leadership.should_stand(self.now_s):
            return
        term = host.leadership.stand(self.now_s)
        host.leadership.finish_election(self.now_s)
        for other in others:
            peer = self.hosts[other]
            if peer.leadership.grant_vote(term, index, host.entry.version, peer.entry.version, self.now_s):
                host.leadership.count_vote(term, other, self.now_s)

    def restart(self, index: int) -> None:
        host = self.hosts[index]
        ballot = host.leadership.ballot
        leader = 0 if ballot.term <= 1 else None
        host.leadership = Leadership(index, host.leadership.voters, ballot, self.now_s, leader)


WORLD_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "push", "cut", "isolate", "mend", "wait", "elect", "restart")),
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    max_size=60,
)


def join_world(count: int) -> JoinWorld:
    entry, voters = entry_with_seat(count), tuple(range(count))
    made = [JoinHost(Leadership(index, voters, Ballot(term=1, voted_for=0), 0.0, 0), entry) for index in voters]
    return JoinWorld(hosts=made)


def take_step(world: JoinWorld, kind: str, one: int, other: int) -> None:
    if kind == "ask":
        world.ask(one, other + 1)
    elif kind == "push" and world.hosts[one].leadership.is_leader:
        world.push(one)
    elif kind == "wait":
        world.now_s += LEASE_S + 2.0
    elif kind == "elect":
        world.now_s += LEASE_S + 2.0
        world.campaign(one)
    elif kind == "restart":
        world.restart(one)
    elif kind == "isolate":
        world.cuts |= {frozenset((one, each)) for each in world.reached(one)}
    elif one != other and kind in ("cut", "mend"):
        (world.cuts.add if kind == "cut" else world.cuts.discard)(frozenset((one, other)))


@given(st.integers(2, 5), WORLD_STEPS)
@settings(max_examples=300, deadline=None)
def test_one_joiner_gets_the_credentials_whoever_leads(count: int, steps: list[tuple[str, int, int]]) -> None:
    world = join_world(count)
    for kind, one, other in steps:
        take_step(world, kind, one % count, other % count)


def test_a_leader_that_is_cut_off_gives_no_credentials_away() -> None:
    world = join_world(3)
    for kind, one, other in (("isolate", 0, 0), ("ask", 0, 0), ("elect", 1, 1)):
        take_step(world, kind, one, other)
    assert not world.served
    assert world.hosts[0].entry.seats[0].used_by
    take_step(world, "ask", 1, 1)
    assert world.served == {2}
    world.cuts.clear()
    take_step(world, "push", 1, 1)
    take_step(world, "ask", 0, 0)
    assert world.hosts[0].entry == world.hosts[1].entry
    assert world.served == {2}


# The listener.


@dataclass
class Desk:
    """Gives seats of one entry away, as a leader whose commits never fail."""

    entry: RunEntry
    lock: threading.Lock = field(default_factory=threading.Lock)

    def admit(self, request: JoinRequest) -> JoinAnswer:
        with self.lock:
            self.entry, seat = join_protocol.take_seat(self.entry, request, NOW)
        return JoinAnswer(entry=ENTRY_JSON.dump(self.entry), host=seat.host, sealed=seat.sealed, term=1, leader=0)


@pytest.fixture
def desk() -> Desk:
    return Desk(entry_with_seat())


def listening(desk: Desk, clock: Callable[[], float] = time.monotonic) -> tuple[JoinListener, int]:
    listener = JoinListener(HOST, desk.admit, clock, refusal_delay_s=0.0)
    return listener, listener.start("127.0.0.1", 0)


def ask(port: int, request: JoinRequest, key: bytes = TOKEN.authority_key) -> JoinAnswer:
    with RpcClient.connect("127.0.0.1", port, JoinerAuthentication(key), role=HOST_ROLE) as client:
        answer = client.call(request, timeout_s=PATIENCE_S).message
    assert isinstance(answer, JoinAnswer)
    return answer


def test_of_many_at_once_one_gets_the_seat(desk: Desk) -> None:
    listener, port = listening(desk)

    def attempt(number: int) -> str:
        try:
            return TOKEN.unseal(ask(port, request_of(number)).sealed)[0].identity.name
        except RemoteError as error:
            return f"{error.error} {str(error).split(',')[0]}"

    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(attempt, range(8)))
    finally:
        listener.close()
    assert sorted(answers, key=len) == ["join-1", *["JoinRefusedError token: 'used already'"] * 7]
    assert listener.refusals.total == 7


def test_a_joiner_says_nothing_to_a_foreign_server(desk: Desk) -> None:
    listener, port = listening(desk)
    try:
        with pytest.raises(RefusedError, match=r"^authority of the run: 'another one'"):
            ask(port, request_of(), CertificateAuthority("train-1").issue("host", "a").certificate_pem.encode()[:32])
    finally:
        listener.close()


FOREIGN = JoinToken.create(CertificateAuthority("train-1").issue("host", "a").authority_pem)
"""Of a run with the same name; its holder calls this one all the same."""


@pytest.mark.parametrize(
    ("kind", "token", "refusal"),
    [
        ("wrong", JoinToken(authority_key=TOKEN.authority_key, secret=bytes(24)), "none of this run"),
        ("foreign", FOREIGN, "none of this run"),
        ("expired", TOKEN, "expired at "),
        ("replayed", TOKEN, "used already"),
    ],
)
def test_a_thousand_tokens_that_do_not_count_do_no_harm(desk: Desk, kind: str, token: JoinToken, refusal: str) -> None:
    if kind == "expired":
        desk.entry = replace(desk.entry, seats=tuple(replace(seat, expires_s=NOW) for seat in desk.entry.seats))
    listener, port = listening(desk)
    before, authentication = threading.active_count(), JoinerAuthentication(TOKEN.authority_key)
    try:
        if kind == "replayed":
            assert ask(port, request_of(5000)).host == 2
        entry = desk.entry
        for _ in range(10):
            with RpcClient.connect("127.0.0.1", port, authentication, role=HOST_ROLE) as client:
                for number in range(100):
                    with pytest.raises(RemoteError, match=rf"^token: '{refusal}"):
                        client.call(request_of(number, token), timeout_s=PATIENCE_S)
        assert listener.refusals.total == 1000
        assert desk.entry == entry
        assert threading.active_count() <= before + 20
        if kind in ("wrong", "foreign"):
            assert ask(port, request_of(1)).host == 2
    finally:
        listener.close()


def test_too_many_attempts_from_one_address_are_cut(desk: Desk) -> None:
    listener, port = listening(desk, lambda: 0.0)
    wrong = JoinToken.create(HOST.authority_pem)
    try:
        for number in range(join_protocol.BURST):
            with pytest.raises(RemoteError):
                ask(port, request_of(number, wrong))
        with pytest.raises((ConnectionLostError, RpcError)) as caught:
            ask(port, request_of(1))
        assert not isinstance(caught.value, RemoteError)
        wait_until(lambda: listener.refusals.total == join_protocol.BURST + 1)
    finally:
        listener.close()
    assert not desk.entry.seats[0].used_by


def test_the_limit_of_attempts_recovers() -> None:
    limiter = AttemptLimiter(2, 1.0, 0.0)
    assert [limiter.admit(at_s) for at_s in (0.0, 0.0, 0.5, 1.6, 1.7)] == [True, True, False, True, False]


def test_a_connection_that_says_nothing_is_cut(desk: Desk) -> None:
    now_s = [0.0]
    listener, port = listening(desk, lambda: now_s[0])
    try:
        client = RpcClient.connect("127.0.0.1", port, JoinerAuthentication(TOKEN.authority_key), role=HOST_ROLE)
        listener.cut_late()
        assert client.failure is None
        now_s[0] = join_protocol.CONNECTION_LIFETIME_S + 1.0
        listener.cut_late()
        wait_until(lambda: client.failure is not None)
        client.close()
    finally:
        listener.close()


def test_a_caller_that_resets_its_connection_keeps_no_other_from_being_cut(desk: Desk) -> None:
    now_s = [0.0]
    listener, port = listening(desk, lambda: now_s[0])
    with socket.create_server(("127.0.0.1", 0)) as other, contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        resets = socket.create_connection(other.getsockname())
        held = stack.enter_context(other.accept()[0])  # as by a refusal that waits: it is not read
        listener._authentication._sockets.append((0.0, held))
        client = RpcClient.connect("127.0.0.1", port, JoinerAuthentication(TOKEN.authority_key), role=HOST_ROLE)
        resets.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        resets.close()
        now_s[0] = join_protocol.CONNECTION_LIFETIME_S + 1.0
        listener.cut_late()
        wait_until(lambda: client.failure is not None)
        client.close()


def test_a_joiner_can_call_nothing_else(desk: Desk) -> None:
    listener, port = listening(desk)
    try:
        with pytest.raises(RefusedError, match=r"^job token: 'another one'"):
            RpcClient.connect("127.0.0.1", port, TlsAuthentication(JOINED), role=HOST_ROLE)
        authentication = JoinerAuthentication(TOKEN.authority_key)
        with (
            RpcClient.connect("127.0.0.1", port, authentication, role=HOST_ROLE) as client,
            pytest.raises(RemoteError, match=r"^kind of message: 'hosts.get_status', expected one of hosts.join"),
        ):
            client.call(RunStatusRequest(), timeout_s=PATIENCE_S)
    finally:
        listener.close()


def test_rubbish_instead_of_tls_is_refused_and_counted(desk: Desk) -> None:
    listener, port = listening(desk)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
            while raw.recv(4096):
                pass
        ask(port, request_of(1))
    except ConnectionResetError:
        ask(port, request_of(1))
    finally:
        wait_until(lambda: listener.refusals.total == 1)
        listener.close()
