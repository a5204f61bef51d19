"""Credentials of a job's workers: their distribution from one agent to the others, and the pool of an elastic job.

An elastic job's pool holds several for each process that may be started again, each used only once. Their issuer
forgets the authority's key (docs/explanation/job-lifecycle.md): a key in a file would open everything, and a key in one
process's memory is lost with its node, which is what an elastic job survives.
"""

import abc
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringweave.errors import LaunchError, explain
from ringweave.rpc import Credentials

StopReason = Callable[[], str]
"""Returns the reason to stop waiting, in words; empty while there is none."""


def never_stop() -> str:
    """Return no reason to stop."""
    return ""


class RoundOverError(LaunchError):
    """The next round was requested, or the agent told to leave, while this round was being prepared; not a failure."""

    def __init__(self, round_: int, got: str) -> None:
        do = "Nothing to do; this node joins the next round"
        expected = "a current round"
        super().__init__(explain(f"credentials of round {round_}", got=got, expected=expected, do=do))


class CredentialDistribution(abc.ABC):
    """Distribution of a round's credentials from the agent with the parameter server to the other agents of the job."""

    @abc.abstractmethod
    def publish(
        self, round_: int, credentials: Mapping[int, Credentials], stop_reason: StopReason = never_stop
    ) -> None:
        """Make the credentials of all workers of a round available to the other agents.

        Args:
            round_: Round of the job; credentials of earlier rounds may be removed.
            credentials: Global rank -> credentials of its worker.
            stop_reason: Called while waiting.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no receiver.
            OSError: The credentials cannot be written.
        """

    @abc.abstractmethod
    def take(self, round_: int, global_rank: int, stop_reason: StopReason = never_stop) -> Credentials:
        """Take the credentials of one of this node's workers, after the round has started.

        Raises:
            RoundOverError: A later round has begun, or the round is obsolete, as `stop_reason` says.
            LaunchError: The credentials cannot be obtained.
            OSError: The credentials are missing.
        """


class FolderCredentialDistribution(CredentialDistribution):
    """Distribution by files that only the job's owner can read; each is removed when it is taken."""

    def __init__(self, folder: Path) -> None:
        """`folder` is created for its owner alone."""
        self._folder = folder

    def publish(
        self, round_: int, credentials: Mapping[int, Credentials], stop_reason: StopReason = never_stop
    ) -> None:
        """Write the credentials; remove those of other rounds except the previous one, which may still be starting."""
        for folder in self._folder.glob("round-*"):
            if folder != self._round_folder(round_ - 1):
                shutil.rmtree(folder, ignore_errors=True)
        for global_rank, each in credentials.items():
            each.save(self._credentials_file(round_, global_rank))

    def take(self, round_: int, global_rank: int, stop_reason: StopReason = never_stop) -> Credentials:
        """Read the credentials, and remove the file."""
        path = self._credentials_file(round_, global_rank)
        try:
            found = Credentials.load(path)
        except FileNotFoundError as error:
            if (latest := self._latest_round()) > round_:
                raise RoundOverError(round_, f"round {latest} has begun") from error
            raise
        path.unlink()
        return found

    def _latest_round(self) -> int:
        """Return the last round that has credentials; 0 if there is none."""
        return max((int(folder.name.removeprefix("round-")) for folder in self._folder.glob("round-*")), default=0)

    def _round_folder(self, round_: int) -> Path:
        return self._folder / f"round-{round_}"

    def _credentials_file(self, round_: int, global_rank: int) -> Path:
        return self._round_folder(round_) / f"worker-{global_rank}.json"


NUM_INCARNATIONS = 8
"""Upper limit of starts of a process in a round; the default of `max_retries` needs fewer. Then a new round begins."""


class CredentialPool(abc.ABC):
    """Pool of an elastic job's credentials, which survives the loss of a node."""

    @abc.abstractmethod
    def fill(
        self, round_: int, credentials: Mapping[str, Sequence[Credentials]], stop_reason: StopReason = never_stop
    ) -> None:
        """Put the credentials of a round into the pool; those of earlier rounds are removed.

        Args:
            round_: Number of the round.
            credentials: Holder (`worker-3`) -> credentials of its first process, its second, and so on.
            stop_reason: Called while waiting.

        Raises:
            RoundOverError: The round is obsolete, as `stop_reason` says.
            LaunchError: There is no receiver.
            OSError: The credentials cannot be written.
        """

    @abc.abstractmethod
    def take(self, round_: int, holder: str, stop_reason: StopReason = never_stop) -> Credentials:
        """Take the next credentials of a holder, each once; only one process at a time may be a holder's agent.

        Raises:
            RoundOverError: None is left for this round, or the round is obsolete, as `stop_reason` says.
            LaunchError: The credentials cannot be obtained.
            OSError: The credentials cannot be read.
        """


class FolderCredentialPool(CredentialPool):
    """Pool of files that only the job's owner can read; each is removed when it is taken."""

    def __init__(self, folder: Path) -> None:
        """`folder` is created for its owner alone."""
        self._folder = folder

    def fill(
        self, round_: int, credentials: Mapping[str, Sequence[Credentials]], stop_reason: StopReason = never_stop
    ) -> None:
        """Write the credentials, once for each round."""
        for folder in self._folder.glob("round-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for holder, incarnations in credentials.items():
            for number, each in enumerate(incarnations):
                each.save(self._round_folder(round_) / f"{holder}.{number}.json")

    def take(self, round_: int, holder: str, stop_reason: StopReason = never_stop) -> Credentials:
        """Read the next credentials, and remove their file."""
        paths = self._round_folder(round_).glob(f"{holder}.*.json")
        left = sorted(paths, key=lambda path: int(path.name.removeprefix(f"{holder}.").removesuffix(".json")))
        if not left:
            raise RoundOverError(round_, f"none left for {holder}")
        found = Credentials.load(left[0])
        left[0].unlink()
        return found

    def _round_folder(self, round_: int) -> Path:
        return self._folder / f"round-{round_}"
