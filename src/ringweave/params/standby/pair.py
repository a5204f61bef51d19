"""One of two servers, as its process has it: whom it talks to, and what it does as time passes."""

import argparse
import threading
from collections.abc import Callable, Sequence

from ringweave import wire
from ringweave.errors import LeadershipError, UsageError, explain
from ringweave.params.rules.succession import Claim
from ringweave.params.serving.service import ParameterService
from ringweave.params.standby.claims import Claims
from ringweave.params.standby.following import Following, follow_on
from ringweave.params.standby.hearing import Hearing
from ringweave.params.standby.leadership import Leadership
from ringweave.telemetry import say
from ringweave.wire import Handler, PeerStatus

_CONNECT_S = 1.0


class Pair:
    """This server, and how it finds the other one."""

    def __init__(self, asked: argparse.Namespace, trust: wire.Trust, note: Callable[[Claim, str], object]) -> None:
        """`asked` are the arguments of the process.

        Raises:
            UsageError: There is no register, or no address.
        """
        host, _, port = asked.other.rpartition(":")
        if asked.claims is None or not host or not port.isdigit():
            got = f"--other {asked.other}" + ("" if asked.claims else " without --claims")
            do = "Give the address of the other server and a folder that both can write to"
            raise UsageError(explain("standby", got=got, expected="--other HOST:PORT and --claims DIR", do=do))
        self._address, self._trust = (host, int(port)), trust
        self._hearing = Hearing(asked.host, asked.lease_s)
        self.leadership = Leadership(
            asked.index,
            Claims(asked.claims),
            self._connect,
            lease_s=asked.lease_s,
            reach=self._hearing.reach,
            note=note,
        )
        self._following: Following | None = None
        self._said = ""

    def handlers(self, service: ParameterService) -> list[Handler]:
        """What the wire's server has to know beside the service's."""
        self._following = Following(self.leadership, service, self._connect)
        return self._following.handlers()

    def begin(self, service: ParameterService, stop: threading.Event) -> None:
        """The server listens: lead, or ask the other one for everything."""
        self.leadership.begin(service)
        assert self._following is not None, "its handlers are known"
        following = self._following
        threading.Thread(
            target=follow_on, args=(following, self.leadership, stop.wait), name="params following", daemon=True
        ).start()

    def tick(self, peers: Sequence[PeerStatus], service: ParameterService) -> None:
        """Time has passed: take over, go on alone, or leave it to the other one.

        Raises:
            LeadershipError: The other one has gone on without this one, which has to end.
        """
        self._hearing.hear(peers, service)
        is_connected = any(peer.identity.role == "server" for peer in peers)
        said = ""
        try:
            if self.leadership.tick(is_leader_connected=is_connected):
                service.attendance.take_over(self._hearing.lately(peers))
        except LeadershipError as error:  # the register cannot be used just now
            said = str(error)
        if self.leadership.waits:
            said = said or "answers nothing: it hears neither its standby nor the rings that it needs to go on alone"
        if said not in ("", self._said):
            say(f"parameter server: {said}", is_error=True)
        self._said = said
        if self.leadership.deposed:
            got, do = self.leadership.deposed, "Start it again: it follows the one that leads"
            raise LeadershipError(explain("parameter server", got=got, expected="one that is needed", do=do))

    def _connect(self) -> wire.Client:
        return wire.Client.connect(*self._address, self._trust, role="server", timeout_s=_CONNECT_S)
