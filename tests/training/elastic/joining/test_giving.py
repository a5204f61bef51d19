import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringweave import wire
from ringweave.training.elastic import crew as crews
from ringweave.training.elastic.crew import Facts, JobCrew, Means
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.state import JobState
from ringweave.training.timing import HostTimeline, StepTimer
from ringweave.wire.states import Describe, Shelf


class Giver:
    """A member, and what peers find on its shelf."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.shelf, self.rosters = Shelf(), Rosters(12, is_balanced=False)
        trust: Any = None
        teller: Any = None
        facts = Facts(member="0.0", state_place="127.0.0.1 9", cap=None, assumed_speed=1.0, alike={})
        means = Means(shelf=self.shelf, trust=trust)
        self.crew = JobCrew(
            facts, self.rosters, StepTimer(HostTimeline()), JobState(self.model, optimizer, {}), means, teller
        )

    def begin(self, *following: str) -> None:
        members = ("0.0", "1.0", "2.1")
        self.rosters.begin(0, members, [None] * 3, [None] * 3, [1.0] * 3, following)

    def weight(self, name: str) -> list[float] | None:
        """What a peer would read of it now; None where nothing is offered."""
        offer = self.shelf._offers.get(name)
        if offer is None:
            return None
        names = [piece.name for piece in offer.description.pieces]
        return np.frombuffer(offer.views[names.index("model/weight")], np.float32).tolist()


@pytest.mark.parametrize("is_lasting", [True, False])
def test_what_is_offered_lasts_while_somebody_follows(is_lasting: bool) -> None:
    giver = Giver()
    giver.begin("2.1")
    before = giver.model.weight.detach().reshape(-1).tolist()
    giver.crew.capture()
    giver.crew.offer("1.5", is_lasting=is_lasting)
    giver.crew.withdraw()
    assert giver.weight("1.5") == (before if is_lasting else None), "what is about to change is not read"
    with torch.no_grad():
        giver.model.weight.add_(1.0)
    assert giver.weight("1.5") == (before if is_lasting else None)
    giver.rosters.admit(4, ["2.1"], [None] * 3)
    giver.crew.withdraw()
    assert giver.weight("1.5") is None


def test_each_epoch_s_newcomers_read_the_state_of_that_epoch() -> None:
    giver = Giver()
    giver.begin("1.0", "2.1")
    for number in (5, 6):
        giver.crew.capture()
        giver.crew.offer(f"1.{number}", is_lasting=True)
        with torch.no_grad():
            giver.model.weight.fill_(number)
    assert giver.weight("1.6") == [5.0] * 6
    assert giver.weight("1.5") != [5.0] * 6


def test_a_copy_that_finds_no_memory_costs_the_giver_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    giver = Giver()
    monkeypatch.setattr(crews, "lasting", fail)
    giver.crew.capture()
    with caplog.at_level(logging.WARNING, "ringweave"):
        giver.crew.offer("1.5", is_lasting=True)
    assert caplog.messages == ["state for a worker that joins: no memory for a copy of it. The worker begins anew."]
    asked: Any = wire.Call(peer=None, message=Describe(name="1.5"), buffers=[], deadline_s=0.0)  # pyrefly: ignore
    assert giver.shelf._describe(asked).pieces == []
