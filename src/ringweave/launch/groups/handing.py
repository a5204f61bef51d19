"""How credentials come from the agent that has the parameter server to those that have its workers."""

import abc
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ringweave.errors import LaunchError, explain
from ringweave.wire import Credentials

WhyStop = Callable[[], str]
"""Why what is waited for is not wanted any more, in words; empty while it is."""


def going_on() -> str:
    """It is wanted, however long it takes."""
    return ""


class RoundOverError(LaunchError):
    """The next round was called, or this node told to leave, while this one was still made ready: nobody's failure."""

    def __init__(self, round_: int, got: str) -> None:
        do = "Nothing to do: this node gathers for the next one"
        expected = "a round that is not over"
        super().__init__(explain(f"credentials of round {round_}", got=got, expected=expected, do=do))


class Handover(abc.ABC):
    """The way that groups of one job have to each other in their place."""

    @abc.abstractmethod
    def give(self, round_: int, credentials: Mapping[int, Credentials], why_stop: WhyStop = going_on) -> None:
        """Have those of all workers of a round be there for the other groups when this returns.

        Args:
            round_: Of the gate; those of former ones may be gone then.
            credentials: Global rank -> what its worker needs.
            why_stop: Asked while it waits.

        Raises:
            RoundOverError: They are not wanted any more, as `why_stop` says.
            LaunchError: There is nobody to give them to.
            OSError: They cannot be written.
        """

    @abc.abstractmethod
    def take(self, round_: int, global_rank: int, why_stop: WhyStop = going_on) -> Credentials:
        """Those of one worker of this group, after the gate has opened for the round.

        Raises:
            RoundOverError: They are gone, since a later round has begun, or not wanted any more, as `why_stop` says.
            LaunchError: They are not to be had.
            OSError: They are not there.
        """


class SharedFolder(Handover):
    """Files of the job's owner, each gone when it was read."""

    def __init__(self, folder: Path) -> None:
        """The folder is made for its owner alone."""
        self._folder = folder

    def give(self, round_: int, credentials: Mapping[int, Credentials], why_stop: WhyStop = going_on) -> None:
        """Write them, and remove those of other rounds but for the one before: some may still be starting it."""
        for folder in self._folder.glob("round-*"):
            if folder != self._round(round_ - 1):
                shutil.rmtree(folder, ignore_errors=True)
        for global_rank, each in credentials.items():
            each.save(self._file(round_, global_rank))

    def take(self, round_: int, global_rank: int, why_stop: WhyStop = going_on) -> Credentials:
        """Read them, and remove the file."""
        path = self._file(round_, global_rank)
        try:
            found = Credentials.load(path)
        except FileNotFoundError as error:
            if (latest := self._latest()) > round_:
                raise RoundOverError(round_, f"round {latest} has begun") from error
            raise
        path.unlink()
        return found

    def _latest(self) -> int:
        """The last round of which there are credentials; 0 if there are none."""
        return max((int(folder.name.removeprefix("round-")) for folder in self._folder.glob("round-*")), default=0)

    def _round(self, round_: int) -> Path:
        return self._folder / f"round-{round_}"

    def _file(self, round_: int, global_rank: int) -> Path:
        return self._round(round_) / f"worker-{global_rank}.json"
