"""Credentials by the operator's desk: who has the parameter server lodges them there, the others fetch their own."""

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence

from ringweave.errors import LaunchError, explain
from ringweave.launch.groups.handing import Handover, RoundOverError, WhyStop, going_on
from ringweave.launch.kubernetes.post import RETRY_S, Desk
from ringweave.wire import Credentials

PATIENCE_S = 120.0
"""So long the desk may be away: another operator leads after the lease of one that was lost, and its own start."""
_OK = (200, 204)
_OVER = 410


class DeskHandover(Handover):
    """Asks again until the desk has answered well, or for too long has not."""

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
        self._desk, self._ranks = desk, tuple(ranks)
        self._sleep, self._clock = sleep, clock
        self._taken: tuple[int, dict[str, str]] = (0, {})

    def give(self, round_: int, credentials: Mapping[int, Credentials], why_stop: WhyStop = going_on) -> None:
        """Lodge them; a second time is as once."""
        body = json.dumps({str(rank): each.to_text() for rank, each in credentials.items()})
        self._ask("PUT", round_, "", body, why_stop=why_stop)

    def take(self, round_: int, global_rank: int, why_stop: WhyStop = going_on) -> Credentials:
        """Those of the round, fetched for all workers of this node at once."""
        if self._taken[0] != round_:
            ranks = ",".join(map(str, self._ranks))
            self._taken = (round_, json.loads(self._ask("GET", round_, f"?ranks={ranks}", why_stop=why_stop)))
        return Credentials.from_text(self._taken[1].pop(str(global_rank)), where=f"worker {global_rank}")

    def _ask(self, method: str, round_: int, query: str, body: str | None = None, *, why_stop: WhyStop) -> str:
        deadline_s = self._clock() + PATIENCE_S
        while True:
            if why := why_stop():
                raise RoundOverError(round_, why)
            try:
                status, text, _ = self._desk.ask(method, f"credentials/{round_}{query}", body)
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
