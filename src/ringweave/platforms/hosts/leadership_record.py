"""Leadership records of a run's parameter servers, in the run's entry: a quorum of the hosts has each of them.

The entry keeps the latest record of the latest round alone. A record counts as appended once a quorum has saved the
entry in the term of the leader that answers; one that is appended again is committed again, since the first attempt may
have reached too few hosts. A read record may still get lost with its leader: the servers decide by what they append.
"""

from collections.abc import Callable
from dataclasses import replace

from ringweave import rpc
from ringweave.errors import RingweaveError
from ringweave.param_server import leadership_log
from ringweave.param_server.leadership import LeadershipRecord
from ringweave.param_server.leadership_log import LogAnswer, RoundLeadership
from ringweave.platforms.hosts.messages import HOST_ROLE, LeadershipAnswer, LeadershipRequest
from ringweave.platforms.hosts.run_entry import HostFolder, RunEntry

CALL_TIMEOUT_S = 3.0
"""Time for an answer of the host's service; shorter than that of the server's process for its node agent."""


def commit_record(
    message: LeadershipRequest, change_entry: Callable[[Callable[[RunEntry], RunEntry]], None]
) -> LeadershipAnswer:
    """Append a record to the run's entry if it is the next one, and return the latest; None only reads.

    Args:
        message: The request.
        change_entry: Commits a change of the newest entry, which is computed again where another thread was faster.

    Raises:
        LaunchError: There is no quorum; the record may or may not be appended.
    """
    wanted = None if message.record is None else leadership_log.parse_record(message.record)
    answers: list[LogAnswer] = []

    def change(entry: RunEntry) -> RunEntry:
        answers.append(leadership_log.append_to(entry.leadership, message.round, wanted))
        if not answers[-1].is_appended or wanted is None:
            return entry
        return replace(entry, leadership=RoundLeadership(round=message.round, record=wanted))

    change_entry(change)
    latest = answers[-1].latest
    text = None if latest is None else leadership_log.dump_record(latest)
    return LeadershipAnswer(record=text, is_appended=answers[-1].is_appended)


class HostLeadershipLog:
    """Log of a round's two servers, asked of the service of this host, which asks the leader of the run."""

    def __init__(self, folder: HostFolder, round_: int) -> None:
        self._folder, self._round = folder, round_

    def latest(self) -> LeadershipRecord | None:
        found = self._call(None).record
        return None if found is None else leadership_log.parse_record(found)

    def append(self, record: LeadershipRecord) -> bool:
        return self._call(leadership_log.dump_record(record)).is_appended

    def _call(self, record: str | None) -> LeadershipAnswer:
        message = LeadershipRequest(round=self._round, record=record)
        try:
            config = self._folder.load_config()
            authentication = rpc.TlsAuthentication(rpc.Credentials.load(self._folder.command_credentials))
            with rpc.RpcClient.connect(
                config.address, config.port, authentication, role=HOST_ROLE, timeout_s=CALL_TIMEOUT_S
            ) as client:
                answer = client.call(message, timeout_s=CALL_TIMEOUT_S).message
        except (RingweaveError, OSError) as error:
            do = "Nothing: it is asked again; a run needs a quorum of its hosts to change the leading server"
            expected = "an answer of the host service"
            raise leadership_log.log_error(str(error), expected=expected, do=do) from error
        assert isinstance(answer, LeadershipAnswer)
        return answer
