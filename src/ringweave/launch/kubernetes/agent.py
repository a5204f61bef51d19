"""Main program of the container of a Pod: the group agent, with the operator's desk as its post.

    python -m ringweave.launch.kubernetes.agent

Everything that it is told stands in its environment and in the files of the ConfigMap and the Secret of its job.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from ringweave.jobs.life.observing import Phase
from ringweave.launch.groups.leading import Assignment, lead
from ringweave.launch.groups.posts import Report
from ringweave.launch.kubernetes import names
from ringweave.launch.kubernetes.handing import DeskHandover, DeskSpares
from ringweave.launch.kubernetes.objects import configs, keeping
from ringweave.launch.kubernetes.post import Desk, DeskPost
from ringweave.launch.local.sites import ThisMachine

LAST_WORDS = "/dev/termination-log"
_EXIT = {Phase.SUCCEEDED: 0, Phase.STOPPED: 143}


class SayingPost(DeskPost):
    """Says in the log which round's workers begin, for those who read it later, and sees to it that they can."""

    def __init__(self, desk: Desk, last_words: Path | None, home: Path) -> None:
        """`home` is the folder of the attempt."""
        super().__init__(desk, last_words)
        self._home = home

    def tell(self, report: Report) -> None:
        """Say it, and leave the report."""
        if report.phase is Phase.STOPPED:  # perhaps since somebody removes this Pod, and its log with it
            self.lodge_log("\n".join(keeping.printed(self._home)))
        if report.phase is Phase.RUNNING and report.iterations is None:
            sys.stdout.write(f"{keeping.ROUND}{report.round}\n")
            sys.stdout.flush()
        super().tell(report)


def main(environ: Mapping[str, str]) -> int:
    """Lead this Pod's workers to their end; the container's exit code."""
    data = {path.name: path.read_text() for path in _files(Path(environ["RINGWEAVE_CONFIG_DIR"]))}
    config = configs.config_of(data)
    namespace, job, node, attempt = environ["RINGWEAVE_POD"].split("/")
    desk = Desk(
        url=environ["RINGWEAVE_DESK"],
        group=f"{namespace}/{job}/{node}/{attempt}",
        token=(Path(environ["RINGWEAVE_SECRET_DIR"]) / configs.TOKEN).read_text,
        authority=environ.get("RINGWEAVE_DESK_AUTHORITY", ""),
    )
    home = Path(environ["RINGWEAVE_HOME"])
    assignment = Assignment(
        config=config,
        node=int(node),
        attempt=int(attempt),
        home=home,
        cpus_shared_by=config.node(int(node)).workers,
        site=ThisMachine(environ.get("POD_IP") or "127.0.0.1"),
        handover=DeskHandover(desk, config.ranks(int(node))),
        spares=DeskSpares(desk, config, int(node)),
        host=names.found_at(job, int(node), namespace),
    )
    os.chdir(config.directory or home)
    last_words = Path(environ.get("RINGWEAVE_LAST_WORDS", LAST_WORDS))
    post = SayingPost(desk, last_words if last_words.exists() else None, home)
    post.begin()
    ours = {"RINGWEAVE_DESK_AUTHORITY", "RINGWEAVE_SECRET_DIR", "RINGWEAVE_DESK"}
    phase = lead(assignment, post, {name: value for name, value in environ.items() if name not in ours})
    return _EXIT.get(phase, 1)


def _files(folder: Path) -> list[Path]:
    """The keys of a mounted ConfigMap; beside them are links of the kubelet's own."""
    return [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]


if __name__ == "__main__":
    sys.exit(main(os.environ))
