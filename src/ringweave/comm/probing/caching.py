"""Findings kept in a process and between jobs: one file for each set of nodes, with its age."""

import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ringweave.comm.probing import findings
from ringweave.comm.probing.findings import Findings
from ringweave.environment import FINDINGS
from ringweave.topology.recovery import Host

MAX_AGE_S = 24 * 3600.0
"""Older findings are not used: who moved a cable yesterday should not have to know of this cache."""

_VERSION = 1
_LOG = logging.getLogger("ringweave")


class Cache:
    """A folder of findings, and what was put into it by this object, whether the folder could be written or not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._put: dict[Path, Findings] = {}

    def get(self, hosts: Sequence[Host], now: float, max_age_s: float = MAX_AGE_S) -> Findings | None:
        """What is known of these nodes, by names, addresses and NICs; None if nothing is, or if it is too old.

        Findings of more nodes do as well: a group of some of a job's ranks need not be measured again. The newest are
        taken. A file that cannot be read is told of, and ignored.
        """
        wanted = {(host.name, host.address, host.nics) for host in hosts}
        young = [known for known in self._all() if 0 <= now - known.time <= max_age_s]
        for known in sorted(young, key=lambda known: known.time, reverse=True):
            nodes = {(node.name, node.address, known.offers.get(node.name, ())) for node in known.cluster().nodes}
            if wanted <= nodes:
                return known
        return None

    def _all(self) -> Iterator[Findings]:
        """What is known; files that say the same as this object come twice."""
        yield from self._put.values()
        for path in sorted(self._folder.glob("*.json")):
            if (found := self._read(path)) is not None:
                yield found

    def _read(self, path: Path) -> Findings | None:
        try:
            return findings.from_json(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as cause:
            _LOG.warning("ringweave: what probing kept in %s cannot be read and is ignored: %s", path, cause)
            return None

    def put(self, hosts: Sequence[Host], found: Findings) -> None:
        """Keep it. A folder that cannot be written is told of, and only this object keeps it."""
        path = self.path(hosts)
        self._put[path] = found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".new", delete=False) as file:
                file.write(found.to_json())
            Path(file.name).replace(path)
        except OSError as cause:
            _LOG.warning("ringweave: what probing found cannot be kept for other jobs: %s", cause)

    def path(self, hosts: Sequence[Host]) -> Path:
        """The file of these nodes."""
        key = json.dumps([_VERSION, *sorted([host.name, host.address, host.num_devices, *host.nics] for host in hosts)])
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"


@functools.cache
def of_process(folder: Path) -> Cache:
    """The cache of all groups of this process: where the folder cannot be written, the second one still knows.

    The house has no module state; but what groups of a process share is nowhere else, since torch makes them.
    """
    return Cache(folder)


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """RINGWEAVE_FINDINGS, else where caches belong by the XDG base directory specification."""
    if environ.get(FINDINGS):
        return Path(environ[FINDINGS])
    home = environ.get("XDG_CACHE_HOME") or str(Path(environ.get("HOME") or "/tmp") / ".cache")
    return Path(home) / "ringweave" / "probes"
