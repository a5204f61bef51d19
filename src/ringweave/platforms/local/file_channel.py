"""Agent channel over the files of a job folder, on this machine or in a folder that several hosts share."""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from ringweave.files import file_io
from ringweave.param_server.leadership import FolderLeadershipLog, LeadershipLog
from ringweave.platforms.agent import agent_channel
from ringweave.platforms.agent.agent_channel import (
    NUM_INCARNATIONS,
    AgentChannel,
    AgentStatus,
    DesiredState,
    RoundOverError,
    StopReason,
    never_stop,
)
from ringweave.platforms.local import job_folder
from ringweave.platforms.local.job_folder import GroupFolder, JobFolder
from ringweave.rpc import Credentials

T = TypeVar("T")
_MAX_INCARNATIONS = 64
_MAX_CREDENTIALS = 480
"""Credentials of all processes together, beyond which none has more than it needs: a round begins once all are made."""
_MAX_SERVICES = 4
"""Processes beside the workers: two coordinators and two parameter servers."""


class FileAgentChannel(AgentChannel):
    """Channel over files: two for the desired state, one for the status, one for each unused credential.

    Each is replaced whole. Only the job's owner can read credentials; a file is removed when it is taken.
    """

    def __init__(
        self,
        job: JobFolder,
        group: GroupFolder,
        wait: Callable[[float], object],
        check_lease: Callable[[], str] | None = None,
    ) -> None:
        """Create the channel; reads nothing yet.

        `check_lease`: returns the reason why the agent has to leave; empty while there is none. With a lease, files
        that cannot be read count as unchanged, because the lease limits how long. None: a removed folder makes the
        agent leave.
        """
        self._job, self._group, self._wait, self._check_lease = job, group, wait, check_lease
        self._desired_state_file = ParsedFile(group.desired_state, agent_channel.DESIRED_STATE_JSON.parse)
        self._rendezvous_file = ParsedFile(job.rendezvous, agent_channel.RENDEZVOUS_JSON.parse)
        self._last = DesiredState(round=0)

    def desired_state(self) -> DesiredState:
        """Return the desired state; it says to leave when the lease is over or the group's folder was removed."""
        reason = self._check_lease() if self._check_lease else ""
        if reason:
            return DesiredState(round=self._last.round, stop=True, reason=reason)
        try:
            desired = self._desired_state_file.read()
            if desired is not None:
                self._last = replace(desired, rendezvous=self._rendezvous_file.read())
            elif self._check_lease is None:
                return DesiredState(round=0, stop=True, reason=f"its folder {self._group.root} was removed")
        except OSError:  # of a file server that stalls
            pass
        return self._last

    def report_status(self, status: AgentStatus) -> None:
        """Replace the status, and wake the supervisor if it runs on this machine."""
        if self._group.root.exists():
            file_io.replace_text(self._group.status, agent_channel.STATUS_JSON.dump(status))
        job_folder.notify(self._job.wakeup)

    def wait_for_change(self, timeout_s: float) -> None:
        self._wait(timeout_s)

    def num_incarnations(self, num_workers: int) -> int:
        return max(NUM_INCARNATIONS, min(_MAX_INCARNATIONS, _MAX_CREDENTIALS // (num_workers + _MAX_SERVICES)))

    def publish_credentials(
        self, round_: int, credentials: Mapping[str, Sequence[Credentials]], stop_reason: StopReason = never_stop
    ) -> None:
        """Write the credentials, once for each round."""
        for folder in self._job.secrets.glob("round-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for holder, incarnations in credentials.items():
            for number, each in enumerate(incarnations):
                each.save(self._job.secrets / f"round-{round_}" / f"{holder}.{number}.json")

    def leadership_log(self, round_: int) -> LeadershipLog:
        """Return a log in the job's folder; those of rounds before the last one are removed."""
        claims = self._job.root / "claims"
        for folder in claims.glob("round-*"):
            if int(folder.name.removeprefix("round-")) < round_ - 1:
                shutil.rmtree(folder, ignore_errors=True)
        return FolderLeadershipLog(claims / f"round-{round_}")

    def take_credentials(self, round_: int, holder: str, stop_reason: StopReason = never_stop) -> Credentials:
        """Read the next credentials, and remove their file."""
        while paths := list((self._job.secrets / f"round-{round_}").glob(f"{holder}.*.json")):
            path = min(paths, key=lambda path: int(path.name.removeprefix(f"{holder}.").removesuffix(".json")))
            with contextlib.suppress(FileNotFoundError):  # the next round's are being written
                found = Credentials.load(path)
                path.unlink()
                return found
        later = [int(each.name.removeprefix("round-")) for each in self._job.secrets.glob("round-*")]
        has_passed = max(later, default=0) > round_
        raise RoundOverError(round_, f"round {max(later)} has begun" if has_passed else f"none left for {holder}")


class ParsedFile(Generic[T]):
    """Parsed content of a file, parsed again only after it has changed.

    The file is opened for each read: only then does a file server show what another host has written.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], T]) -> None:
        self._path, self._parse = path, parse
        self._content: bytes | None = None
        self._value: T | None = None

    def read(self) -> T | None:
        """Return the content; None if there is no file."""
        try:
            content = file_io.read_bounded(self._path)
        except FileNotFoundError:
            return None
        if content != self._content:
            self._content, self._value = content, self._parse(content)
        return self._value
