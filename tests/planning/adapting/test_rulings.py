import math
import random

import numpy as np
import pytest

from ringweave.errors import ScheduleError
from ringweave.planning.autotune import tuning_messages
from ringweave.planning.autotune.tuning_messages import (
    REPORT_WINDOW,
    SurveyStream,
    TuningDecision,
    TuningReport,
)
from tests.rpc.mutations import mutated


def combined(*reports: TuningReport) -> TuningReport:
    vectors = np.array([report.to_vector() for report in reports])
    assert vectors.shape == (len(reports), 5 + REPORT_WINDOW)
    return TuningReport.from_vector(np.fmin.reduce(vectors).tolist())


def test_a_ruling_reads_what_it_prints() -> None:
    phases = ((SurveyStream(0, 1, 5), SurveyStream(1, 0, 6)), (SurveyStream(0, 2, 7),))
    for ruling in (
        TuningDecision(num_bytes=5, schedule="ring", is_trial=True),
        TuningDecision(num_bytes=5, phases=phases),
        TuningDecision(num_bytes=5, schedule="native", next_in=2**62, plan='{"a": "b"}'),
    ):
        assert TuningDecision.parse(str(ruling)) == ruling


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"phases": []}', '{"phases": [[[1]]], "num_bytes": 3}', "[" * 100_000]
)
def test_other_text_is_none(text: str) -> None:
    with pytest.raises(
        ScheduleError, match=r"tuning decision: .*, expected what the first rank sent\. Run the same version"
    ):
        TuningDecision.parse(text)


def test_text_that_is_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ruling = TuningDecision(num_bytes=5, schedule="ring")
    monkeypatch.setattr(tuning_messages, "MAX_DECISION_BYTES", len(str(ruling)))
    assert TuningDecision.parse(str(ruling)) == ruling
    with pytest.raises(ScheduleError, match=r"tuning decision: .*\d characters, more than \d"):
        TuningDecision.parse(str(ruling) + " ")


def test_mutated_rulings_are_read_or_refused() -> None:
    rng, num_refused = random.Random(10), 0
    good = str(
        TuningDecision(num_bytes=5, phases=((SurveyStream(0, 1, 5), SurveyStream(1, 0, 6)),), plan='{"a": "b"}')
    ).encode()
    for _ in range(2_000):
        try:
            TuningDecision.parse(mutated(rng, good).decode("utf-8", "replace"))
        except ScheduleError:
            num_refused += 1
    assert num_refused > 1_000


def test_a_trial_takes_as_long_as_its_slowest_rank_another_as_its_last_comer() -> None:
    report = combined(
        TuningReport(num_bytes=8, trial_s=2.0, window=(5.0, math.nan, 3.0)),
        TuningReport(num_bytes=8, trial_s=3.0, window=(4.0, 7.0, 9.0)),
    )
    assert report == TuningReport(num_bytes=8, trial_s=3.0, window=(4.0, 7.0, 3.0))


def test_nothing_measured_is_not_a_number() -> None:
    report = combined(TuningReport(num_bytes=8), TuningReport(num_bytes=8))
    assert math.isnan(report.trial_s)
    assert report.window == ()


def test_unequal_sizes_are_seen() -> None:
    assert not combined(TuningReport(num_bytes=8), TuningReport(num_bytes=12)).is_equal


def test_only_the_newest_are_told() -> None:
    window = tuple(float(number) for number in range(REPORT_WINDOW + 5))
    assert combined(TuningReport(num_bytes=1, window=window)).window == window[5:]
