import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringweave import rpc
from ringweave.planning.balancing import Speed
from ringweave.rpc.state_transfer import DescribeState, StateServer
from ringweave.training.elastic import trainer
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.elastic.trainer import MemberDescription, StateTransport, TrainerState
from ringweave.training.elastic.training_state import TrainingState
from ringweave.training.timing import HostTimeline, MeasuredStep, StepTimer


class Giver:
    """A member, and what peers find on its shelf."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.state_server, self.share_table = StateServer(), ShareTable(12, is_balanced=False)
        trust: Any = None
        teller: Any = None
        facts = MemberDescription(
            member="0.0", state_address="127.0.0.1 9", max_samples=None, assumed_speed=1.0, must_match={}
        )
        means = StateTransport(state_server=self.state_server, authentication=trust)
        self.trainer = TrainerState(
            facts, self.share_table, StepTimer(HostTimeline()), TrainingState(self.model, optimizer, {}), means, teller
        )

    def begin(self, *following: str) -> None:
        members = ("0.0", "1.0", "2.1")
        self.share_table.start_generation(0, members, [None] * 3, [None] * 3, [1.0] * 3, following)

    def weight(self, name: str) -> list[float] | None:
        """What a peer would read of it now; None where nothing is offered."""
        offer = self.state_server._published.get(name)
        if offer is None:
            return None
        names = [piece.name for piece in offer.description.pieces]
        return np.frombuffer(offer.views[names.index("model/weight")], np.float32).tolist()


@pytest.mark.parametrize("is_lasting", [True, False])
def test_what_is_offered_lasts_while_somebody_follows(is_lasting: bool) -> None:
    giver = Giver()
    giver.begin("2.1")
    before = giver.model.weight.detach().reshape(-1).tolist()
    giver.trainer.capture_state()
    giver.trainer.publish_state("1.5", is_lasting=is_lasting)
    giver.trainer.unpublish_state()
    assert giver.weight("1.5") == (before if is_lasting else None), "what is about to change is not read"
    with torch.no_grad():
        giver.model.weight.add_(1.0)
    assert giver.weight("1.5") == (before if is_lasting else None)
    giver.share_table.admit(4, ["2.1"], [None] * 3)
    giver.trainer.unpublish_state()
    assert giver.weight("1.5") is None


class Estimator:
    """That must not be read while it takes a step in."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._meanwhile, self._is_busy = meanwhile, False

    def observe(self, *_: Any) -> None:
        self._is_busy = True
        self._meanwhile()
        self._is_busy = False

    @property
    def speed(self) -> Speed:
        assert not self._is_busy
        return Speed(s_per_sample=0.25)


class Timer:
    """One step has ended."""

    def end_step(self) -> None: ...

    def take_measured_steps(self) -> list[MeasuredStep]:
        return [MeasuredStep(num_samples=8, seconds=2.0)]


def test_a_member_says_how_fast_it_is_also_while_its_script_measures_a_step() -> None:
    crew = Giver().trainer
    said: list[Any] = []
    crew._estimator = Estimator(lambda: said.append(crew.status_details()["speed"]))  # pyrefly: ignore - what is asked of it
    crew._timer = Timer()  # pyrefly: ignore - likewise
    for _ in range(2):
        crew.measure_step()
    assert said == [None, [0.25, 0.0, 0.0, 0.0, 0.0, 0.0]], "without a limit of memory"
    assert crew.reduction_row().speed == Speed(s_per_sample=0.25)


def test_each_epoch_s_newcomers_read_the_state_of_that_epoch() -> None:
    giver = Giver()
    giver.begin("1.0", "2.1")
    for number in (5, 6):
        giver.trainer.capture_state()
        giver.trainer.publish_state(f"1.{number}", is_lasting=True)
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
    monkeypatch.setattr(trainer, "copy_buffers", fail)
    giver.trainer.capture_state()
    with caplog.at_level(logging.WARNING, "ringweave"):
        giver.trainer.publish_state("1.5", is_lasting=True)
    assert caplog.messages == ["state for a worker that joins: no memory for a copy of it. The worker begins anew."]
    asked: Any = rpc.RpcCall(peer=None, message=DescribeState(name="1.5"), buffers=[], deadline_s=0.0)  # pyrefly: ignore
    assert giver.state_server._describe(asked).pieces == []
