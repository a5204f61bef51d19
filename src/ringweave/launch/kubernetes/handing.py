"""Credentials by the operator's desk: who makes them lodges them there, the others fetch their own."""

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence

from pydantic import TypeAdapter

from ringweave.errors import LaunchError, explain
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.handing import Handover, RoundOverError, WhyStop, going_on
from ringweave.launch.groups.spares import Spares
from ringweave.launch.kubernetes.post import RETRY_S, Desk
from ringweave.wire import Credentials

PATIENCE_S = 120.0
"""So long the desk may be away: another operator leads after the lease of one that was lost, and its own start."""
_OK = (200, 204)
_OVER = 410


class PatientDesk:
    """Asks again until the desk has answered well, or for too long has not."""

    def __init__(self, desk: Desk, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        """`sleep` waits before the desk is asked again; `clock` tells seconds that never go back."""
        self._desk, self._sleep, self._clock = desk, sleep, clock

    def ask(self, method: str, what: str, body: str | None = None, *, round_: int, why_stop: WhyStop) -> str:
        """The answer's text.

        Args:
            method: Of HTTP.
            what: Path behind the group's own.
            body: What is sent along.
            round_: Which round's credentials it is about.
            why_stop: Asked before each question.

        Raises:
            RoundOverError: They are not wanted any more, or of a round that is over.
            LaunchError: The desk says no, or nothing for too long.
        """
        deadline_s = self._clock() + PATIENCE_S
        while True:
            if why := why_stop():
                raise RoundOverError(round_, why)
            try:
                status, text, _ = self._desk.ask(method, what, body)
            except (OSError, http.client.HTTPException) as error:
                status, text = 503, str(error) or type(error).__name__
            if status in _OK:
                return text
            if status == _OVER:
                raise RoundOverError(round_, f"{status} {text}")
            if status in (409, 413) or self._clock() >= deadline_s:
                do = "See what the operator says: kubectl -n ringweave-system logs deploy/ringweave-operator"
                got = f"{status} {text}"
                raise LaunchError(explain("credentials at the operator's desk", got=got, expected="its yes", do=do))
            self._sleep(RETRY_S)


class DeskHandover(Handover):
    """For a parameter server."""

    def __init__(
        self,
        desk: Desk,
        ranks: Sequence[int],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Asks nothing yet.

        Args:
            desk: The operator's.
            ranks: Global ranks of this node's workers.
            sleep: Waits before the desk is asked again.
            clock: Seconds that never go back.
        """
        self._desk, self._ranks = PatientDesk(desk, sleep, clock), tuple(ranks)
        self._taken: tuple[int, dict[str, str]] = (0, {})

    def give(self, round_: int, credentials: Mapping[int, Credentials], why_stop: WhyStop = going_on) -> None:
        """Lodge them; a second time is as once."""
        body = json.dumps({str(rank): each.to_text() for rank, each in credentials.items()})
        self._desk.ask("PUT", f"credentials/{round_}", body, round_=round_, why_stop=why_stop)

    def take(self, round_: int, global_rank: int, why_stop: WhyStop = going_on) -> Credentials:
        """Those of the round, fetched for all workers of this node at once.

        Raises:
            RoundOverError: They are not wanted any more, or of a round that is over.
            LaunchError: The desk does not give them.
        """
        if self._taken[0] != round_:
            ranks = ",".join(map(str, self._ranks))
            text = self._desk.ask("GET", f"credentials/{round_}?ranks={ranks}", round_=round_, why_stop=why_stop)
            self._taken = (round_, _texts_in(text))
        return _credentials_of(str(global_rank), self._taken[1], where=f"worker {global_rank}")


class DeskSpares(Spares):
    """For an elastic job: what the processes of a node may need lies in a Secret of its own, and is taken out of it."""

    def __init__(
        self,
        desk: Desk,
        config: Config,
        node: int,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Asks nothing yet.

        Args:
            desk: The operator's.
            config: Of the job.
            node: Index of this node in the request.
            sleep: Waits before the desk is asked again.
            clock: Seconds that never go back.
        """
        self._desk, self._config = PatientDesk(desk, sleep, clock), config
        self._workers = frozenset(f"worker-{rank}" for rank in config.ranks(node))
        self._taken: tuple[int, dict[str, str]] = (0, {})

    def give(self, round_: int, credentials: Mapping[str, Sequence[Credentials]], why_stop: WhyStop = going_on) -> None:
        """Lodge them, node by node; a second time is as once."""
        for node in self._config.nodes:
            holders = {f"worker-{rank}" for rank in self._config.ranks(node.index)}
            if node.name in self._config.coordinating:
                holders.add(f"coordinator-{self._config.coordinating.index(node.name)}")
            texts = {
                f"{holder}.{life}": each.to_text()
                for holder in sorted(holders)
                for life, each in enumerate(credentials[holder])
            }
            what = f"spares/{round_}/{node.index}"
            self._desk.ask("PUT", what, json.dumps(texts), round_=round_, why_stop=why_stop)

    def take(self, round_: int, holder: str, why_stop: WhyStop = going_on) -> Credentials:
        """The next one's, taken for all workers of this node at once.

        Raises:
            RoundOverError: They are not wanted any more, or of a round that is over.
            LaunchError: The desk does not give them.
        """
        if self._taken[0] != round_:
            self._taken = (round_, {})
        if holder not in self._taken[1]:
            wanted = ",".join(sorted(self._workers if holder in self._workers else {holder}))
            text = self._desk.ask("POST", f"spares/{round_}?holders={wanted}", round_=round_, why_stop=why_stop)
            self._taken[1].update(_texts_in(text))
        return _credentials_of(holder, self._taken[1], where=holder)


def _texts_in(text: str) -> dict[str, str]:
    """What the desk gives; an error does not show it, since there are keys in it."""
    try:
        return _TEXTS.validate_json(text)
    except ValueError:
        raise _refusal(f"{len(text)} characters of something else", "") from None


def _credentials_of(holder: str, texts: dict[str, str], where: str) -> Credentials:
    if holder not in texts:
        raise _refusal("those of others", where)
    return Credentials.from_text(texts.pop(holder), where=where)


def _refusal(got: str, where: str) -> LaunchError:
    what, do = "credentials from the operator's desk", "Run the same ringweave in the operator and in its Pods"
    return LaunchError(explain(what, got=got, expected="those that were asked for", do=do, where=where))


_TEXTS = TypeAdapter(dict[str, str])
