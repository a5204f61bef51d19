"""What becomes of rings that `auto` has chosen, at the ends of epochs."""

from typing import Any

from ringweave.training.mode_choice.forecast import RingReconsideration

EVERYONE = ((0, 1, 2, 3),)
SAID = {"rate": None, "speed": 1.0, "trial_s": [1.0], "batch_samples": 64, "num_bytes": 1000, "server_rate": None}
SAID |= {"uplinks": {}, "server_uplinks": {}}


class Talk:
    """What all ranks say; each hears the same."""

    def __init__(self, recent_s: list[list[float]]) -> None:
        self._recent_s, self.own = recent_s, None

    def gather_json(self, document: Any) -> list[Any]:
        self.own = document
        return [{"recent_s": each} for each in self._recent_s]


def looked(recent_s: list[list[float]]) -> tuple[Any, list[Any], Talk]:
    notes: list[Any] = []
    talk = Talk(recent_s)
    looking = RingReconsideration(
        reports=[SAID] * 4,
        control=talk,  # pyrefly: ignore - all that is asked of it
        local_steps=0,
        record_choice=lambda rings, why: notes.append((rings, why)),
    )
    return looking.find_better_rings(EVERYONE, [0.5, 0.25]), notes, talk


def test_it_is_said_which_rings_are_formed_and_why() -> None:
    rings, [(noted, why)], talk = looked([[0.01] * 7 + [0.04]] * 4)
    assert rings == noted
    assert rings is not None
    assert len(rings) > 1
    assert why.startswith("predicted for the samples of a train step: ps-hra ")
    assert talk.own == {"recent_s": [0.5, 0.25]}


def test_nothing_is_said_where_rings_stay() -> None:
    assert looked([[0.01] * 8] * 4)[:2] == (None, [])
