"""The group agent with a post and workers that exist in memory only."""

from dataclasses import replace

import pytest

from ringweave.errors import LaunchError
from ringweave.jobs.records import EndCause, GroupPhase
from ringweave.launcher.workers import HostPort
from ringweave.platforms.agent import agent
from ringweave.platforms.agent.agent import NodeAgent
from ringweave.platforms.agent.agent_channel import (
    AgentChannel,
    AgentStatus,
    DesiredState,
    RoundOverError,
)
from ringweave.platforms.agent.job_config import RendezvousResult
from ringweave.platforms.agent.node_round import NodeOutcome, NodeProgress

HERE = HostPort(host="here", port=7)


class FakeCrew:
    def __init__(self) -> None:
        self.outcome: NodeOutcome | None = None
        self.was_told_to_end = False
        self.done = NodeProgress()

    def request_stop(self) -> None:
        self.was_told_to_end = True
        self.outcome = NodeOutcome(phase=GroupPhase.STOPPED, text="its workers were stopped")

    def poll(self) -> NodeOutcome | None:
        return self.outcome

    def progress(self) -> NodeProgress:
        return self.done


class FakePost(AgentChannel):
    """Each wait lets the next thing happen; the test is over when nothing is left to happen."""

    def __init__(self) -> None:
        self.now = DesiredState(round=1)
        self.told: list[AgentStatus] = []
        self.waited_s: list[float] = []
        self.happenings: list = []

    def desired_state(self) -> DesiredState:
        return self.now

    def report_status(self, report: AgentStatus) -> None:
        self.told.append(report)

    def wait_for_change(self, timeout_s: float) -> None:
        self.waited_s.append(timeout_s)
        assert self.happenings, f"it goes on for ever, after {self.told}"
        self.happenings.pop(0)()

    def publish_credentials(self, *_: object) -> None:
        raise AssertionError("no job of these tests has credentials")

    take_credentials = leadership_log = publish_credentials  # type: ignore[assignment]

    def order(self, **changes) -> None:
        self.now = replace(self.now, **changes)

    def open(self, round_: int) -> None:
        self.order(rendezvous=RendezvousResult(round=round_, master_address=HERE))


class Scene:
    def __init__(self) -> None:
        self.post, self.crews, self.time_s = FakePost(), [], 100.0
        self.agent = NodeAgent(
            self.post,
            make_offer=lambda _: {"master_address": HERE},
            start_workers=self.start,
            clock=lambda: self.time_s,
        )

    def start(self, opening: RendezvousResult) -> FakeCrew:
        self.crews.append(FakeCrew())
        return self.crews[-1]

    def play(self, *happenings) -> list[AgentStatus]:
        self.post.happenings = list(happenings)
        self.agent.serve_until_done()
        assert not self.post.happenings, "it left too early"
        return self.post.told

    def ends(self, phase: GroupPhase, **more):
        def happen() -> None:
            self.crews[-1].outcome = NodeOutcome(phase=phase, **more)

        return happen


@pytest.fixture
def scene() -> Scene:
    return Scene()


def phases(reports: list[AgentStatus]) -> list[tuple[int, str]]:
    return [(report.round, str(report.phase)) for report in reports]


def test_from_the_gate_to_a_good_end(scene: Scene) -> None:
    def finish() -> None:
        scene.crews[-1].done = NodeProgress(iterations=9, last_loss=0.5)
        scene.ends(GroupPhase.SUCCEEDED, exit_code=0)()

    told = scene.play(lambda: None, lambda: scene.post.open(1), lambda: None, finish)
    assert phases(told) == [(1, "Ready"), (1, "Running"), (1, "Succeeded")]
    assert told[0].master_address == HERE
    assert (told[-1].iterations, told[-1].last_loss, told[-1].ended_s) == (9, 0.5, 100.0)
    assert scene.post.waited_s == [agent.IDLE_POLL_S] * 2 + [agent.RUNNING_POLL_S] * 2


def test_a_gate_of_another_round_starts_nothing(scene: Scene) -> None:
    told = scene.play(lambda: scene.post.open(2), lambda: scene.post.order(stop=True, reason="enough"))
    assert phases(told) == [(1, "Ready"), (1, "Stopped")]
    assert (told[-1].text, scene.crews) == ("enough", [])


def test_called_back_it_ends_its_workers_and_gathers_again(scene: Scene) -> None:
    told = scene.play(
        lambda: scene.post.open(1),
        lambda: scene.post.order(round=2),
        lambda: scene.post.open(2),
        scene.ends(GroupPhase.SUCCEEDED),
    )
    assert scene.crews[0].was_told_to_end
    assert phases(told) == [(1, "Ready"), (1, "Running"), (2, "Ready"), (2, "Running"), (2, "Succeeded")]


def test_a_peers_failure_interrupts_it_and_it_waits_to_be_called(scene: Scene) -> None:
    told = scene.play(
        lambda: scene.post.open(1),
        scene.ends(GroupPhase.INTERRUPTED, cause=EndCause.PEER, text="rank 0 raised PeerError"),
        lambda: None,
        lambda: scene.post.order(round=2),
        lambda: scene.post.order(stop=True),
    )
    assert phases(told)[2:] == [(1, "Interrupted"), (2, "Ready"), (2, "Stopped")]
    assert (told[2].cause, told[2].text) == (None, "rank 0 raised PeerError")


@pytest.mark.parametrize("cause", [EndCause.PROGRAM, EndCause.PLATFORM])
def test_a_failure_of_its_own_is_the_end(scene: Scene, cause: EndCause) -> None:
    told = scene.play(lambda: scene.post.open(1), scene.ends(GroupPhase.FAILED, cause=cause, exit_code=3, text="why"))
    assert told[-1] == replace(
        told[1], phase=GroupPhase.FAILED, cause=cause, exit_code=3, text="why", ended_s=100.0, master_address=None
    )


def test_ordered_to_leave_it_ends_its_workers_first(scene: Scene) -> None:
    told = scene.play(lambda: scene.post.open(1), lambda: scene.post.order(stop=True, reason="the job ends"))
    assert scene.crews[0].was_told_to_end
    assert (phases(told)[-1], told[-1].text) == ((1, "Stopped"), "the job ends")


def test_a_signal_makes_it_leave(scene: Scene) -> None:
    told = scene.play(lambda: scene.agent.request_leave("it got SIGTERM"))
    assert (phases(told)[-1], told[-1].text) == ((1, "Stopped"), "it got SIGTERM")


def test_results_are_told_now_and_then(scene: Scene) -> None:
    def progress(iterations: int, time_s: float):
        def happen() -> None:
            scene.time_s = time_s
            scene.crews[-1].done = NodeProgress(iterations=iterations, last_loss=1.0)

        return happen

    told = scene.play(
        lambda: scene.post.open(1),
        progress(1, 200.0),
        progress(2, 200.1),
        progress(3, 200.6),
        scene.ends(GroupPhase.SUCCEEDED),
    )
    assert [report.iterations for report in told] == [None, None, 1, 3, 3]


def test_a_round_that_is_over_before_its_workers_start_is_no_failure_of_the_node() -> None:
    """The next round was called while they started: what they need is that round's by now."""
    post, crews = FakePost(), [RoundOverError(1, "round 2 has begun"), FakeCrew()]

    def start(_: RendezvousResult) -> FakeCrew:
        found = crews.pop(0)
        if isinstance(found, RoundOverError):
            raise found
        found.outcome = NodeOutcome(phase=GroupPhase.SUCCEEDED)
        return found

    post.happenings = [lambda: post.open(1), lambda: None, lambda: post.order(round=2), lambda: post.open(2), lambda: 0]
    assert (
        NodeAgent(post, make_offer=lambda _: {"master_address": HERE}, start_workers=start).serve_until_done()
        is GroupPhase.SUCCEEDED
    )
    assert phases(post.told) == [(1, "Ready"), (1, "Interrupted"), (2, "Ready"), (2, "Running"), (2, "Succeeded")]
    assert post.told[1].cause is None
    assert post.told[1].text.startswith("credentials of round 1: 'round 2 has begun', expected a current round")


@pytest.mark.parametrize("is_offering", [True, False])
def test_who_waits_for_credentials_obeys_the_order_to_leave(is_offering: bool) -> None:
    """A hand that waits asks why it should stop; without that it would wait for two minutes, and then have failed."""
    post = FakePost()

    def wait(*_: object) -> None:
        assert agent.stop_reason() == ""
        agent.request_leave("it got SIGTERM")
        raise RoundOverError(1, agent.stop_reason())

    agent = NodeAgent(post, make_offer=wait if is_offering else lambda _: {"master_address": HERE}, start_workers=wait)
    post.happenings = [lambda: post.open(1)] if not is_offering else []
    post.happenings += [lambda: None]
    assert agent.serve_until_done() is GroupPhase.STOPPED
    assert (post.told[-1].phase, post.told[-1].cause, post.told[-1].text) == (
        GroupPhase.STOPPED,
        None,
        "it got SIGTERM",
    )


def test_who_waits_for_credentials_hears_of_the_next_round() -> None:
    post, waited = FakePost(), []

    def offer(orders: DesiredState) -> dict[str, HostPort]:
        if not waited:
            assert agent.stop_reason() == ""
            post.order(round=2)
            waited.append(agent.stop_reason())
            raise RoundOverError(1, waited[0])
        return {"master_address": HERE}

    agent = NodeAgent(post, make_offer=offer, start_workers=lambda _: pytest.fail("the gate is shut"))
    post.happenings = [lambda: None, lambda: post.order(stop=True, reason="enough")]
    agent.serve_until_done()
    assert waited == ["round 2 is called"]
    assert phases(post.told) == [(2, "Ready"), (2, "Stopped")]


def test_what_cannot_be_started_is_the_places_doing() -> None:
    post = FakePost()

    def refuse(*_: object) -> None:
        raise LaunchError("no room")

    post.happenings = [lambda: post.open(1)]
    assert (
        NodeAgent(post, make_offer=lambda _: {"master_address": HERE}, start_workers=refuse).serve_until_done()
        is GroupPhase.FAILED
    )
    assert (post.told[-1].cause, post.told[-1].text) == (EndCause.PLATFORM, "no room")
    post = FakePost()
    assert NodeAgent(post, make_offer=refuse, start_workers=refuse).serve_until_done() is GroupPhase.FAILED
