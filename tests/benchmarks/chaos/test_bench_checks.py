"""What the benches of faults check can fail: parameters that differ by a bit, samples that are lost or doubled."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringweave.benchmarks.chaos import accounts
from ringweave.planning.balancing import Account

BENCH = Path(__file__).parents[3] / "bench" / "faults"
CHECK = "0123456789abcdef"


@pytest.fixture
def lab_jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import lab_jobs

    return lab_jobs


def drawn(step: int, indices: list[int]) -> str:
    own = Account.of(indices)
    return f"drawn {step} {own.num_samples} {own.fingerprint}"


def ended(lab_jobs: ModuleType, folder: Path, lines: dict[str, list[str]], events: list[dict[str, Any]]) -> Any:
    for name, said in lines.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in said))
    report = accounts.report([], num_workers=2, workers_on={}, restart_s=0)
    return lab_jobs.Ended(report=report, events=events, checks=folder, end=None)


def accounted(samples: list[int], expected: int) -> dict[str, Any]:
    total = Account.of(samples)
    return {
        "kind": "samples_accounted",
        "epoch": 0,
        "samples": total.num_samples,
        "expected": expected,
        "fingerprint": f"{total.fingerprint:016x}",
    }


def test_parameters_that_are_alike(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [f"done 1 {CHECK}", "done 2 f"], "1.0-2": [f"done 1 {CHECK}", f"done 2 {CHECK}"]}
    assert ended(lab_jobs, tmp_path, lines, []).check_alike() == 3, "a line that was cut by a kill says nothing"


def test_one_bit_is_found(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [f"done 1 {CHECK}"], "1.0-2": [f"done 1 {CHECK[:-1]}e"]}
    with pytest.raises(
        AssertionError, match=r"parameters of 1\.0 after step 1 are 0123456789abcdee, not 0123456789abcdef"
    ):
        ended(lab_jobs, tmp_path, lines, []).check_alike()


def test_samples_of_one_who_died_within_the_step_are_lost(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1]), drawn(2, [4, 5])], "1.0-2": [drawn(1, [2, 3]), drawn(2, [6, 7])]}
    gone = {"kind": "samples_lost", "reduction": 2, "members": ["0.0"], "samples": 2, "lost": 2}
    found = ended(lab_jobs, tmp_path, lines, [gone, accounted([0, 1, 2, 3, 4, 5], expected=8)])
    assert found.check_samples() == (6, 2)


@pytest.mark.parametrize("second", [[2, 2], [2], [2, 9]], ids=["doubled", "lost", "another"])
def test_samples_that_the_books_do_not_know_are_found(second: list[int], lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1])], "1.0-2": [drawn(1, second)]}
    with pytest.raises(AssertionError, match="epoch 0: processes drew"):
        ended(lab_jobs, tmp_path, lines, [accounted([0, 1, 2, 3], expected=4)]).check_samples()


@pytest.mark.parametrize(("goodput", "every_s", "good"), [(0.95, 60.0, True), (0.94, 60.0, False), (0.88, 15.0, True)])
def test_goodput_is_held_against_the_bar_of_its_interval(
    lab_jobs: ModuleType, goodput: float, every_s: float, good: bool
) -> None:
    import goodput as bench  # beside lab_jobs

    assert bench.is_good(goodput, every_s) is good
    assert not bench.is_good(None, every_s), "what could not be measured is not good"
