"""Credentials of an elastic job's round: several for each process that may be started again, each of use only once.

Who makes them forgets the authority's key, as for a parameter server (decision 0029): a key in a file would open
everything, and one that stays in its maker's memory is lost with that node, which is what an elastic job survives.
"""

import abc
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringweave.launch.groups.handing import RoundOverError, WhyStop, going_on
from ringweave.wire import Credentials

NUM_LIVES = 8
"""How often a process can be started in a round; by default `max_retries` asks for less. Then all begin another one."""


class Spares(abc.ABC):
    """Where the credentials of an elastic job wait, so that its place has them when a node is lost."""

    @abc.abstractmethod
    def give(self, round_: int, credentials: Mapping[str, Sequence[Credentials]], why_stop: WhyStop = going_on) -> None:
        """Have those of a round be there when this returns; those of former rounds go.

        Args:
            round_: Of the gate.
            credentials: Holder (`worker-3`) -> what its first process needs, its second, and so on.
            why_stop: Asked while it waits.

        Raises:
            RoundOverError: They are not wanted any more, as `why_stop` says.
            LaunchError: There is nobody to give them to.
            OSError: They cannot be written.
        """

    @abc.abstractmethod
    def take(self, round_: int, holder: str, why_stop: WhyStop = going_on) -> Credentials:
        """The next of this holder's, which nobody gets again; only one process at a time may be a holder's agent.

        Raises:
            RoundOverError: None is left of this round, or they are not wanted any more, as `why_stop` says.
            LaunchError: They are not to be had.
            OSError: They cannot be read.
        """


class FolderSpares(Spares):
    """Files of the job's owner, each gone when it was read."""

    def __init__(self, folder: Path) -> None:
        """The folder is made for its owner alone."""
        self._folder = folder

    def give(self, round_: int, credentials: Mapping[str, Sequence[Credentials]], why_stop: WhyStop = going_on) -> None:
        """Write them; only once for each round."""
        for folder in self._folder.glob("round-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for holder, lives in credentials.items():
            for number, each in enumerate(lives):
                each.save(self._round(round_) / f"{holder}.{number}.json")

    def take(self, round_: int, holder: str, why_stop: WhyStop = going_on) -> Credentials:
        """Read the next, and remove its file."""
        paths = self._round(round_).glob(f"{holder}.*.json")
        left = sorted(paths, key=lambda path: int(path.name.removeprefix(f"{holder}.").removesuffix(".json")))
        if not left:
            raise RoundOverError(round_, f"none left for {holder}")
        found = Credentials.load(left[0])
        left[0].unlink()
        return found

    def _round(self, round_: int) -> Path:
        return self._folder / f"round-{round_}"
