"""A real elastic job in a real lab under a few faults, judged by what the benches of faults are judged by."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from ringweave_bench.chaos import job_history, member_impacts

BENCH = Path(__file__).parents[3] / "bench" / "faults"
FAULTS = [
    "at 2s kill coordinator",
    "at 2.3s kill worker 1 during backward",
    "at 6s pause worker 2 for 3s",
    "at 11s cut a-2 for 2s",
    "at 14s slow core->a-0 to 2Mbit/s for 2s",
    "at 18s fill disk for 6s",
]
"""The disk is full for long: to fill it takes seconds where others use the machine too."""
CLOCK = "at 25s clock a-1 by -3600s for 2s"
"""Of the node of the coordinator that has taken over."""
HAS_COMPILER = shutil.which("cc") is not None
STEPS = 108
S_PER_SAMPLE = 0.003
"""Workers sleep, so that so many steps take longer than all faults, however fast the machine is."""


@pytest.fixture
def lab_jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import lab_jobs

    return lab_jobs


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_lab")
@pytest.mark.thorough  # daily: cli/test_chaos.py in a lab, and each kind of fault alone
@pytest.mark.parametrize("mode", ["sync", "balanced"])
def test_faults_of_every_kind_happen_and_no_step_no_sample_and_no_bit_is_lost(
    lab_jobs: ModuleType, tmp_path: Path, mode: str
) -> None:
    options = lab_jobs.parser("").parse_args(
        ["--workers", "3", "--width", "64", "--mode", mode, "--keep", str(tmp_path)]
    )
    happens = lab_jobs.parse([*FAULTS, CLOCK] if HAS_COMPILER else FAULTS, options)
    more = ["--s-per-sample", str(S_PER_SAMPLE), "--checkpoint-every", "1"]
    ended = lab_jobs.run(options, happens, until_s=600.0, elastic="1:3", steps=STEPS, more=more)
    said = lab_jobs.summary(ended, member_impacts.measure_fault_impacts(ended.events))
    log = (tmp_path / "job" / "job.log").read_text()
    assert lab_jobs.missed(said) == [], log
    assert (said["begun"], said["faults"], len(said["takeovers"])) == (len(happens), 3, 1)
    assert said["steps"] == ended.end["train_step"] == STEPS, log
    num_drawn = (STEPS - lab_jobs.STEPS_AN_EPOCH) * 256
    assert said["samples_counted"] + said["samples_lost"] == num_drawn, "all epochs but the last, which ends amidst"
    assert said["checks_alike"] > STEPS
    assert "not written: [Errno 28]" in log, "the disk was full"
    assert {each.term % 2 for each in job_history.list_generations(ended.events)} == {0, 1}, (
        "both coordinators have decided"
    )
    if not HAS_COMPILER:
        pytest.skip("all went well, but no clock has jumped: there is no C compiler called cc")
