"""The processes of a run's coordinators, without what they do."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ringweave.launch.elastic.coordinating import JobCoordinators
from ringweave.launch.local.attendants import Post
from ringweave.launch.local.sites import ThisMachine
from ringweave.launch.run_dirs import RunDir
from ringweave.membership.rules.settings import Bounds
from ringweave.membership.serving import main
from tests.launch.conftest import wait_until

ENDS_BADLY = "import sys; sys.exit(3)"
STAYS = "import signal; signal.pause()"


class Noted(ThisMachine):
    """Runs something else in the place of a coordinator: the first one of node a fails at once, all others stay."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, bool, int]] = []
        self.others: list[str] = []

    def enter_node(self, node: str, argv: Sequence[str]) -> Sequence[str]:
        asked = main.parse(argv[3:])
        self.asked.append((node, asked.standby, asked.index))
        self.others.append(asked.other)
        return [sys.executable, "-c", ENDS_BADLY if len(self.asked) == 1 else STAYS]


def test_one_that_died_comes_back_as_a_standby_with_its_own_index(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    site = Noted()
    posts = [Post(node=node, meeting=site.meeting(node)) for node in ("a", "b")]
    crew = JobCoordinators(posts, Bounds(least=1, most=2), 2, site, RunDir(root=tmp_path))

    def look() -> bool:
        crew.look()
        return len(site.asked) > 2

    with crew.running(os.environ):
        wait_until(look, "another coordinator")
        assert len(crew.pids) == 2, "those that run"
    assert not crew.pids
    assert site.asked == [("a", False, 0), ("b", True, 1), ("a", True, 0)]
    first, second = (f"{post.meeting.host}:{post.meeting.port}" for post in posts)
    assert site.others == [second, first, second], "each knows where the other one is"
