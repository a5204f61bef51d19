"""The post of a group agent in a Pod: the operator's desk, asked in long questions by a thread of its own."""

import bisect
import http.client
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Orders, Post, Report

TAG = "X-Ringweave-Orders"
_LONGEST_S = 60.0
"""The desk answers within 25 s."""
RETRY_S = 0.5
"""Before a desk that cannot be reached is tried again."""
LAST_S = 10.0
"""How long the last report is tried for; the kubelet tells it as well."""

MAX_LAST_WORDS = 4096
"""Bytes that the kubelet reads of a container's last words; of a longer file it takes the end, which is no report."""

MAX_ANSWER_BYTES = 4 * 2**20
"""Of the desk: credentials of a node, as much as an object of the API server can hold; quotation doubles some of it."""

LOG_S = 5.0
"""How long a log is tried for; before the last report, as a Pod that is removed has 30 s for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Where the desk is, and how an agent shows whose it is."""

    url: str
    group: str
    """`NAMESPACE/JOB/NODE/ATTEMPT`."""
    token: Callable[[], str]
    """Says it anew for each question: where somebody removed the Secret it is made again, with another one."""
    authority: str = ""
    """The certificate that the desk shows, as PEM; empty where it is reached without TLS."""

    def ask(self, method: str, what: str, body: str | None = None, tag: str = "") -> tuple[int, str, str]:
        """Status, text and tag of the answer.

        Raises:
            OSError: Nobody answers.
            http.client.HTTPException: Somebody answers who is no desk: in no HTTP, no UTF-8, or without end.
        """
        place = urlsplit(self.url)
        host, port = place.hostname or "", place.port or 443
        connection: http.client.HTTPConnection
        if place.scheme == "https":
            context = ssl.create_default_context(cadata=self.authority)
            connection = http.client.HTTPSConnection(host, port, timeout=_LONGEST_S, context=context)
        else:
            connection = http.client.HTTPConnection(host, port, timeout=_LONGEST_S)
        headers = {"Authorization": f"Bearer {self.token()}", **({TAG: tag} if tag else {})}
        try:
            content = None if body is None else body.encode()  # http.client would write Latin-1
            connection.request(method, f"/v1/{self.group}/{what}", body=content, headers=headers)
            with connection.getresponse() as answer:
                return answer.status, _text_of(answer), answer.headers.get(TAG, "")
        finally:
            connection.close()


def _text_of(answer: http.client.HTTPResponse) -> str:
    content = answer.read(MAX_ANSWER_BYTES + 1)
    if len(content) > MAX_ANSWER_BYTES:
        raise http.client.HTTPException(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    if answer.length:
        raise http.client.IncompleteRead(content, answer.length)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise http.client.HTTPException(f"an answer that is no text ({error.reason})") from error


def _orders_in(text: str) -> Orders | None:
    try:
        return posts.parse_orders(text)
    except ValueError:  # of no desk, or one of another version: it is asked again
        return None


def last_words(report: Report) -> str:
    """The report as JSON that the kubelet reads whole; a long text in it is cut.

    What it knows of members goes first: the coordinators of other nodes know it too.
    """
    said = posts.dump_report(report)
    if len(said.encode()) <= MAX_LAST_WORDS:
        return said
    report = replace(report, members=(), out=())
    said = posts.dump_report(report)
    if len(said.encode()) <= MAX_LAST_WORDS:
        return said

    def cut(num_characters: int) -> str:
        return posts.dump_report(replace(report, text=f"{report.text[:num_characters]}..."))

    too_many = bisect.bisect(range(len(report.text)), MAX_LAST_WORDS, key=lambda count: len(cut(count).encode()))
    return cut(max(0, too_many - 1))


class DeskPost(Post):
    """Keeps the newest orders at hand, and brings reports to the desk without waiting for it, but for the last one."""

    def __init__(self, desk: Desk, last_words: Path | None, sleep: Callable[[float], None] = time.sleep) -> None:
        """Asks once `begin` was called.

        Args:
            desk: The operator's.
            last_words: Where the kubelet reads what a container says last; None: nowhere.
            sleep: Waits before the desk is tried again.
        """
        self._desk, self._last_words, self._sleep = desk, last_words, sleep
        self._orders = Orders(round=0)
        self._changed = threading.Event()
        self._report: Report | None = None
        self._news = threading.Condition()

    def begin(self) -> None:
        """Ask for orders and bring reports from now on."""
        threading.Thread(target=self._ask_on, name="orders", daemon=True).start()
        threading.Thread(target=self._report_on, name="reports", daemon=True).start()

    def orders(self) -> Orders:
        """The last that were heard; none at first."""
        return self._orders

    def tell(self, report: Report) -> None:
        """Have it brought to the desk; one that is the last also to where the kubelet finds it."""
        with self._news:
            self._report = report
            self._news.notify_all()
        if report.phase.is_alive:
            return
        if self._last_words is not None:
            self._last_words.write_text(last_words(report), encoding="utf-8")
        with self._news:
            self._news.wait_for(lambda: self._report is None, LAST_S)

    def wait(self, timeout_s: float) -> None:
        """Until orders change, or so long."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def lodge_log(self, text: str) -> None:
        """Have the desk keep what was printed, for those who ask when this Pod is gone; it is tried for a while."""
        deadline_s = time.monotonic() + LOG_S
        while self._ask("PUT", "log", text)[0] == 503 and time.monotonic() < deadline_s:
            self._sleep(RETRY_S)

    def _ask_on(self) -> None:
        tag = ""
        while not self._orders.leave:
            status, text, new_tag = self._ask("GET", "orders", tag=tag)
            orders = _orders_in(text) if status == 200 else None
            if orders is not None:
                tag, self._orders = new_tag, orders
                self._changed.set()
            elif status != 204:
                self._sleep(RETRY_S)

    def _report_on(self) -> None:
        """Bring the newest report, and leave out what it replaced while the desk could not be reached."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._report is not None)
                report = self._report
            assert report is not None
            status, _, _ = self._ask("PUT", "report", posts.dump_report(report))
            if status not in (204, 410):
                self._sleep(RETRY_S)
                continue
            with self._news:
                if self._report is report:
                    self._report = None
                    self._news.notify_all()

    def _ask(self, method: str, what: str, body: str | None = None, tag: str = "") -> tuple[int, str, str]:
        try:
            return self._desk.ask(method, what, body, tag)
        except (OSError, http.client.HTTPException):
            return 503, "", ""
