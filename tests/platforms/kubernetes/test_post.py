"""What a container says last is what the kubelet can read."""

import http.client
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import AgentStatus, DesiredState
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig
from ringweave.platforms.kubernetes import agent_main
from ringweave.platforms.kubernetes.agent_main import MAX_TERMINATION_MESSAGE_BYTES, GatewayChannel, GatewayClient

CONFIG = JobConfig(
    job="b", device="cpu", mode="auto", nodes=(NodeConfig(index=0, name="n0", workers=1),), script="s.py"
)


@pytest.mark.parametrize("text", ["short", "x" * MAX_TERMINATION_MESSAGE_BYTES, "é→\n\x00" * 5000, "\\" * 3000])
def test_last_words_are_whole(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_main, "FINAL_STATUS_TIMEOUT_S", 0.0)
    told = AgentStatus(
        round=3, phase=GroupPhase.FAILED, pid=7, cause=EndCause.PLATFORM, text=text, ended_s=5.0, last_loss=0.5
    )
    path = tmp_path / "last-words"
    gateway = GatewayClient(url="http://127.0.0.1:9", group="a/b/0/1", token=str)
    GatewayChannel(gateway, CONFIG, 0, termination_log=path).report_status(told)
    content = path.read_bytes()
    assert len(content) <= MAX_TERMINATION_MESSAGE_BYTES
    found = agent_channel.STATUS_JSON.parse(content)
    assert (found.round, found.phase, found.cause, found.ended_s, found.last_loss) == (
        *(3, GroupPhase.FAILED, EndCause.PLATFORM),
        *(5.0, 0.5),
    )
    if text == "short":
        assert found.text == text
    else:
        assert text.startswith(found.text.removesuffix("..."))
        assert len(content) > MAX_TERMINATION_MESSAGE_BYTES - 10, "no more is cut than must be"


class Answers(BaseHTTPRequestHandler):
    """Answers with what the class has been given, whatever it is asked."""

    content, headers_said = b"", dict[str, str]()

    def do_GET(self) -> None:
        self.send_response(200)
        for name, value in self.headers_said.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def answering() -> Iterator[tuple[GatewayClient, type[Answers]]]:
    """A desk, and what it answers."""
    answers = type("Made", (Answers,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield (
            GatewayClient(url=f"http://127.0.0.1:{server.server_port}", group="a/b/0/1", token=lambda: "secret"),
            answers,
        )
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("content", "headers", "error"),
    [
        (b"x" * 1001, {}, "an answer of more than 1000 bytes"),
        (b"x" * 1001, {"Content-Length": "1001"}, "an answer of more than 1000 bytes"),
        (b"x" * 10, {"Content-Length": "11"}, r"IncompleteRead\(10 bytes read, 1 more expected\)"),
        (b"\xff\xfe", {}, "an answer that is no text"),
    ],
)
def test_who_answers_without_end_or_sense_is_no_desk(
    answering: tuple[GatewayClient, type[Answers]],
    content: bytes,
    headers: dict[str, str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_main, "MAX_GATEWAY_ANSWER_BYTES", 1000)
    desk, answers = answering
    answers.content, answers.headers_said = b"x" * 1000, {agent_main.TAG_HEADER: "7"}
    assert desk.request("GET", "desired-state") == (200, "x" * 1000, "7")
    answers.content, answers.headers_said = content, headers
    with pytest.raises(http.client.HTTPException) as caught:
        desk.request("GET", "desired-state")
    assert re.match(error, str(caught.value))


def test_orders_that_are_none_are_asked_for_again(tmp_path: Path) -> None:
    said = iter(
        [
            "",
            "[" * 100_000,
            "null",
            '{"round": "x"}',
            agent_channel.DESIRED_STATE_JSON.dump(DesiredState(round=4, stop=True)),
        ]
    )
    waited: list[float] = []
    desk = SimpleNamespace(request=lambda *_: (200, next(said), "tag"))
    own = GatewayChannel(cast("GatewayClient", desk), CONFIG, 0, sleep=waited.append)
    own._poll_desired_state()
    assert own.desired_state() == DesiredState(round=4, stop=True)
    assert waited == [agent_main.GATEWAY_RETRY_S] * 4


def test_what_is_known_of_many_members_does_not_cost_the_last_words() -> None:
    many = tuple(f"{rank}.0" for rank in range(2000))
    said = AgentStatus(
        round=1,
        phase=GroupPhase.SUCCEEDED,
        pid=7,
        text="all is well",
        generation=(1, 2),
        members=many[:63],
        evicted=many,
    )
    heard = agent_channel.STATUS_JSON.parse(agent_main.termination_message(said))
    assert (heard.phase, heard.text, heard.evicted) == (GroupPhase.SUCCEEDED, "all is well", ())
    few = AgentStatus(
        round=1, phase=GroupPhase.SUCCEEDED, pid=7, generation=(1, 2), members=many[:3], evicted=many[3:6]
    )
    assert agent_channel.STATUS_JSON.parse(agent_main.termination_message(few)) == few
