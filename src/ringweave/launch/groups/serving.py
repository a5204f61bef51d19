"""The parameter server of a job: led by the agent of the node that is connected best, a new one for each round.

Who leads it makes the authority of the round, so that its key stays in one process. The credentials of the workers are
handed to the other agents (`handing.py`).
"""

import contextlib
import os
import signal
from collections.abc import Mapping

from ringweave.launch.groups.config import Config
from ringweave.launch.groups.handing import Handover, WhyStop, going_on
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import Site
from ringweave.launch.run_dirs import RunDir
from ringweave.launch.serving import ROLE, JobServer
from ringweave.launch.workers import Meeting
from ringweave.wire import Authority, Identity

QUIET_S = 10.0
"""A server to which nobody has been connected for so long is not wanted any more: a script that trained without it, or
members that left it in another way than by saying so. A member that lost its connection is back within seconds."""


class ServerDesk:
    """Makes the server of each round, on one node."""

    def __init__(self, config: Config, node: str, site: Site, handover: Handover) -> None:
        """`handover` is the way to the other groups of the job."""
        self._config, self._node, self._site, self._handover = config, node, site, handover
        self._made: tuple[int, Meeting, Authority] | None = None

    def offer(self, round_: int, why_stop: WhyStop = going_on) -> Meeting:
        """Where the server of this round will listen; credentials of all workers are there when this returns.

        Raises:
            RoundOverError: They are not wanted any more, as `why_stop` says.
            LaunchError: There is no free port, or nobody to give the credentials to.
            OSError: The credentials cannot be written.
        """
        meeting = self._site.meeting(self._node)
        identity = Identity(job=f"{self._config.job}-{round_}-{os.getpid()}", role=ROLE, name="0")
        authority = Authority(identity.job)
        ranks = range(self._config.world_size)
        self._handover.give(round_, {rank: authority.issue("worker", str(rank)) for rank in ranks}, why_stop)
        self._made = (round_, meeting, authority)
        return meeting

    def server(self, round_: int, run_dir: RunDir, environ: Mapping[str, str]) -> "RoundServer | None":
        """The server that was offered for this round; it does not run yet."""
        if self._made is None or self._made[0] != round_:
            return None
        _, meeting, authority = self._made
        return RoundServer(JobServer([Post(node=self._node, meeting=meeting)], self._site, run_dir, authority), environ)


class RoundServer:
    """The server of one round."""

    def __init__(self, server: JobServer, environ: Mapping[str, str]) -> None:
        self._server, self._environ = server, environ
        self._running = contextlib.ExitStack()
        self._heard_s: float | None = None

    def start(self) -> None:
        """Run it from now on.

        Raises:
            LaunchError: It could not be started.
        """
        self._running.enter_context(self._server.running(self._environ))

    def tend(self) -> None:
        """Nothing to be done: who dies takes the round along."""

    def end(self) -> None:
        """End it, if it has not ended by itself."""
        self._running.close()

    @property
    def death(self) -> str:
        """How it died, in words; empty while it runs, and where it ended well."""
        code = self._server.exit_code
        if not code:
            return ""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the parameter server on node {self._server.node} {how}"

    def is_wanted(self, now_s: float) -> bool:
        """Workers are connected to it, or were a moment ago. It ends by itself when all rings have left it."""
        if self._server.exit_code is not None:
            return False
        if self._heard_s is None or self._server.num_peers:
            self._heard_s = now_s
        return now_s - self._heard_s < QUIET_S
