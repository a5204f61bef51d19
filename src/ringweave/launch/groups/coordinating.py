"""The coordinators of an elastic job: led by the agents of its first two nodes, new ones for each round.

An agent that takes the place of a lost one starts its node's coordinator again as a standby, where it was.
"""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringweave.launch.elastic.coordinating import ROLE, Coordinators, Pair
from ringweave.launch.groups.config import Config
from ringweave.launch.groups.handing import WhyStop, going_on
from ringweave.launch.groups.posts import Opening, Orders
from ringweave.launch.groups.spares import NUM_LIVES, Spares
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import num_established
from ringweave.launch.workers import Meeting
from ringweave.membership.rules.settings import Bounds
from ringweave.wire import Authority, Credentials, Identity

LINGER_S = 10.0
"""So long a coordinator stays for workers of other nodes when those of its own have finished: they say so as well."""
_RIVAL = 1
"""Connections of the other coordinator."""


class CoordinatorDesk:
    """Makes ready the coordinator of each round that is one node's."""

    def __init__(self, config: Config, node: str, site: Site, spares: Spares, host: str | None = None) -> None:
        """Makes nothing yet.

        Args:
            config: Of the job.
            node: Name of any node of the job; only its first two have a coordinator.
            site: Knows how the node is entered.
            spares: Where credentials wait.
            host: Name by which the others find this node, whoever leads it; None: its address stays the same.
        """
        self._config, self._node, self._site, self._spares, self._host = config, node, site, spares, host
        self._offered: tuple[int, Meeting] | None = None

    def offer(self, orders: Orders, why_stop: WhyStop = going_on) -> Meeting | None:
        """Where this node's coordinator of the round will listen; None where it has none, or the gate is open already.

        On the first node credentials of all processes of the round are there when this returns.

        Raises:
            RoundOverError: The credentials are not wanted any more, as `why_stop` says.
            LaunchError: There is no free port, or nobody to give the credentials to.
            OSError: The credentials cannot be written.
        """
        is_open = orders.opening is not None and orders.opening.round == orders.round
        if self._node not in self._config.coordinating or is_open:
            return None
        if self._node == self._config.coordinating[0]:
            self._spares.give(orders.round, self._issue(orders.round), why_stop)
        meeting = self._site.meeting(self._node)
        meeting = replace(meeting, host=self._host or meeting.host)
        self._offered = (orders.round, meeting)
        return meeting

    def coordinator(
        self, opening: Opening, run_dir: RunDir, environ: Mapping[str, str], *, starting: Sequence[str]
    ) -> "RoundCoordinator | None":
        """This node's coordinator of the round that is open; it does not run yet. None where it has none.

        Args:
            opening: Of the gate.
            run_dir: Of this round of this group.
            environ: What the process inherits.
            starting: Names of this node's workers as members.
        """
        if self._node not in self._config.coordinating or len(opening.coordinators) < len(self._config.coordinating):
            return None
        index = self._config.coordinating.index(self._node)
        assert self._config.least is not None, "it has coordinators"
        places = zip(self._config.coordinating, opening.coordinators, strict=True)
        pair = Pair(
            posts=[self._post(node, meeting) for node, meeting in places],
            bounds=Bounds(least=self._config.least, most=self._config.world_size),
            expected=self._config.world_size,
            starting=starting,
        )
        own = Coordinators(
            pair,
            self._site,
            run_dir,
            credentials=lambda which: self._spares.take(opening.round, f"{ROLE}-{which}"),
            own={index: index > 0 or self._offered != (opening.round, opening.coordinators[index])},
            give_up=_say,
        )
        return RoundCoordinator(own, opening.coordinators[index].port, environ)

    def _post(self, node: str, meeting: Meeting) -> Post:
        """Its own listens at the address that this node has now; the name may still be the one's that was lost."""
        is_named = node == self._node and self._host is not None
        return Post(node=node, meeting=meeting, address=self._site.meeting(node).host if is_named else None)

    def _issue(self, round_: int) -> dict[str, list[Credentials]]:
        """Holder -> its credentials; those of a worker name it as a member, `RANK.LIFE`."""
        identity = Identity(job=f"{self._config.job}-{round_}-{os.getpid()}", role=ROLE, name="0")
        authority = Authority(identity.job)
        issued = {
            f"worker-{rank}": [authority.issue("worker", f"{rank}.{life}") for life in range(NUM_LIVES)]
            for rank in range(self._config.world_size)
        }
        for index in range(len(self._config.coordinating)):
            issued[f"{ROLE}-{index}"] = [authority.issue(ROLE, str(index)) for _ in range(NUM_LIVES)]
        return issued


class RoundCoordinator:
    """One node's coordinator in one round."""

    death = ""
    """Nobody has to end for its death: the other one takes over, and it is started again."""

    def __init__(self, own: Coordinators, port: int, environ: Mapping[str, str]) -> None:
        self._own, self._port, self._environ = own, port, environ
        self._running = contextlib.ExitStack()
        self._since_s: float | None = None

    def start(self) -> None:
        """Run it from now on.

        Raises:
            LaunchError: It could not be started.
        """
        self._running.enter_context(self._own.running(self._environ))

    def tend(self) -> None:
        """Start it again if it has died."""
        self._own.look()

    def end(self) -> None:
        """End it."""
        self._running.close()

    def is_wanted(self, now_s: float) -> bool:
        """Workers of other nodes are connected to it, a while after those of its own have finished."""
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= LINGER_S:
            return False
        return sum(num_established(pid, self._port) for pid in self._own.pids) > _RIVAL


def _say(text: str) -> None:
    sys.stderr.write(f"ringweave: {text}\n")
    sys.stderr.flush()
