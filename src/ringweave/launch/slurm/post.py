"""The post of a group on Slurm: files on the shared file system, and the lease."""

import time
from collections.abc import Callable

from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Opening, Orders, Post, Report
from ringweave.launch.local.jobs.folders import GroupFolder, JobFolder, replace_text
from ringweave.launch.slurm.leases import Lease

LOOK_S = 0.1
"""Between two looks: other machines cannot ring."""


class SharedPost(Post):
    """Orders come from two files that are replaced whole, reports go to a third."""

    def __init__(
        self, job: JobFolder, group: GroupFolder, lease: Lease, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._job, self._group, self._lease, self._sleep = job, group, lease, sleep
        self._last = Orders(round=0)

    def orders(self) -> Orders:
        """What is wanted now. What cannot be read now is as it was: the lease says how long that may go on."""
        why = self._lease.look()
        if why:
            return Orders(round=self._last.round, leave=True, why=why)
        try:
            orders = posts.parse_orders(self._group.orders.read_bytes())
            self._last = Orders(round=orders.round, opening=self._opening(), leave=orders.leave, why=orders.why)
        except OSError:
            pass
        return self._last

    def tell(self, report: Report) -> None:
        """Leave it in the group's folder."""
        replace_text(self._group.report, posts.dump_report(report))

    def wait(self, timeout_s: float) -> None:
        """Return soon."""
        self._sleep(min(timeout_s, LOOK_S))

    def _opening(self) -> Opening | None:
        try:
            return posts.parse_opening(self._job.gate.read_bytes())
        except FileNotFoundError:
            return None
