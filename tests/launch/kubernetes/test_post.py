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

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Orders, Report
from ringweave.launch.kubernetes import post
from ringweave.launch.kubernetes.post import MAX_LAST_WORDS, Desk, DeskPost


@pytest.mark.parametrize("text", ["short", "x" * MAX_LAST_WORDS, "é→\n\x00" * 5000, "\\" * 3000])
def test_last_words_are_whole(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "LAST_S", 0.0)
    told = Report(round=3, phase=Phase.FAILED, pid=7, cause=Cause.PLACE, text=text, ended_s=5.0, last_loss=0.5)
    path = tmp_path / "last-words"
    DeskPost(Desk(url="http://127.0.0.1:9", group="a/b/0/1", token=str), path).tell(told)
    content = path.read_bytes()
    assert len(content) <= MAX_LAST_WORDS
    found = posts.parse_report(content)
    assert (found.round, found.phase, found.cause, found.ended_s, found.last_loss) == (
        *(3, Phase.FAILED, Cause.PLACE),
        *(5.0, 0.5),
    )
    if text == "short":
        assert found.text == text
    else:
        assert text.startswith(found.text.removesuffix("..."))
        assert len(content) > MAX_LAST_WORDS - 10, "no more is cut than must be"


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
def answering() -> Iterator[tuple[Desk, type[Answers]]]:
    """A desk, and what it answers."""
    answers = type("Made", (Answers,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Desk(url=f"http://127.0.0.1:{server.server_port}", group="a/b/0/1", token=lambda: "secret"), answers
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
    answering: tuple[Desk, type[Answers]],
    content: bytes,
    headers: dict[str, str],
    error: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(post, "MAX_ANSWER_BYTES", 1000)
    desk, answers = answering
    answers.content, answers.headers_said = b"x" * 1000, {post.TAG: "7"}
    assert desk.ask("GET", "orders") == (200, "x" * 1000, "7")
    answers.content, answers.headers_said = content, headers
    with pytest.raises(http.client.HTTPException) as caught:
        desk.ask("GET", "orders")
    assert re.match(error, str(caught.value))


def test_orders_that_are_none_are_asked_for_again(tmp_path: Path) -> None:
    said = iter(["", "[" * 100_000, "null", '{"round": "x"}', posts.dump_orders(Orders(round=4, leave=True))])
    waited: list[float] = []
    desk = SimpleNamespace(ask=lambda *_: (200, next(said), "tag"))
    own = DeskPost(cast("Desk", desk), None, sleep=waited.append)
    own._ask_on()
    assert own.orders() == Orders(round=4, leave=True)
    assert waited == [post.RETRY_S] * 4


def test_what_is_known_of_many_members_does_not_cost_the_last_words() -> None:
    many = tuple(f"{rank}.0" for rank in range(2000))
    said = Report(round=1, phase=Phase.SUCCEEDED, pid=7, text="all is well", epoch=(1, 2), members=many[:63], out=many)
    heard = posts.parse_report(post.last_words(said))
    assert (heard.phase, heard.text, heard.out) == (Phase.SUCCEEDED, "all is well", ())
    few = Report(round=1, phase=Phase.SUCCEEDED, pid=7, epoch=(1, 2), members=many[:3], out=many[3:6])
    assert posts.parse_report(post.last_words(few)) == few
