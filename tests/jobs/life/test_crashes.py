"""The supervisor dies at every boundary between two actions of every life; the end is the same."""

import pytest

from ringweave.jobs.states import JobState
from tests.jobs.life import lives
from tests.jobs.life.lives import LIVES, Life

NAMES = [life.name for life in LIVES]
ENDS = {
    "finishes": (JobState.SUCCEEDED, [(0, 1), (1, 1)], {}),
    "three nodes, kept by policy": (JobState.SUCCEEDED, [(0, 1), (1, 1), (2, 1)], {(0, 1)}),
    "a node is killed": (JobState.SUCCEEDED, [(0, 1), (1, 1), (1, 2)], {}),
    "a node vanishes": (JobState.SUCCEEDED, [(0, 1), (1, 1), (1, 2), (2, 1)], {}),
    "retries are spent": (JobState.FAILED, [(0, 1), (0, 2), (1, 1)], {(0, 2)}),
    "the script fails, is mended and tried again": (
        JobState.SUCCEEDED,
        [(0, 1), (0, 2), (1, 1), (1, 2)],
        {(0, 2)},
    ),
    "fails before it starts": (JobState.SUCCEEDED, [(0, 1), (0, 2), (1, 1)], {}),
    "one had finished already": (JobState.SUCCEEDED, [(0, 1), (0, 2), (1, 1), (1, 2)], {}),
    "suspended and resumed": (JobState.SUCCEEDED, [(0, 1), (0, 2), (1, 1), (1, 2)], {}),
    "submitted suspended": (JobState.SUCCEEDED, [(0, 1), (1, 1)], {}),
    "stopped": (JobState.STOPPED, [(0, 1), (1, 1)], {(0, 1)}),
    "stopped and tried again": (JobState.SUCCEEDED, [(0, 1), (0, 2), (1, 1), (1, 2)], {}),
    "elastic: a node is killed, and comes back": (JobState.SUCCEEDED, [(0, 1), (1, 1), (1, 2), (2, 1)], {}),
    "elastic: a node may not be tried again": (JobState.SUCCEEDED, [(0, 1), (1, 1), (2, 1)], {(1, 1)}),
    "elastic: too few are left": (JobState.SUCCEEDED, [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)], {}),
    "elastic: one is lost when another one has finished": (JobState.SUCCEEDED, [(0, 1), (1, 1), (2, 1)], {(1, 1)}),
    "its config is removed by somebody": (JobState.SUCCEEDED, [(0, 1), (1, 1)], {}),
}


@pytest.mark.parametrize("life", LIVES, ids=NAMES)
def test_the_end_of_each_life(life: Life) -> None:
    place = lives.live(life)
    assert place.broken_rules == []
    assert len(set(place.event_keys)) == len(place.event_keys)
    if life.name not in ENDS:
        assert (place.job, place.has_config, place.groups) == (None, False, {})
        return
    state, created, left = ENDS[life.name]
    assert place.job is not None
    assert (place.job.record.state, sorted(place.created), set(place.groups)) == (state, created, set(left))
    assert place.has_config == bool(left)


@pytest.mark.parametrize("life", LIVES, ids=NAMES)
def test_a_crash_at_every_boundary_changes_nothing(life: Life) -> None:
    expected = lives.end_state(lives.live(life))
    num_actions = count_actions(life)
    assert num_actions >= 8
    for boundary in range(num_actions + 1):
        place = lives.live(life, crash_after=boundary)
        assert place.broken_rules == []
        assert lives.end_state(place) == expected, f"crashed after action {boundary} of {num_actions}"
        assert len(set(place.event_keys)) == len(place.event_keys)


@pytest.mark.parametrize("life", LIVES, ids=NAMES)
def test_a_crash_at_all_boundaries_changes_nothing(life: Life) -> None:
    place = lives.live(life, always_crash=True)
    assert place.broken_rules == []
    assert lives.end_state(place) == lives.end_state(lives.live(life))


def count_actions(life: Life) -> int:
    """How many actions the life has without a crash."""
    place, done, script = life.place(), 0, list(life.script)
    for _ in range(60):
        done += lives.settle(place)
        if place.job is not None and script and script[0][0](place):
            script.pop(0)[1](place)
        place.pass_time()
    return done
