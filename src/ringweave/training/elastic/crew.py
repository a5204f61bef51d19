"""What a member knows and does beside its gradients: books, rosters, speeds, and its state for newcomers."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import Buffer

from ringweave import wire
from ringweave.membership.rules.records import Decree, furthest_of
from ringweave.planning.balancing import Change, Speed, SpeedEstimator
from ringweave.training import control
from ringweave.training.elastic import sharings
from ringweave.training.elastic.books import Books
from ringweave.training.elastic.joining.reading import Reading
from ringweave.training.elastic.loader import Place
from ringweave.training.elastic.rosters import Rosters
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.elastic.standing.notes import check_crew
from ringweave.training.elastic.state import JobState, lasting
from ringweave.training.timing import StepTimer
from ringweave.wire.pacing import Pace
from ringweave.wire.states import Shelf

_LOGGER = logging.getLogger("ringweave")
PULL_S = 600.0
"""How long a newcomer may take to read the state."""
_REBALANCE_EVERY = 2
"""Reductions from one look at the speeds to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What this member says of itself once."""

    member: str
    state_place: str
    """`address port` where its state can be read."""
    cap: int | None
    """The most samples of one batch that it takes."""
    assumed_speed: float
    """Relative speed by the cluster file."""
    alike: dict[str, Any]
    """What has to be the same on all members."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """By what state passes from member to member."""

    shelf: Shelf
    trust: wire.Trust


class Teller(Protocol):
    """Writes down what has happened."""

    def committed(self) -> None:
        """Another reduction counts: what is told next is of it."""
        ...

    def begun(self) -> None:
        """Another epoch begins."""
        ...

    def shares_changed(self, batch_number: int, change: Change) -> None:
        """Other shares from a batch on."""
        ...

    def samples_lost(self, commit: Commit, num_lost: int) -> None:
        """A reduction counts, without the samples of members who were gone."""
        ...

    def became_level(self, commit: Commit, batch_number: int) -> None:
        """Members that joined while the others went on have done what the others have, and get samples from there."""
        ...


class JobCrew:
    """See `seams.Crew`."""

    def __init__(
        self,
        facts: Facts,
        rosters: Rosters,
        timer: StepTimer,
        state: JobState,
        means: Means,
        tell: Teller,
    ) -> None:
        """`tell` writes down what has happened, on one of the members."""
        self.books, self.place, self.rosters = Books(), Place(), rosters
        self._facts, self._timer, self._state, self._means = facts, timer, state, means
        self._tell = tell
        self._estimator = SpeedEstimator()
        self._speed: Speed | None = None
        """As it was after the last step: the agent's thread reads it while the script measures the next."""
        self._captured: dict[str, Buffer] = {}
        self._offered: dict[str, bool] = {}

    def end_step(self) -> None:
        """Measure the step that has ended."""
        self._timer.end()
        for num_samples, seconds in self._timer.take():
            self._estimator.observe(num_samples, seconds)
        self._speed = self._estimator.speed

    @property
    def state_place(self) -> str:
        """See `seams.Crew`."""
        return self._facts.state_place

    @property
    def can_be_followed(self) -> bool:
        """See `seams.Crew`: all that a step does is the script's."""
        return True

    @property
    def is_between_steps(self) -> bool:
        """See `seams.Crew`: in the midst of `no_sync` a newcomer would have no part in what is accumulated."""
        return self.place.num_since_commit == 0

    def row(self) -> Row:
        """What this member's gradients are of."""
        return Row(
            account=self.books.own(self._facts.member),
            num_planned=self.books.num_planned,
            speed=self._speed,
        )

    def note(self) -> dict[str, Any]:
        """What the others have to know when an epoch begins."""
        place, speed = self.place, self._speed
        return {
            "cap": self._facts.cap,
            "assumed_speed": self._facts.assumed_speed,
            "alike": self._facts.alike,
            "speed": None if speed is None else [speed.s_per_sample, speed.overhead_samples, speed.noise],
            "place": [place.epoch, place.position, place.num_drawn, place.num_steps_before],
            "books": self.books.to_words(),
        }

    def drawn(self) -> tuple[int, str]:
        """See `seams.Crew`."""
        end = self.place.num_drawn
        num_open = self.place.num_since_commit
        return end, sharings.to_text(self.rosters.sharing(end - num_open, end)) if num_open else ""

    def commit(self, commit: Commit) -> None:
        """A reduction counts."""
        self._tell.committed()
        num_lost = self.books.commit(commit)
        if num_lost:
            self._tell.samples_lost(commit, num_lost)
        self.place.num_since_commit = 0
        self.place.counted = (self.place.epoch, self.place.position)
        self.rosters.forget(self.place.num_drawn)
        first = self.place.num_drawn + self._facts.alike["num_prefetched"]
        if commit.level:
            speeds = {member: row.speed for member, row in zip(commit.members, commit.rows, strict=True)}
            self.rosters.admit(first, commit.level, [speeds.get(each) for each in self.rosters.latest.members])
            self._tell.became_level(commit, first)
        elif commit.number % _REBALANCE_EVERY == 0 and commit.members == self.rosters.latest.members:
            change = self.rosters.rebalance(first, [row.speed for row in commit.rows])
            if change is not None:
                self._tell.shares_changed(first, change)

    def check(self, decree: Decree, notes: Sequence[dict[str, Any]]) -> None:
        """Refuse to join a job that has prepared something else; whoever is of the job's opinion goes on.

        Raises:
            TrainingError: One of them says what no member says.
            DisagreementError: For the first thing in which this member differs from the first that has the state.
        """
        for standing, note in zip(decree.standings, notes, strict=True):
            check_crew(standing, note)
            sharings.of_text(standing.sharing)
        first = decree.teller
        names = [f"worker {member}" for member in (first, self._facts.member)]
        said = [notes[decree.members.index(member)]["alike"] for member in (first, self._facts.member)]
        control.check_alike(said, list(self._facts.alike), names)

    def begin(
        self, decree: Decree, notes: Sequence[dict[str, Any]], *, is_newcomer: bool, followers: Collection[str]
    ) -> None:
        """An epoch begins, in which these take part with nothing unless they were level already."""
        holders = [index for index, each in enumerate(decree.standings) if each.has_state]
        if is_newcomer and holders:
            place = self.place
            place.epoch, place.position, place.num_drawn, place.num_steps_before = notes[holders[0]]["place"]
            epoch, place.counted, place.is_latecomer = place.epoch, (place.epoch, place.position), True
            self.books.load(epoch, notes[holders[0]]["books"])
        following, furthest = self.rosters.still_following(followers), furthest_of(decree.standings)
        self.rosters.share_so(sharings.of_text(furthest.sharing))
        speeds = [None if note["speed"] is None else _speed(note["speed"]) for note in notes]
        self.rosters.begin(
            furthest.num_drawn,
            decree.members,
            [note["cap"] for note in notes],
            speeds,
            [note["assumed_speed"] for note in notes],
            following,
        )
        self._tell.begun()

    def capture(self) -> None:
        """Note what the state is: what is large where it lies, since nothing changes it before the next reduction."""
        self._captured = self._state.to_buffers()

    def offer(self, name: str, *, is_lasting: bool) -> None:
        """Let newcomers read what was captured. To last, it is copied while the script computes its next gradients."""
        captured, self._captured = self._captured, {}
        try:
            offered = lasting(captured) if is_lasting else captured
        except MemoryError:  # training goes on; who reads nothing asks again
            _LOGGER.warning("state for a worker that joins: no memory for a copy of it. The worker begins anew.")
            offered = {}
        self._means.shelf.offer(name, offered)
        self._offered[name] = is_lasting

    def withdraw(self) -> None:
        """The state is about to change; copies stay until nobody follows any more."""
        for name, is_lasting in list(self._offered.items()):
            if not (is_lasting and self.rosters.following):
                self._means.shelf.withdraw(name)
                del self._offered[name]

    def pull(self, place: str, name: str, reading: Reading, pace: Pace | None = None) -> None:
        """Read the state of the member that listens there."""
        host, port = place.split()
        self._state.pull(host, int(port), self._means.trust, name, timeout_s=PULL_S, pace=pace, reading=reading)


def _speed(words: Sequence[float]) -> Speed:
    each_s, overhead, noise = words
    return Speed(s_per_sample=each_s, overhead_samples=overhead, noise=noise)
