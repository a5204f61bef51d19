"""A coordinator and members that answer at once."""

from dataclasses import replace

from ringweave.membership.coordinator import Coordinator
from ringweave.membership.failure_detector import Heartbeat
from ringweave.membership.membership_records import Membership, MemberStatus
from ringweave.membership.settings import MemberBounds, MembershipSettings


def holder(member: str, **fields: object) -> MemberStatus:
    return replace(MemberStatus(member=member, has_state=True, committed=5), **fields)


class Table:
    """A coordinator and members that answer at once."""

    def __init__(
        self,
        num_members: int,
        *,
        least: int = 1,
        most: int = 16,
        index: int = 0,
        is_standby: bool = False,
        is_kept_elsewhere: bool = False,
    ) -> None:
        wanted = MembershipSettings(
            bounds=MemberBounds(min_members=least, max_members=most),
            expected=num_members,
            member_wait_s=20.0,
            has_external_state=is_kept_elsewhere,
        )
        self.now_s = 0.0
        self.coordinator = Coordinator(wanted, now_s=0.0, index=index, is_standby=is_standby)

    def begin(self, *members: str) -> Membership:
        for member in members:
            self.coordinator.join(member, self.now_s)
        self.report_status(*(MemberStatus(member=member) for member in members))
        assert self.coordinator.membership is not None
        return self.coordinator.membership

    def report_status(self, *statuses: MemberStatus) -> None:
        for status in statuses:
            proposal = self.coordinator.directive_for(status.member).proposal
            if proposal is not None:
                self.coordinator.report_status(proposal.generation_id, status, self.now_s)

    def pass_time(self, seconds: float, *beating: str) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            for member in beating:
                self.coordinator.record_heartbeat(member, Heartbeat(progress=int(self.now_s * 10)), self.now_s)
            self.coordinator.tick(self.now_s)
