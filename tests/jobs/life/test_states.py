from pathlib import Path

from ringweave.jobs.life import states
from ringweave.jobs.life.observing import Cause, cause_of_exit
from ringweave.jobs.life.states import JOB_STATES, TRANSITIONS, JobState

PAGE = Path(__file__).parents[3] / "docs" / "jobs.md"


def test_the_page_has_the_tables_and_the_diagram() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert states.to_markdown() in text
    assert f"```mermaid\n{states.to_mermaid()}```" in text


def test_every_state_is_described_and_has_its_ways() -> None:
    assert set(JOB_STATES) == set(TRANSITIONS) == set(JobState)
    assert all(JobState.DELETING in after for state, after in TRANSITIONS.items() if state is not JobState.DELETING)


def test_a_signal_is_the_places_doing_and_an_exit_code_the_scripts() -> None:
    assert cause_of_exit(1, None, complains_of_peer=False) is Cause.PROGRAM
    assert cause_of_exit(None, "SIGKILL", complains_of_peer=False) is Cause.PLACE
    assert cause_of_exit(137, None, complains_of_peer=False) is Cause.PLACE
    assert cause_of_exit(1, None, complains_of_peer=True) is Cause.PEER
