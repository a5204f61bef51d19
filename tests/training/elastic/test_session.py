import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringweave.errors import DisagreementError, MembershipError, RingweaveError, TrainingError
from ringweave.membership.membership_records import Membership, MemberStatus, StopTraining
from ringweave.training.elastic import member_details, recovery
from ringweave.training.elastic.session import ElasticSession
from ringweave.training.elastic.trainer import MemberDescription, TrainerState
from ringweave.training.elastic.wire_choice import WireChoice
from tests.polling import wait_until


class Groups:
    """Of processes that are not there."""

    store_address, num_aborts, reduce_group = "127.0.0.1 9", 0, None

    def abort(self) -> None: ...

    def wait_aborted(self, timeout_s: float) -> None: ...


class Crew:
    """Whose part in an epoch fails."""

    wires = WireChoice()

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def check_membership(self, *_: Any) -> None:
        raise self._failure


class Agent:
    """The first order comes at once."""

    def __init__(self, session: ElasticSession) -> None:
        self._session = session

    def start(self) -> None:
        status = MemberStatus(member="0.0", note='{"store": "127.0.0.1 9", "commit": null}')
        self._session.begin_generation(Membership(generation_id=(1, 1), statuses=(status,)))


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (TrainingError("option x of rank 1"), "option x of rank 1"),
        (KeyError("store"), r"elastic training: \"KeyError\('store'\)\", expected no failure\. Report this as a bug"),
    ],
)
def test_the_script_hears_why_its_member_cannot_go_on(failure: Exception, text: str) -> None:
    groups: Any = Groups()
    crew: Any = Crew(failure)
    session = ElasticSession("0.0", groups, crew, buffers=list, is_mean=True)
    agent: Any = Agent(session)
    with pytest.raises(RingweaveError, match=text) as raised:
        session.start(agent)
    assert isinstance(raised.value, TrainingError)
    session.close()


class SlowGroups:
    """Whose members take their time to meet."""

    store_address, num_aborts, reduce_group = "127.0.0.1 9", 0, None

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def form_group(self, *_: Any, **__: Any) -> None:
        self.has_begun.set()
        assert self.may_end.wait(60)

    def abort(self) -> None:
        self.num_aborts += 1

    def wait_aborted(self, timeout_s: float) -> None: ...


class EasyCrew:
    """That has nothing to do."""

    wires = WireChoice()

    state_address = "127.0.0.1 9"

    def __init__(self, *, is_between_steps: bool = True, supports_replay: bool = True) -> None:
        self.is_between_steps, self.supports_replay = is_between_steps, supports_replay

    def status_details(self) -> dict[str, Any]:
        return {}

    def drawn_batches(self) -> tuple[int, str]:
        return 0, ""

    def check_membership(self, *_: Any) -> None: ...

    def begin_generation(self, *_: Any, **__: Any) -> None: ...

    def capture_state(self) -> None: ...

    def publish_state(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize("is_urgent", [False, True])
def test_an_epoch_that_is_ordered_is_formed_before_its_members_stop_at_a_border(is_urgent: bool) -> None:
    groups: Any = SlowGroups()
    crew: Any = EasyCrew()
    stood: list[MemberStatus | None] = []

    class Superseding:
        """Orders the first epoch, and proposes the next one before its members have met."""

        def start(self) -> None:
            status = MemberStatus(member="0.0", note='{"store": "127.0.0.1 9", "commit": null}')
            session.begin_generation(Membership(generation_id=(1, 1), statuses=(status,)))
            assert groups.has_begun.wait(60)
            stood.append(session.pause_training(is_urgent=is_urgent))
            groups.may_end.set()
            if is_urgent:  # what it gave up has no effect, so only another epoch lets it go on
                session.begin_generation(Membership(generation_id=(1, 2), statuses=(status,)))

    agent: Any = Superseding()
    session = ElasticSession("0.0", groups, crew, buffers=list, is_mean=True)
    assert session.start(agent).generation_id == ((1, 2) if is_urgent else (1, 1))
    assert (stood[0] is not None, groups.num_aborts) == (is_urgent, int(is_urgent))
    session.close()


class Notary:
    """An agent that notes where its member stands, and lets it go on with the first epoch at once."""

    def __init__(self) -> None:
        self.session: Any = None
        self.stood: list[MemberStatus] = []

    def start(self) -> None:
        self.session.begin_generation(
            Membership(generation_id=(1, 1), statuses=(MemberStatus(member="0.0", note=NOTE),))
        )

    def leave_membership(self, *, is_finished: bool) -> None: ...


NOTE = '{"store": "127.0.0.1 9"}'


def started(crew: Any) -> tuple[ElasticSession, Notary]:
    groups: Any = SlowGroups()
    groups.may_end.set()
    agent: Any = Notary()
    agent.session = session = ElasticSession("0.0", groups, crew, buffers=list, is_mean=True)
    session.start(agent)
    return session, agent


def test_nobody_joins_while_the_script_prepares_its_training() -> None:
    session, _ = started(EasyCrew())
    assert not session.current_status().at_step_boundary
    frozen = session.pause_training(is_urgent=True)
    assert frozen is not None
    assert not frozen.at_step_boundary, "a member has died, and the one that waits to join cannot come in its place"
    session.close()


@pytest.mark.parametrize("is_between_steps", [True, False])
def test_between_two_passes_of_no_sync_is_no_border(is_between_steps: bool) -> None:
    session, _ = started(EasyCrew(is_between_steps=is_between_steps))
    stood: list[bool] = []
    session.pass_step_boundary(lambda: stood.append(session.current_status().at_step_boundary))
    thread = threading.Thread(target=lambda: session.pass_step_boundary(lambda: None))
    frozen = session.pause_training(is_urgent=True)
    assert frozen is not None
    thread.start()
    wait_until(lambda: session.current_status().at_step_boundary is is_between_steps)
    session.begin_generation(
        Membership(generation_id=(1, 2), statuses=(MemberStatus(member="0.0", has_state=True, note=NOTE),))
    )
    thread.join(60)
    assert not thread.is_alive()
    session.close()


def test_members_stop_for_newcomers_only_where_these_can_come() -> None:
    crew = EasyCrew(is_between_steps=False)
    session, notary = started(crew)
    session._state.pauses_at_boundary = True
    drawn: list[int] = []
    session.pass_step_boundary(lambda: drawn.append(1))
    assert drawn == [1], "it goes on, with no epoch formed anew in vain"
    crew.is_between_steps = True
    has_stood = threading.Event()
    notary.report_status = lambda status: (notary.stood.append(status), has_stood.set())  # type: ignore[attr-defined]
    thread = threading.Thread(target=lambda: session.pass_step_boundary(lambda: drawn.append(2)))
    thread.start()
    assert has_stood.wait(60)
    assert notary.stood[-1].at_step_boundary
    assert drawn == [1]
    session.begin_generation(
        Membership(generation_id=(1, 2), statuses=(MemberStatus(member="0.0", has_state=True, note=NOTE),))
    )
    thread.join(60)
    assert drawn == [1, 2]
    session.close()


@pytest.mark.parametrize("reason_to_wait", ["", "collectives", "rings", "undecided"])
def test_a_script_at_a_boundary_computes_on_while_the_groups_form(reason_to_wait: str) -> None:
    crew = EasyCrew()
    session, notary = started(crew)
    state, groups, drawn = session._state, session._state.groups, []
    session.pass_step_boundary(lambda: drawn.append(1))
    groups.has_begun.clear()
    groups.may_end.clear()
    state.pauses_at_boundary = True
    notary.report_status = notary.stood.append  # type: ignore[attr-defined]

    def pass_boundary() -> None:
        with contextlib.suppress(RingweaveError):  # of the end
            session.pass_step_boundary(lambda: drawn.append(2))

    thread = threading.Thread(target=pass_boundary)
    thread.start()
    wait_until(lambda: bool(notary.stood))
    if reason_to_wait == "collectives":  # for which the script may need its new rank
        with state.lock:
            state.num_collectives = 1
            state.status = replace(state.status, committed=1)
    crew.supports_replay = reason_to_wait != "rings"
    committed = {"": 0, "collectives": 1, "rings": 0, "undecided": 1}[reason_to_wait]
    if reason_to_wait == "undecided":  # the others have committed the step that this member has summed
        state.status = replace(state.status, is_prepared=True)
    own = replace(state.current_status(), has_state=True, committed=state.status.committed)
    other = MemberStatus(member="1.0", has_state=True, committed=committed, note=NOTE)
    session.begin_generation(Membership(generation_id=(1, 2), statuses=(own, other)))
    assert groups.has_begun.wait(60)
    if not reason_to_wait:
        thread.join(60)
        assert not state.is_group_up, "nothing is summed before the groups have formed"
    assert drawn == ([1] if reason_to_wait else [1, 2])
    session.close(timeout_s=0)
    groups.may_end.set()
    thread.join(60)


def test_a_signal_handler_can_have_it_leave_whatever_its_thread_was_about() -> None:
    session, _ = started(EasyCrew())
    with session._state.lock:
        session.leave_nowait()
    while not session._state.status.is_leaving:
        time.sleep(0.01)
    session.close()


@pytest.mark.parametrize("is_end", [True, False])
def test_who_was_asked_to_leave_ends_quietly_alone_or_with_all_others(is_end: bool) -> None:
    session, _ = started(EasyCrew())
    session.leave_at_next_boundary()
    session.stop_training(StopTraining(reason="all workers have left" if is_end else "it has left", is_end=is_end))
    with pytest.raises(SystemExit) as raised:
        session.pass_step_boundary(lambda: None)
    assert raised.value.code == 143
    session.close()


@pytest.mark.parametrize(
    ("final_checkpoint_owner", "text"),
    [
        ("0.0", r"^job is over: 1 worker is left\. It is in D\.$"),
        ("2.0", r"^job is over: 1 worker is left\. Start it again: worker 2\.0 saves the state, if the script gave "),
        ("", r"^job is over: 1 worker is left\. See the coordinator's log\.$"),
    ],
)
def test_when_the_job_ends_the_heir_saves_the_state_before_its_script_hears_of_it(
    final_checkpoint_owner: str, text: str
) -> None:
    session, _ = started(EasyCrew())
    saved: list[bool] = []

    def save() -> str:
        saved.append(session.has_stopped)
        assert session.current_status().member == "0.0", "the lock is free"
        return "It is in D."

    session.register_final_save(save)
    session.stop_training(
        StopTraining(reason="1 worker is left", is_end=True, final_checkpoint_owner=final_checkpoint_owner)
    )
    with pytest.raises(MembershipError, match=text):
        session.pass_step_boundary(lambda: None)
    assert saved == ([True] if final_checkpoint_owner == "0.0" else [])
    session.close()


@pytest.mark.parametrize("can_be_followed", [True, False])
def test_newcomers_hear_what_the_buckets_are_where_they_can_follow(can_be_followed: bool) -> None:
    session, _ = started(EasyCrew(supports_replay=can_be_followed))
    session._state.layout = [[3, "float32", "cpu"]]
    assert recovery.layout_of_text(session.current_status().layout) == (
        session._state.layout if can_be_followed else []
    )
    session.close()


def test_without_checkpoints_the_heir_has_nothing_to_save() -> None:
    session, _ = started(EasyCrew())
    session.stop_training(StopTraining(reason="1 worker is left", is_end=True, final_checkpoint_owner="0.0"))
    with pytest.raises(MembershipError, match=r"worker 0\.0 saves the state, if the script gave ringweave\."):
        session.pass_step_boundary(lambda: None)
    session.close()


PLACE = "127.0.0.1 9"
CREW_NOTE = {
    "cap": None,
    "assumed_speed": 1.0,
    "speed": None,
    "exchange_s": 0.0,
    "position": [0, 0, 0, 0],
    "accounts": [[0, 0], [0, 0], [0, 0]],
}


def test_a_newcomer_that_prepared_something_else_is_refused_by_itself_alone() -> None:
    crew: Any = TrainerState.__new__(TrainerState)
    crew.ring = None
    notes: list[dict[str, Any]] = [CREW_NOTE | {"must_match": {"seed": seed}} for seed in (5, 5, 6)]
    statuses = (
        MemberStatus(member="0.1", address=PLACE),
        MemberStatus(member="1.0", has_state=True, address=PLACE),
        MemberStatus(member="2.1", address=PLACE),
    )
    membership = Membership(generation_id=(1, 7), statuses=statuses)
    for member in ("0.1", "1.0"):
        crew._description = MemberDescription(
            member=member, state_address="", max_samples=None, assumed_speed=1.0, must_match={"seed": 5}
        )
        crew.check_membership(membership, notes)
    crew._description = MemberDescription(
        member="2.1", state_address="", max_samples=None, assumed_speed=1.0, must_match={"seed": 6}
    )
    with pytest.raises(DisagreementError, match=r"seed of worker 2\.1: 6, expected 5 as on worker 1\.0\."):
        crew.check_membership(membership, notes)


def test_who_waits_for_the_processor_is_at_work(tmp_path: Path) -> None:
    assert member_details.busy_s(tmp_path) < 3600
    (tmp_path / "schedstat").write_text("5000000000 3600000000000 12\n")
    assert member_details.busy_s(tmp_path) >= 3600
    (tmp_path / "schedstat").write_text("0\n")
    assert member_details.busy_s(tmp_path) < 3600


def test_who_joins_has_no_part_in_what_is_spread_so_it_waits_until_that_is_over() -> None:
    groups: Any = SlowGroups()
    crew: Any = EasyCrew()
    session = ElasticSession("0.0", groups, crew, buffers=list, is_mean=True)
    heard: list[BaseException] = []

    def spread() -> None:
        try:
            session.broadcast_from_first(dict)
        except MembershipError as error:
            heard.append(error)

    assert session.current_status().at_step_boundary
    thread = threading.Thread(target=spread)
    thread.start()
    wait_until(lambda: not session.current_status().at_step_boundary)
    session.stop_training(StopTraining(reason="enough", is_end=True))
    thread.join(60)
    assert "job is over: enough" in str(heard[0])
    session.close()


@pytest.mark.parametrize(
    ("statuses", "teller"),
    [
        (
            [
                MemberStatus(member="0.1", is_recovering=True),
                *(MemberStatus(member=f"{n}.0", has_state=True) for n in (1, 2)),
            ],
            "1.0",
        ),
        ([MemberStatus(member="0.1"), MemberStatus(member="1.0", has_state=True)], "1.0"),
        ([MemberStatus(member="0.0"), MemberStatus(member="1.0")], "0.0"),
    ],
    ids=["who follows comes to it later", "who reads the state too", "nobody has it at first"],
)
def test_one_member_tells_what_counts_as_soon_as_it_does(statuses: list[MemberStatus], teller: str) -> None:
    membership = Membership(generation_id=(1, 2), statuses=tuple(statuses))
    groups: Any = Groups()
    crew: Any = Crew(KeyError())
    sessions = [ElasticSession(member, groups, crew, buffers=list, is_mean=True) for member in membership.members]
    for session in sessions:
        session.begin_generation(membership)
    assert [session.is_primary for session in sessions] == [member == teller for member in membership.members]
