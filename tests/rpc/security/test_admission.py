import socket
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ringweave import rpc
from ringweave.errors import DeadlineError, RefusedError, RpcError
from ringweave.rpc.tls import CERTIFICATE_LIFETIME, utc_now
from ringweave.telemetry import EventLog, read_events
from tests.fakes.plaintext import PlaintextAuthentication
from tests.polling import wait_until
from tests.rpc.parts import Add, Events, connect, serving, trust


def test_members_of_a_job_talk_and_know_each_other(authority: rpc.CertificateAuthority, events: Events) -> None:
    with (
        serving(trust(authority, "server", "0"), write_event=events) as server,
        connect(server, trust(authority, "worker", "3")) as client,
    ):
        assert str(client.server) == "ringweave://job1/server/0"
        answer = client.call(Add(), [b"\x01\x02"], timeout_s=60)
        assert answer.message.total == 3
        assert answer.message.peer == "ringweave://job1/worker/3"
    assert events.seen == []


def refused(server: rpc.RpcServer, trusted: rpc.PeerAuthentication, match: str) -> None:
    with pytest.raises(RefusedError, match=match):
        connect(server, trusted)
    assert server.held_bytes == 0
    wait_until(lambda: not server.peers())


def test_a_foreign_authority_is_refused_by_both_ends(authority: rpc.CertificateAuthority, events: Events) -> None:
    foreign = rpc.CertificateAuthority("job1")
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        refused(server, trust(foreign, "worker", "0"), r"certificate of the other end: .*expected a valid certificate")
        event = events.wait_reason("certificate")
        assert event["service"] == "ringweave://job1/server/0"
        assert event["peer"].startswith("127.0.0.1:")
        assert "Both ends need credentials of the same job" in event["text"]


def test_a_server_refuses_a_foreign_certificate_that_a_client_does_not_mind(
    authority: rpc.CertificateAuthority, events: Events
) -> None:
    """A client that trusts this job's authority but holds a certificate of another."""
    ours, foreign = authority.issue("worker", "0"), rpc.CertificateAuthority("job1").issue("worker", "0")
    mixed = rpc.Credentials(
        identity=ours.identity,
        authority_pem=ours.authority_pem,
        certificate_pem=foreign.certificate_pem,
        key_pem=foreign.key_pem,
        token=ours.token,
    )
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        refused(
            server,
            rpc.TlsAuthentication(mixed),
            r"TLS handshake: 'TLSV1_ALERT_UNKNOWN_CA', .*credentials of the same job",
        )
        assert "CERTIFICATE_VERIFY_FAILED" in events.wait_reason("certificate")["text"]


def test_an_expired_certificate_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    now = [utc_now() - timedelta(days=2)]
    aging = rpc.CertificateAuthority("job1", timedelta(days=1), clock=lambda: now[0])
    expired = rpc.TlsAuthentication(aging.issue("worker", "0"))
    now[0] = utc_now()
    with serving(trust(aging, "server", "0"), write_event=events) as server:
        refused(server, expired, r"'SSLV3_ALERT_CERTIFICATE_EXPIRED', .*Issue new credentials, and look at the clocks")
        assert "certificate has expired" in events.wait_reason("certificate")["text"]
        connect(server, trust(aging, "worker", "1")).close()


@pytest.mark.parametrize("days", [30, 300])
def test_in_a_job_that_has_run_for_long_old_and_new_certificates_are_let_in(days: int) -> None:
    now = [utc_now() - timedelta(days=days)]
    authority = rpc.CertificateAuthority("job1", clock=lambda: now[0])
    of_the_begin, spare = trust(authority, "server", "0"), trust(authority, "worker", "0")
    now[0] = utc_now()
    with serving(of_the_begin) as server:
        for worker in (spare, trust(authority, "worker", "1")):
            with connect(server, worker) as client:
                assert client.call(Add(), [b"\x01\x02"], timeout_s=60).message.total == 3


def test_a_certificate_older_than_any_job_is_refused(events: Events) -> None:
    now = [utc_now() - CERTIFICATE_LIFETIME - timedelta(days=1)]
    authority = rpc.CertificateAuthority("job1", clock=lambda: now[0])
    expired = trust(authority, "worker", "0")
    now[0] = utc_now()
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        refused(server, expired, r"'SSLV3_ALERT_CERTIFICATE_EXPIRED', .*Issue new credentials, and look at the clocks")
        assert "certificate has expired" in events.wait_reason("certificate")["text"]


def test_an_expelled_process_is_refused_although_its_certificate_is_valid(
    authority: rpc.CertificateAuthority, events: Events
) -> None:
    revoked = {"1.0"}
    with serving(
        trust(authority, "server", "0"), write_event=events, is_revoked=lambda peer: peer.name in revoked
    ) as server:
        connect(server, trust(authority, "worker", "1.1")).close()
        refused(
            server,
            trust(authority, "worker", "1.0"),
            r"certificate: 'that of ringweave://job1/worker/1.0, which is no member any more', expected one of a",
        )
        events.wait_reason("revoked")


def test_an_expelled_process_loses_the_connection_that_it_has(
    authority: rpc.CertificateAuthority, events: Events
) -> None:
    revoked: set[str] = set()
    lost: list[rpc.Identity] = []
    options: dict[str, Any] = {"on_peer_exit": lost.append, "on_peer_lost": lost.append, "write_event": events}
    with (
        serving(trust(authority, "server", "0"), is_revoked=lambda peer: peer.name in revoked, **options) as server,
        connect(server, trust(authority, "worker", "1.0")) as expelled,
        connect(server, trust(authority, "worker", "2.0")) as member,
    ):
        assert expelled.call(Add(), [b"\x01"], timeout_s=60).message.total == 1
        revoked.add("1.0")
        assert "1.0, which is no member any more" in events.wait_reason("revoked")["text"]
        wait_until(lambda: server.peer_names() == {"2.0"})
        with pytest.raises(RpcError, match=r"no member any more|closed|lost"):
            expelled.call(Add(), [b"\x01"], timeout_s=60)
        assert member.call(Add(), [b"\x02"], timeout_s=60).message.total == 2
        assert [event["reason"] for event in events.seen] == ["revoked"]
        assert lost == [], "the job goes on without it, and nothing has happened"


def test_traffic_of_earlier_processes_of_a_slot_is_kept_as_one_sum(authority: rpc.CertificateAuthority) -> None:
    with serving(trust(authority, "server", "0")) as server:
        for incarnation in range(5):
            with connect(server, trust(authority, "worker", f"7.{incarnation}")) as client:
                client.call(Add(), [b"\x01"], timeout_s=60)
        wait_until(lambda: not server.peers())
        (peer,) = server.traffic_by_peer()
        assert (peer.name, server.traffic_by_peer()[peer].calls) == ("7", 5)


def test_no_certificate_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw,
            context.wrap_socket(raw) as sock,
            pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
        ):
            sock.recv(1)
        text = events.wait_reason("certificate")["text"]
        assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in text
        assert "Give the process the credentials that the job's authority issued" in text


def test_tls_1_2_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    context = authority.issue("worker", "0").tls_context(is_server=False)
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=60) as raw,
            pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"),
        ):
            context.wrap_socket(raw)
        assert "UNSUPPORTED_PROTOCOL" in events.wait_reason("certificate")["text"]


def test_a_wrong_token_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    stolen = rpc.TlsAuthentication(authority.issue("worker", "0"))
    stolen.token = "not the token"
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        refused(
            server, stolen, r"job token: 'another one', expected that of job job1\. Use the credentials .* other end"
        )
        assert "not the token" not in str(events.wait_reason("token"))


def test_an_identity_that_is_not_the_certificates_is_refused(
    authority: rpc.CertificateAuthority, events: Events
) -> None:
    liar = rpc.TlsAuthentication(authority.issue("worker", "0"))
    liar.identity = rpc.Identity(job="job1", role="server", name="1")
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        refused(server, liar, r"identity: 'ringweave://job1/server/1', expected that of the certificate, .*worker/0")
        events.wait_reason("identity")


def test_a_role_that_has_no_business_here_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    with serving(trust(authority, "server", "0"), write_event=events, roles=["worker"]) as server:
        refused(server, trust(authority, "monitor", "0"), r"role of the other end: 'monitor', expected worker\.")
        events.wait_reason("role")


def test_a_worker_that_listens_where_the_server_should_gets_no_token(authority: rpc.CertificateAuthority) -> None:
    with (
        serving(trust(authority, "worker", "0")) as server,
        pytest.raises(RefusedError, match=r"role of the other end: 'worker', expected server\. Look at the address"),
    ):
        connect(server, trust(authority, "worker", "1"))


def test_another_job_on_one_machine_is_refused_without_encryption(events: Events) -> None:
    here = PlaintextAuthentication(rpc.Identity(job="job1", role="server", name="0"), "token")
    other = PlaintextAuthentication(rpc.Identity(job="job2", role="worker", name="0"), "token")
    with serving(here, write_event=events) as server:
        refused(server, other, r"job of the other end: 'job2', expected job1")
        events.wait_reason("job")


def test_a_plain_peer_at_a_door_with_tls_is_refused(authority: rpc.CertificateAuthority, events: Events) -> None:
    plain = PlaintextAuthentication(
        rpc.Identity(job="job1", role="worker", name="0"), authority.issue("worker", "0").token
    )
    with serving(trust(authority, "server", "0"), write_event=events) as server:
        with pytest.raises(RpcError):
            connect(server, plain)
        events.wait_reason("certificate")


def test_silent_strangers_are_cut_in_time_and_bounded_in_number(
    authority: rpc.CertificateAuthority, events: Events
) -> None:
    limits = rpc.RpcLimits(handshake_s=5.0, max_unauthenticated=3)
    with serving(trust(authority, "server", "0"), write_event=events, limits=limits) as server:
        strangers = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(4)]
        events.wait_reason("full")
        events.wait_reason("deadline")
        for stranger in strangers:
            assert stranger.recv(1) == b""
            stranger.close()
        wait_until(lambda: not server._limiter.num_pending)
        server.limits = rpc.RpcLimits()  # five seconds may be little for a handshake on a busy machine
        connect(server, trust(authority, "worker", "0")).close()


def test_no_more_connections_than_allowed(authority: rpc.CertificateAuthority, events: Events) -> None:
    with (
        serving(trust(authority, "server", "0"), write_event=events, limits=rpc.RpcLimits(max_connections=1)) as server,
        connect(server, trust(authority, "worker", "0")),
    ):
        wait_until(lambda: len(server.peers()) == 1)
        with pytest.raises(RpcError):
            connect(server, trust(authority, "worker", "1"))
        assert "expected at most max_connections. Raise max_connections" in events.wait_reason("full")["text"]


def test_a_server_that_never_answers_is_given_up(authority: rpc.CertificateAuthority) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        pytest.raises(DeadlineError, match=r"connection: 'no answer in .*, expected a server that listens"),
    ):
        rpc.RpcClient.connect(
            "127.0.0.1",
            deaf.getsockname()[1],
            trust(authority, "worker", "0"),
            role="server",
            limits=rpc.RpcLimits(handshake_s=0.3),
        )


def test_refusals_reach_the_event_log(authority: rpc.CertificateAuthority, tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 1.0)
    with serving(trust(authority, "server", "0"), write_event=log.write) as server:
        with pytest.raises(RefusedError):
            connect(server, trust(rpc.CertificateAuthority("job1"), "worker", "0"))
        wait_until(lambda: bool(list(read_events(log.path))))
    (event,) = read_events(log.path)
    assert (event["kind"], event["reason"], event["refusals"]) == ("rpc_refused", "certificate", 1)
    assert "PRIVATE" not in log.path.read_text()
