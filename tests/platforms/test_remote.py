"""The reference adapter is really run, and asked by the client as an adapter of somebody else would be."""

import http.client
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ringweave.errors import JobError, LaunchError, UnknownJobError, UsageError
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms import registry, remote, remote_adapter
from ringweave.platforms.api import LogLine, LogQuery
from ringweave.platforms.local import supervisor
from ringweave.platforms.local.job_folder import job_folder
from ringweave.platforms.local.platform import LocalPlatform
from ringweave.platforms.remote import RemotePlatform
from ringweave.platforms.remote_adapter import RemoteAdapter
from tests.platforms.served import TOKEN, served

REQUEST = JobRequest(
    name="job", num_workers=3, script="s.py", nodes=(NodeRequest(name="n0", capacity=3),), device="cpu"
)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPlatform:
    monkeypatch.setattr(supervisor, "ensure_supervisor", lambda state, job_id, environ: None)
    (tmp_path / "s.py").write_text("print('alone')")
    return LocalPlatform(tmp_path / "state", requester="ann", environ={}, clock=lambda: 100.0)


@pytest.fixture
def adapter(local: LocalPlatform) -> Iterator[RemoteAdapter]:
    with served(local) as adapter:
        yield adapter


@pytest.fixture
def there(adapter: RemoteAdapter) -> RemotePlatform:
    return RemotePlatform(f"http://127.0.0.1:{adapter.server_port}", TOKEN)


def test_it_answers_as_the_service_does(there: RemotePlatform, local: LocalPlatform, tmp_path: Path) -> None:
    tried = there.submit(REQUEST, base=tmp_path, dry_run=True)
    assert "print('alone')" in tried.objects[0].text
    assert there.jobs() == []
    there.submit(REQUEST, base=tmp_path)
    assert there.job("job") == local.job("job")
    assert there.jobs() == local.jobs()
    with pytest.raises(JobError, match="job name job: 'taken by ann 0 s ago"):
        there.submit(REQUEST, base=tmp_path)
    assert there.act("job", "suspend") == local.job("job")
    with pytest.raises(JobError, match="retry of job job"):
        there.act("job", "retry")


def test_logs_are_streamed(there: RemotePlatform, local: LocalPlatform, tmp_path: Path) -> None:
    there.submit(REQUEST, base=tmp_path)
    logs = job_folder(tmp_path / "state", local._registry.all_entries()[0].id).runs("n0", 1) / "round-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-1.log").write_text("a\nü\n")
    (logs / "rank-2.log").write_text("b\n")
    lines = list(there.logs("job", LogQuery(node="n0", rank=1, attempt=1)))
    assert lines == [LogLine(node="n0", attempt=1, round=1, rank=1, text=text) for text in ("a", "ü")]
    with pytest.raises(JobError, match="rank: 7, expected 0 to 2"):
        there.logs("job", LogQuery(rank=7))


def test_logs_may_be_silent_for_long(
    there: RemotePlatform, local: LocalPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.submit(REQUEST, base=tmp_path)
    logs = job_folder(tmp_path / "state", local._registry.all_entries()[0].id).runs("n0", 1) / "round-1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("a\n")
    made = []
    connect = http.client.HTTPConnection.connect

    def connected(connection: http.client.HTTPConnection) -> None:
        connect(connection)
        made.append(connection.sock)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connected)
    lines = there.logs("job", LogQuery())
    assert [sock.gettimeout() for sock in made] == [None], "whatever is read of it may take any time"
    assert [line.text for line in lines] == ["a"]
    there.job("job")
    assert made[-1].gettimeout() == remote.ANSWER_TIMEOUT_S


def test_the_script_that_travels_is_the_one_that_runs(there: RemotePlatform, tmp_path: Path) -> None:
    request = str(replace(REQUEST, script=str(tmp_path / "s.py")))
    body = {"request": request, "script_text": "print('sent')", "dry_run": True}
    assert "print('sent')" in there._request("POST", remote.JOBS_PATH, body)["objects"][0]["text"]
    with pytest.raises(JobError, match=r"script_text: None, expected the text of the script\. Send the script's text"):
        there._request("POST", remote.JOBS_PATH, body | {"script_text": None})


def test_a_module_needs_no_script_that_travels(there: RemotePlatform, tmp_path: Path) -> None:
    request = JobRequest(name="m", num_workers=3, module="json.tool", nodes=REQUEST.nodes)
    made = there.submit(request, base=tmp_path, dry_run=True)
    assert '"module": "json.tool"' in made.objects[0].text


def test_a_directory_has_to_be_there(there: RemotePlatform, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"script: .*, expected the path of a Python file\. Correct the script"):
        there.submit(
            JobRequest(name="d", num_workers=3, script="s.py", directory="nosuch", nodes=REQUEST.nodes), base=tmp_path
        )


def test_who_has_no_token_is_refused(adapter: RemoteAdapter) -> None:
    with pytest.raises(JobError, match=r"token: 'another one', expected the adapter's\. Set RINGWEAVE_SERVICE"):
        RemotePlatform(f"http://127.0.0.1:{adapter.server_port}").jobs()


def test_what_is_not_of_the_protocol(there: RemotePlatform) -> None:
    with pytest.raises(JobError, match=r"request: 'POST /v2/jobs/job/fly', expected one of the protocol's\. See docs"):
        there.act("job", "fly")


def test_another_protocol_is_refused_and_both_are_named(there: RemotePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "JOBS_PATH", "/v3/jobs")
    expected = (
        r"protocol of the request: 'v3', expected v2, which ringweave 0\.1\.0 serves here\. Use a ringweave of the same"
    )
    with pytest.raises(JobError, match=expected):
        there.jobs()


def test_a_job_that_is_not_there_is_told_from_other_refusals_and_from_a_proxys(
    there: RemotePlatform, tmp_path: Path
) -> None:
    with pytest.raises(UnknownJobError, match="job: 'nosuch', expected the name of an existing job"):
        there.job("nosuch")
    with pytest.raises(JobError) as caught:
        there.act("job", "fly")
    assert not isinstance(caught.value, UnknownJobError)
    assert isinstance(there._refusal(404, "<html>no such page"), LaunchError)


@pytest.mark.parametrize("length", ["-1", "x", "1" * 5000, str(remote_adapter.MAX_REQUEST_BYTES + 1)])
def test_a_request_of_no_length_is_refused(adapter: RemoteAdapter, length: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Length": length}
    connection = http.client.HTTPConnection("127.0.0.1", adapter.server_port, timeout=60)
    connection.request("POST", remote.JOBS_PATH, headers=headers)
    answer = connection.getresponse()
    assert (answer.status, b"bytes of the request: " in answer.read()) == (409, True)
    connection.close()


@pytest.mark.parametrize("body", [b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b"{"])
def test_a_request_of_rubbish_is_refused(adapter: RemoteAdapter, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", adapter.server_port, timeout=60)
    connection.request("POST", remote.JOBS_PATH, body, {"Authorization": f"Bearer {TOKEN}"})
    answer = connection.getresponse()
    assert (answer.status, b"expected JSON. See docs/how-to/write-a-platform.md" in answer.read()) == (409, True)
    connection.close()


@pytest.fixture
def strange() -> Iterator[tuple[RemotePlatform, list[bytes]]]:
    """A service elsewhere that answers with the bytes that are put into the list, whatever it is asked."""
    said: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said[0])

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield RemotePlatform(f"http://127.0.0.1:{server.server_port}", "secret"), said
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("rubbish", [b"", b"null", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"jobs": [3]}', b" " * 5001])
def test_an_answer_of_rubbish_is_the_adapters_fault(
    strange: tuple[RemotePlatform, list[bytes]], rubbish: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, said = strange
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 5000)
    monkeypatch.setattr(remote, "MAX_LINE_BYTES", 5000)
    said.append(rubbish)
    expected = r"service http://127\.0\.0\.1:\d+: .*, expected an answer of the protocol"
    for ask in (there.jobs, lambda: there.job("job")):
        with pytest.raises(LaunchError, match=expected):
            ask()
    if rubbish:  # a log may be empty
        with pytest.raises(LaunchError, match=expected):
            list(there.logs("job", LogQuery()))


def test_a_refusal_of_rubbish_is_shown_in_part(strange: tuple[RemotePlatform, list[bytes]]) -> None:
    assert "HTTP 409: [[[" in str(strange[0]._refusal(409, "[" * 100_000))


def test_it_cannot_be_reached(adapter: RemoteAdapter) -> None:
    there = RemotePlatform("http://127.0.0.1:9", "secret")
    with pytest.raises(LaunchError, match=r"service http://127\.0\.0\.1:9: .*, expected an answer of the protocol"):
        there.jobs()


def test_addresses_and_tokens(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    environ = {remote.TOKEN_FILE: str(tmp_path / "token")}
    assert isinstance(registry.open_platform("https://jobs.example:1", environ), RemotePlatform)
    with pytest.raises(UsageError, match=r"service: 'ftp://x', expected http\(s\)://HOST:PORT\. Write it like https"):
        registry.open_platform("ftp://x", {})
    with pytest.raises(UsageError, match=r"token file: '/nosuch', expected a file that can be read\. Correct"):
        registry.open_platform("http://x", {remote.TOKEN_FILE: "/nosuch"})
