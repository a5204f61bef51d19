from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave_bench import pipeline_history


def measured(first: int, splits: list[int], seconds: float) -> dict:
    spans = {"first_step": first, "end_step": first + 10, "blocks": 6, "splits": splits}
    return {"kind": "pipeline_measured", **spans, "measured_s": seconds, "predicted_s": seconds * 0.9}


EVENTS = [
    measured(2, [3], 1.0),
    measured(12, [3], 2.0),
    {"kind": "blocks_moved", "at_step": 23, "before": [3], "after": [2]},
    measured(24, [2], 1.5),
]


def test_history_of_events() -> None:
    found = pipeline_history.read_history([{"kind": "run_started"}, *EVENTS])
    assert found.num_blocks == 6
    assert [(era.begin_step, era.end_step, era.splits) for era in found.periods] == [(2, 23, (3,)), (23, 34, (2,))]
    assert [span.measured_s for span in found.windows] == [1.0, 2.0, 1.5]
    assert pipeline_history.read_history(EVENTS[:2]).periods == (
        pipeline_history.PartitionPeriod(begin_step=2, end_step=22, splits=(3,)),
    )


def test_no_events() -> None:
    with pytest.raises(UsageError, match=r"^events of a pipeline: 'none', expected events of kind pipeline"):
        pipeline_history.read_history([{"kind": "run_started"}])


@pytest.mark.slow
def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    pipeline_history.draw_history(pipeline_history.read_history(EVENTS), tmp_path / "p.svg")
    words = (tmp_path / "p.svg").read_text()
    for word in ("device 1", "device 2", "measured step", "predicted step", "train step", "blocks"):
        assert word in words
