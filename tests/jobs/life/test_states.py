import pytest

from ringweave.errors import JobError
from ringweave.jobs import records
from ringweave.jobs.records import EndCause, cause_of_exit
from ringweave.jobs.states import JobState
from tests.jobs.life import lives
from tools.reference_pages import JOB_STATE_TEXTS, TRANSITIONS


def test_every_state_is_described_and_has_its_ways() -> None:
    assert set(JOB_STATE_TEXTS) == set(TRANSITIONS) == set(JobState)
    assert all(JobState.DELETING in after for state, after in TRANSITIONS.items() if state is not JobState.DELETING)


def test_a_signal_is_the_places_doing_and_an_exit_code_the_scripts() -> None:
    assert cause_of_exit(1, None, blames_peer=False) is EndCause.PROGRAM
    assert cause_of_exit(None, "SIGKILL", blames_peer=False) is EndCause.PLATFORM
    assert cause_of_exit(137, None, blames_peer=False) is EndCause.PLATFORM
    assert cause_of_exit(1, None, blames_peer=True) is EndCause.PEER


def test_a_record_of_another_format_is_refused() -> None:
    text = records.RECORD_JSON.dump(lives.a_job().record)
    assert text.startswith('{"format":2,')
    assert records.RECORD_JSON.parse(text) == lives.a_job().record
    for other, found in ((text.replace('"format":2,', "", 1), 1), (text.replace('"format":2', '"format":3', 1), 3)):
        with pytest.raises(JobError, match=rf"record of the job: 'format {found}', expected format 2\. Delete the job"):
            records.RECORD_JSON.parse(other)
