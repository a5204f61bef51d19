"""Who is given parameters, and who is not: the service without its connections."""

import pytest
import torch

from ringweave.errors import DeadlineError, TrainingError
from ringweave.param_server.messages import LeaveRing
from ringweave.param_server.service import ParameterService
from tests.param_server.serving.callers import NUM_ELEMENTS, Callers

NUM_RINGS = 4
SLOW = (2, 3)


class Rings:
    """A service on a clock of its own, and its rings, of which two are slow."""

    def __init__(self, compensation: float = 0.04) -> None:
        self.now_s = 0.0
        self.service = ParameterService(clock=lambda: self.now_s)
        self.callers = Callers(self.service, NUM_RINGS, compensation=compensation, lr=0.5)

    def push(self, ring: int) -> None:
        """A push that takes long to arrive, if the ring is a slow one."""
        self.callers.push(ring, arriving=lambda: self._pass_time(10.0 if ring in SLOW else 1.0))

    def leave(self, ring: int) -> None:
        self.callers.handle(ring, LeaveRing(term=0, ring=ring, is_for_good=False))

    def _pass_time(self, seconds: float) -> None:
        self.now_s += seconds


def trained(rings: Rings) -> Rings:
    """Three rounds of all rings, after which the slow ones are known."""
    for _ in range(3):
        for ring in range(NUM_RINGS):
            rings.callers.pull(ring)
        for ring in range(NUM_RINGS):
            rings.push(ring)
    return rings


@pytest.mark.parametrize("compensation", [0.0, 0.04])
def test_slow_rings_that_meet_all_get_parameters(compensation):
    rings = trained(Rings(compensation))
    for ring in range(NUM_RINGS):
        rings.leave(ring)
    assert [rings.callers.pull(ring) for ring in range(NUM_RINGS)] == [3 * NUM_RINGS] * NUM_RINGS


@pytest.mark.parametrize("compensation", [0.0, 0.04])
def test_a_slow_ring_that_lost_the_answer_gets_another(compensation):
    rings = trained(Rings(compensation))
    assert rings.callers.pull(3) == rings.callers.pull(3) == 3 * NUM_RINGS


def test_nothing_is_granted_to_who_does_not_wait_any_more():
    rings = Rings()
    call = rings.callers.call_of(1)
    call.cancelled.set()
    with pytest.raises(
        DeadlineError, match=r"parameters for ring 1: 'no caller that waits', expected its push 0 applied"
    ):
        rings.callers.pull_with(call)
    assert rings.service.status().sent_bytes == 0


@pytest.mark.parametrize("content", ["gradient", "change"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_push_that_is_not_finite_is_its_rings_fault_and_changes_nothing(content, bad):
    rings = trained(Rings(0.0))
    version = rings.service.version
    rings.callers.pull(1)
    push = torch.ones(NUM_ELEMENTS)
    push[3] = bad
    text = (
        rf"{content} of ring 1 \(rank 1\): '1 of {NUM_ELEMENTS} numbers of parameter weight are not finite', expected "
        r"finite numbers; the push is refused, and the parameters are unchanged\. Look at the samples and the loss of "
        r"these ranks, or clip gradients\. \[push 4\]"
    )
    with pytest.raises(TrainingError, match=text):
        rings.callers.push(1, gradient=lambda _: push.numpy().tobytes(), content=content)
    assert rings.service.version == version
    rings.callers.pull(0)
    rings.push(0)  # the others go on
    assert rings.service.version == version + 1


def test_a_sum_that_overflows_is_no_fault():
    callers = Callers(ParameterService(), 2, compensation=0.0, lr=0.5)
    callers.pull(0)
    callers.push(0, gradient=lambda _: torch.full((NUM_ELEMENTS,), 3e38).numpy().tobytes())


def test_a_pull_that_was_given_up_does_not_take_the_place_of_the_next():
    rings = trained(Rings())
    rings.callers.pull(1)
    with pytest.raises(DeadlineError, match=r"parameters for ring 1: 'no caller that waits'"):
        rings.callers.pull_with(rings.callers.call_of(1, after_sequence=2))
    rings.push(1)  # on what it was given


@pytest.mark.parametrize(("num_others", "ahead"), [(2, 0.25), (4, 0.125)])
def test_a_ring_that_is_later_than_its_turn_is_given_parameters_less_far_ahead(num_others, ahead):
    callers = Callers(ParameterService(), 2, compensation=0.0, dtype=torch.float64, lr=1.0)
    callers.pull(1)
    for ring in [0] * num_others + [1]:
        if ring == 0:
            callers.pull(0)
        callers.push(ring, gradient=lambda _: torch.ones(50, dtype=torch.float64).numpy().tobytes())
    answer = callers.pull_with(callers.call_of(1, after_sequence=1))
    given = torch.frombuffer(answer.buffers[0], dtype=torch.float64)
    # Each push is half a train step, which moves the parameters by -1, whatever they are.
    assert given.tolist() == pytest.approx([-(num_others + 1) / 2 - ahead] * 50)
