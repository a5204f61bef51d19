"""Random events in random order: every state stays legal, the gang starts together, budgets are exact."""

import contextlib
import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ringweave.errors import JobError
from ringweave.jobs import admission, records
from ringweave.jobs.records import EndCause, GroupPhase, Job
from ringweave.jobs.request import DeletionPolicy
from ringweave.jobs.states import REASON_TEMPLATES, JobState, NodeState
from tests import effort
from tests.fakes.job_runtime import FakeJobRuntime
from tests.jobs.life import lives
from tools.reference_pages import REASON_STATES, TRANSITIONS

CAUSES = [EndCause.PLATFORM, EndCause.PROGRAM, EndCause.PEER]


class Lives(RuleBasedStateMachine):
    """A job, its place, a supervisor that may die after any action, and somebody who types."""

    @initialize(least=st.sampled_from([None, 3, 6]))
    def begin(self, least: int | None) -> None:
        policies = (DeletionPolicy.DELETE, DeletionPolicy.KEEP, DeletionPolicy.KEEP_ON_FAILURE)
        self.place = FakeJobRuntime(job=lives.a_job(policies, max_retries=2, ttl_s=30.0, least=least))
        self.states = [self.place.job.record.state]

    @rule(num_actions=st.integers(0, 6))
    def supervise(self, num_actions: int) -> None:
        """Look once, and die after so many actions."""
        for action in lives.look(self.place)[:num_actions]:
            self.place.apply(action)
            if isinstance(action, records.SaveRecord):
                self.states.append(action.record.state)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.place.pass_time(seconds)

    @precondition(lambda self: self.place.groups)
    @rule(choice=st.randoms(use_true_random=False), cause=st.sampled_from([None, *CAUSES]))
    def a_group_ends(self, choice: random.Random, cause: EndCause | None) -> None:
        key = choice.choice(sorted(self.place.groups))
        phase = self.place.groups[key].phase
        if phase.is_alive and (cause is not None or phase is GroupPhase.RUNNING):
            self.place.end_group(key, cause)

    @precondition(lambda self: self.place.groups)
    @rule(choice=st.randoms(use_true_random=False))
    def a_group_vanishes(self, choice: random.Random) -> None:
        self.place.lose_group(choice.choice(sorted(self.place.groups)))

    @precondition(lambda self: self.place.groups)
    @rule(choice=st.randoms(use_true_random=False))
    def a_group_alone_loses_a_peer(self, choice: random.Random) -> None:
        """The others look as before: one of them may be dead, and nobody has noticed."""
        key = choice.choice(sorted(self.place.groups))
        group = self.place.groups[key]
        if group.phase is GroupPhase.RUNNING and not group.is_terminating:
            self.place.groups[key] = replace(group, phase=GroupPhase.INTERRUPTED, ended_s=self.place.clock_s)

    @precondition(lambda self: self.place.groups)
    @rule(choice=st.randoms(use_true_random=False))
    def a_group_stands_still(self, choice: random.Random) -> None:
        """The others have put its workers out; it may wake, end, or stay so for ever."""
        key = choice.choice(sorted(self.place.groups))
        group, name = self.place.groups[key], ".".join(map(str, key))
        if (
            group.phase is GroupPhase.RUNNING
            and self.place.job is not None
            and self.place.job.request.elastic is not None
        ):
            self.place.groups[key] = replace(group, members=(name,), generation=(1, 1), evicted=(name,))

    @precondition(lambda self: self.place.job is not None)
    @rule(verb=st.sampled_from(admission.VERB_NAMES[:-1]))
    def somebody_types(self, verb: str) -> None:
        with contextlib.suppress(JobError):
            self.place.job = replace(
                self.place.job, desired=admission.apply_verb(verb, self.place.job, self.place.clock_s)
            )

    @invariant()
    def nothing_illegal(self) -> None:
        assert self.place.broken_rules == []
        for before, after in zip(self.states, self.states[1:], strict=False):
            assert after is before or after in TRANSITIONS[before], f"{before} -> {after}"

    @invariant()
    def reasons_are_there(self) -> None:
        if self.place.job is None:
            return
        record = self.place.job.record
        if len(self.states) > 1:
            goes_on = record.reason is not None and record.reason.code == "Degraded"
            assert (record.reason is None or goes_on) == (record.state is JobState.RUNNING)
            for known in record.nodes:
                assert (known.reason is None) == (known.state is NodeState.RUNNING)
                assert known.reason is None or known.reason.hint
        self.check_loss(self.place.job)
        for known in record.nodes:
            assert known.retries <= 2
            charged = [end for end in [*known.history, *([known.ended] if known.ended else [])] if end.charged]
            assert len(charged) <= 3 * record.run

    def check_loss(self, job: Job) -> None:
        """Only an elastic job goes on without a node, in a round whose gate was open, and while one pays for it."""
        if job.record.loss is not None:
            assert job.request.elastic is not None
            ends = [end for known in job.record.nodes for end in (*known.history, known.ended) if end is not None]
            assert any(end.charged for end in ends)

    def teardown(self) -> None:
        """Whatever happened, it can be deleted, and nothing is left."""
        if self.place.job is not None:
            lives.ask(self.place, "delete")
        for _ in range(10):
            lives.settle(self.place)
            self.place.pass_time()
        assert (self.place.job, self.place.groups, self.place.has_config) == (None, {}, False)


class TestLives(Lives.TestCase):
    settings = settings(max_examples=effort.share_of(500), stateful_step_count=40)


TestLives = pytest.mark.slow(TestLives)


@pytest.mark.slow
@pytest.mark.parametrize(("is_elastic", "least_retries"), [(False, 0.3), (True, 0.15)])
def test_gang_start_in_many_random_lives_with_restarts(is_elastic: bool, least_retries: float) -> None:
    seen: set[str] = set()
    retries = starts = 0
    num_lives = effort.share_of(2000)
    for seed in range(num_lives):
        place = random_life(random.Random(seed), is_elastic=is_elastic)
        assert place.broken_rules == [], seed
        assert place.job is not None
        record = place.job.record
        assert record.state.is_end, (seed, record.state)
        seen.add(str(record.state))
        retries += sum(known.retries for known in record.nodes)
        starts += record.round
    assert seen == {"Succeeded", "Failed"}
    assert retries > least_retries * num_lives
    assert starts < 1.25 * num_lives if is_elastic else starts > 1.3 * num_lives


def random_life(chance: random.Random, *, is_elastic: bool) -> FakeJobRuntime:
    """A job with failures of all kinds and a supervisor that dies at random, to its end."""
    policies = (DeletionPolicy.DELETE,) * chance.randint(2, 6)
    job = lives.a_job(policies, max_retries=chance.randint(0, 3), least=3 if is_elastic else None)
    place = FakeJobRuntime(job=job)
    for _ in range(400):
        if place.job is None or place.job.record.state.is_end:
            break
        for action in lives.look(place)[: chance.choice([0, 1, 2, 3, 99, 99])]:
            place.apply(action)
        place.clock_s += 0.5
        place.groups = {
            key: group for key, group in place.groups.items() if not group.is_terminating or chance.random() < 0.3
        }
        for key in chance.sample(sorted(place.groups), len(place.groups)):
            group, fate = place.groups[key], chance.random()
            if group.phase.is_alive and not group.is_terminating and fate < 0.01:
                place.end_group(
                    key, chance.choice([EndCause.PLATFORM, EndCause.PLATFORM, EndCause.PEER, EndCause.PROGRAM])
                )
            elif fate < 0.015:
                place.lose_group(key)
            elif group.phase is GroupPhase.RUNNING and fate < 0.3:
                place.end_group(key)
            elif fate < 0.7:
                place.advance_group(key)
    return place


def test_every_reason_is_documented_with_states() -> None:
    assert REASON_STATES.keys() == REASON_TEMPLATES.keys()
    for code, names in REASON_STATES.items():
        states = {str(state) for state in (NodeState if code.startswith("Node") else JobState)}
        assert set(names.split(", ")) <= states, code
