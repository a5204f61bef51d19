"""The register of claims: a folder that both servers of a job can write to, one file for each claim.

A file appears with its whole content or not at all, and never takes the place of another: that is what the file system
promises of a hard link. So of two servers that make the same claim at the same time one is told that it was too late.
It has to outlive processes, not machines, so nothing waits for the disk. Where servers have no folder in common,
anything with a compare-and-set can take its place.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path

from ringweave.errors import LeadershipError, explain
from ringweave.files import json_text
from ringweave.params.rules.succession import Claim

_MAX_BYTES = 1 << 16
"""Of a claim."""


class Claims:
    """All claims that were made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> Claim | None:
        """That of the highest number; None before the first.

        Raises:
            LeadershipError: The folder cannot be read.
        """
        try:
            names = [each.name for each in self._folder.iterdir() if each.match("claim-*.json")]
            return _read(self._folder / max(names)) if names else None
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise self._refusal(cause) from cause

    def make(self, claim: Claim) -> bool:
        """Register it; False if there is another one of that number already.

        Raises:
            LeadershipError: The folder cannot be written. Whether it is registered is not known then.
        """
        partial = self._folder / f"partial-{os.getpid()}-{claim.leader}-{claim.number}"
        path = self._folder / f"claim-{claim.number:08d}.json"
        try:
            try:
                partial.write_text(json.dumps(asdict(claim)), encoding="ascii")
                os.link(partial, path)
            except FileExistsError:
                return _read(path) == claim  # by an attempt of which it was not known
            finally:
                partial.unlink(missing_ok=True)
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise self._refusal(cause) from cause
        return True

    def _refusal(self, cause: Exception) -> LeadershipError:
        return LeadershipError(
            explain(
                "register of servers",
                got=str(cause),
                expected="a folder that both servers can read and write",
                do="Look at that disk",
                where=str(self._folder),
            )
        )


def _read(path: Path) -> Claim:
    found = json_text.load(path, _MAX_BYTES)
    members = tuple(found["members"])
    return Claim(number=found["number"], term=found["term"], leader=found["leader"], members=members)
