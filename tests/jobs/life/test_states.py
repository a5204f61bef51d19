from pathlib import Path

from ringweave.jobs import states
from ringweave.jobs.records import EndCause, cause_of_exit
from ringweave.jobs.states import JOB_STATE_TEXTS, TRANSITIONS, JobState

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "job-states.md"


def test_the_page_has_the_tables_and_the_diagram() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert states.states_to_markdown() in text
    assert f"```mermaid\n{states.states_to_mermaid()}```" in text


def test_every_state_is_described_and_has_its_ways() -> None:
    assert set(JOB_STATE_TEXTS) == set(TRANSITIONS) == set(JobState)
    assert all(JobState.DELETING in after for state, after in TRANSITIONS.items() if state is not JobState.DELETING)


def test_a_signal_is_the_places_doing_and_an_exit_code_the_scripts() -> None:
    assert cause_of_exit(1, None, blames_peer=False) is EndCause.PROGRAM
    assert cause_of_exit(None, "SIGKILL", blames_peer=False) is EndCause.PLATFORM
    assert cause_of_exit(137, None, blames_peer=False) is EndCause.PLATFORM
    assert cause_of_exit(1, None, blames_peer=True) is EndCause.PEER
