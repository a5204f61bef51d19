"""A coordinator and members that answer at once."""

from dataclasses import replace

from ringweave.membership.rules.coordinator import Coordinator
from ringweave.membership.rules.records import Decree, Standing
from ringweave.membership.rules.settings import Bounds, Settings
from ringweave.membership.rules.signs import Beat


def holder(member: str, **fields: object) -> Standing:
    return replace(Standing(member=member, has_state=True, committed=5), **fields)


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
        wanted = Settings(
            bounds=Bounds(least=least, most=most),
            expected=num_members,
            patience_s=20.0,
            is_kept_elsewhere=is_kept_elsewhere,
        )
        self.now_s = 0.0
        self.coordinator = Coordinator(wanted, now_s=0.0, index=index, is_standby=is_standby)

    def begin(self, *members: str) -> Decree:
        for member in members:
            self.coordinator.join(member, self.now_s)
        self.stand(*(Standing(member=member) for member in members))
        assert self.coordinator.decree is not None
        return self.coordinator.decree

    def stand(self, *standings: Standing) -> None:
        for standing in standings:
            proposal = self.coordinator.order_for(standing.member).proposal
            if proposal is not None:
                self.coordinator.stand(proposal.ballot, standing, self.now_s)

    def pass_time(self, seconds: float, *beating: str) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now_s += 0.1
            for member in beating:
                self.coordinator.beat(member, Beat(progress=int(self.now_s * 10)), self.now_s)
            self.coordinator.tick(self.now_s)
