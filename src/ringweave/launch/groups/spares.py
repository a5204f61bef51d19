"""Credentials of an elastic job's round: several for each process that may be started again, each of use only once.

Who makes them forgets the authority's key, as for a parameter server (decision 0029): a key in a file would open
everything, and one that stays in its maker's memory is lost with that node, which is what an elastic job survives.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringweave.launch.groups.handing import RoundOverError
from ringweave.wire import Credentials

NUM_LIVES = 8
"""How often a process can be started in a round; by default `max_retries` asks for less. Then all begin another one."""


class Spares:
    """Files of the job's owner, each gone when it was read."""

    def __init__(self, folder: Path) -> None:
        """The folder is made for its owner alone."""
        self._folder = folder

    def give(self, round_: int, credentials: Mapping[str, Sequence[Credentials]]) -> None:
        """Have those of a round be there when this returns; those of former rounds go.

        Args:
            round_: Of the gate; only once for each.
            credentials: Holder (`worker-3`) -> what its first process needs, its second, and so on.

        Raises:
            OSError: They cannot be written, or there are some for this round.
        """
        for folder in self._folder.glob("round-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for holder, lives in credentials.items():
            for number, each in enumerate(lives):
                each.save(self._round(round_) / f"{holder}.{number}.json")

    def take(self, round_: int, holder: str) -> Credentials:
        """The next of this holder's, whose file is removed; only one process at a time may be a holder's agent.

        Raises:
            RoundOverError: None is left of this round.
            OSError: It cannot be read.
        """
        paths = self._round(round_).glob(f"{holder}.*.json")
        left = sorted(paths, key=lambda path: int(path.name.removeprefix(f"{holder}.").removesuffix(".json")))
        if not left:
            raise RoundOverError(round_, f"none left for {holder}")
        found = Credentials.load(left[0])
        left[0].unlink()
        return found

    def _round(self, round_: int) -> Path:
        return self._folder / f"round-{round_}"
