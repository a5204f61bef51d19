"""What the benches of faults check can fail: parameters that differ by a bit, samples that are lost or doubled."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ringweave.planning.balancing import SampleAccount
from ringweave_bench.chaos import chaos_report

BENCH = Path(__file__).parents[3] / "bench" / "faults"
CHECK = "0123456789abcdef"


@pytest.fixture
def lab_jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import lab_jobs

    return lab_jobs


def drawn(step: int, indices: list[int]) -> str:
    own = SampleAccount.from_indices(indices)
    return f"drawn {step} {own.num_samples} {own.fingerprint} {(step - 1) // 6}"


def ended(
    lab_jobs: ModuleType, folder: Path, lines: dict[str, list[str]], events: list[dict[str, Any]], **more: Any
) -> Any:
    for name, said in lines.items():
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in said))
    report = chaos_report.build_report([], num_workers=2, workers_on={}, restart_s=0)
    return lab_jobs.Ended(**{"report": report, "events": events, "checks": folder, "end": None, **more})


def accounted(samples: list[int], expected: int) -> dict[str, Any]:
    total = SampleAccount.from_indices(samples)
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


def epoch(number: int, committed: int, *members: str) -> dict[str, Any]:
    return {"kind": "generation_begun", "term": 1, "number": number, "committed": committed, "members": list(members)}


def test_one_bit_is_found(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [f"done 1 {CHECK}"], "1.0-2": [f"done 1 {CHECK[:-1]}e"]}
    with pytest.raises(
        AssertionError, match=r"parameters of 1\.0 after step 1 are 0123456789abcdee, not 0123456789abcdef"
    ):
        ended(lab_jobs, tmp_path, lines, []).check_alike()


def test_samples_of_one_who_died_within_the_step_are_lost(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1]), drawn(2, [4, 5])], "1.0-2": [drawn(1, [2, 3]), drawn(2, [6, 7])]}
    gone = {"kind": "samples_lost", "reduction": 2, "members": ["0.0"], "samples": 2, "lost": 2}
    began = epoch(1, 0, "0.0", "1.0")
    found = ended(lab_jobs, tmp_path, lines, [began, gone, accounted([0, 1, 2, 3, 4, 5], expected=8)])
    assert found.check_samples() == (6, 2)


def test_what_one_drew_who_was_put_out_before_the_others_did_is_in_no_step(
    lab_jobs: ModuleType, tmp_path: Path
) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1]), drawn(2, [4, 5])], "1.0-2": [drawn(1, [2, 3]), drawn(2, [4, 5, 6, 7])]}
    epochs = [epoch(1, 0, "0.0", "1.0"), epoch(2, 1, "1.0"), epoch(3, 2, "0.1", "1.0")]
    found = ended(lab_jobs, tmp_path, lines, [*epochs, accounted(list(range(8)), expected=8)])
    assert found.check_samples() == (8, 0)
    with pytest.raises(AssertionError, match="epoch 0: processes drew"):
        ended(lab_jobs, tmp_path, lines, [epochs[0], accounted(list(range(8)), expected=8)]).check_samples()


@pytest.mark.parametrize("second", [[2, 2], [2], [2, 9]], ids=["doubled", "lost", "another"])
def test_samples_that_the_books_do_not_know_are_found(second: list[int], lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1])], "1.0-2": [drawn(1, second)]}
    with pytest.raises(AssertionError, match="epoch 0: processes drew"):
        ended(lab_jobs, tmp_path, lines, [accounted([0, 1, 2, 3], expected=4)]).check_samples()


def test_checks_that_have_no_other_of_their_step_prove_nothing(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [f"done 1 {CHECK}"], "1.0-2": [f"done 2 {CHECK}"]}
    with pytest.raises(AssertionError, match="parameters: 2 checks of 2 steps, none to compare with"):
        ended(lab_jobs, tmp_path, lines, []).check_alike()


def test_samples_of_which_no_epoch_is_complete_prove_nothing(lab_jobs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="samples: no epoch of the data is complete"):
        ended(lab_jobs, tmp_path, {"0.0-1": [drawn(1, [0, 1])]}, []).check_samples()


def test_samples_that_are_missing_without_a_word_are_found(lab_jobs: ModuleType, tmp_path: Path) -> None:
    lines = {"0.0-1": [drawn(1, [0, 1])], "1.0-2": [drawn(1, [2])]}
    with pytest.raises(AssertionError, match="samples: 1 are missing in the books, 0 are known to be lost"):
        ended(lab_jobs, tmp_path, lines, [accounted([0, 1, 2], expected=4)]).check_samples()


def test_a_step_that_loses_more_than_the_shares_of_those_who_were_gone_is_found(
    lab_jobs: ModuleType, tmp_path: Path
) -> None:
    began = epoch(1, 0, "0.0", "1.0")
    lines = {"0.0-1": [drawn(1, [0, 1])], "1.0-2": [drawn(1, [2, 3])]}

    def lost(number: int) -> None:
        gone = {"kind": "samples_lost", "reduction": 1, "members": ["0.0"], "samples": 2, "lost": number}
        ended(lab_jobs, tmp_path, lines, [began, gone, accounted([0, 1], expected=2 + number)]).check_samples()

    with pytest.raises(AssertionError, match="step 1: 4 samples lost with 1 members of 3 at most"):
        lost(4)
    lost(3)  # one share is one larger where the batch does not divide


@pytest.mark.parametrize(
    ("asked_steps", "outcome", "end", "words"),
    [
        (None, "stopped", None, []),
        (None, "done", {"train_step": 40}, ["the job did not go on until its time was over: done"]),
        (None, "", None, ["the job did not go on until its time was over: no end"]),
        (100, "done", {"train_step": 100}, []),
        (100, "done", {"train_step": 40}, ["the job ended after 40 train steps, not 100"]),
        (100, "stopped", None, ["the job ended after an unknown number of train steps, not 100"]),
    ],
)
def test_a_job_that_ends_otherwise_than_it_was_to_is_found(
    lab_jobs: ModuleType,
    tmp_path: Path,
    asked_steps: int | None,
    outcome: str,
    end: dict[str, int] | None,
    words: list[str],
) -> None:
    events = [{"kind": "chaos_ended", "outcome": outcome}] if outcome else []
    found = ended(lab_jobs, tmp_path, {}, events, asked_steps=asked_steps, end=end)
    assert found.wrong_end() == words
    assert lab_jobs.summary(found, [])["wrong"][-len(words) :] == words if words else True


def test_an_elastic_job_without_members_and_books_is_found_and_another_one_needs_none(
    lab_jobs: ModuleType, tmp_path: Path
) -> None:
    lines = {"0-1": [f"done 1 {CHECK}"], "1-2": [f"done 1 {CHECK}"]}
    stopped = [{"kind": "chaos_ended", "outcome": "stopped"}]
    report = replace(chaos_report.build_report([], num_workers=2, workers_on={}, restart_s=0), attempts=1, broken=())
    other = ended(lab_jobs, tmp_path, lines, stopped, report=report, is_elastic=False)
    assert lab_jobs.missed(lab_jobs.summary(other, [])) == []
    elastic = replace(other, is_elastic=True)
    first, second = lab_jobs.missed(lab_jobs.summary(elastic, []))
    assert first.startswith("samples: no epoch of the data is complete")
    assert second == "no generation began: the job had no members"


def said(**other: Any) -> dict[str, Any]:
    none: dict[str, Any] = {"wrong": [], "broken": [], "never_began": [], "at_other_moments": []}
    return {**none, "attempts": 1, "never_back": [], "evicted": 0, "samples_lost": 0, "each": [], **other}


def test_what_a_job_missed_is_said_and_is_the_exit_code(
    lab_jobs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab_jobs.missed(said(), are_back=True) == []
    worst = said(broken=["4 train steps were lost"], never_began=["at 3s kill worker 0"], attempts=2)
    worst |= {"never_back": ["at 1s kill worker 1"], "evicted": 3, "wrong": ["parameters differ"]}
    worst |= {"at_other_moments": ["at 4s kill worker 0 during bucket 1: it died during commit"]}
    assert lab_jobs.missed(worst) == [
        "parameters differ",
        "4 train steps were lost",
        "at 3s kill worker 0: never began",
        "at 4s kill worker 0 during bucket 1: it died during commit",
        "the job was started 2 times",
    ]
    assert lab_jobs.missed(worst, are_back=True)[5:] == [
        "at 1s kill worker 1: the victim never came back",
        "3 members were evicted though no fault hit them",
    ]
    assert lab_jobs.verdict([]) == 0
    assert lab_jobs.verdict(["4 train steps were lost"]) == 1
    assert capsys.readouterr().out == "missed: 4 train steps were lost\n"


@pytest.mark.parametrize(("value", "words"), [(1.5, []), (1.6, ["x: 1.6, "]), (None, ["x: not known, "])])
def test_what_is_over_its_bar_or_not_known_is_missed(
    lab_jobs: ModuleType, value: float | None, words: list[str]
) -> None:
    assert lab_jobs.over("x", value, 1.5) == [f"{each}the bar is 1.5" for each in words]


def test_each_kill_follows_one_of_the_coordinator(lab_jobs: ModuleType) -> None:
    import kills as bench  # beside lab_jobs

    kills = bench.draw(6, 8, seed=1, every_s=14.0, calm_s=10.0, outside=True)
    found = bench.with_coordinators(kills)
    assert [fault.target for fault in found[::2]] == ["coordinator"] * 6
    assert list(found[1::2]) == kills
    assert all(0.29 < after.at_s - before.at_s < 0.31 for before, after in zip(found[::2], kills, strict=True))
    takeovers = [{"taken_over_s": 0.4}] * 5 + [{"taken_over_s": None}]
    told = said(faults=6, takeovers=takeovers, taken_over_p95_s=3.2, takeover_stall_p95_s=0.5)
    told |= {"each": [{"stall_s": 0.4}] * 5 + [{"stall_s": None}]}
    assert bench.missed(told, 6, bench.BAR_S, of_coordinators=True) == [
        "5 stalls are known, not 6",
        "5 coordinators were replaced, not 6",
        "fail-over, p95 in s: 3.2, the bar is 3",
    ]


def test_kills_are_drawn_inside_the_sums_that_the_job_has_and_at_every_moment_as_often(lab_jobs: ModuleType) -> None:
    import kills as bench  # beside lab_jobs

    found = [each.moment for each in bench.draw(60, 8, seed=1, every_s=14.0, calm_s=10.0, outside=False)]
    assert {each for each in found if each.startswith("bucket")} == {f"bucket {n}" for n in range(lab_jobs.NUM_SUMS)}
    assert set(Counter(each.partition(" ")[0] for each in found).values()) == {10}


def test_losses_that_are_apart_or_say_nothing_and_faults_that_are_absent_are_missed(lab_jobs: ModuleType) -> None:
    import mixed as bench  # beside lab_jobs

    good = said(begun=3, wanted=3, apart=0.004, held_out_loss=0.5, held_out_loss_without_faults=0.5)
    assert bench.missed(good) == []
    assert bench.missed({**good, "begun": 2}) == ["2 faults began, not 3"]
    assert bench.missed({**good, "apart": 0.006}) == ["losses are apart by: 0.006, the bar is 0.005"]
    assert bench.missed({**good, "held_out_loss": 0.001}) == ["a loss of 0.001 is too low to be compared"]
    ended_early = {**good, "apart": None, "held_out_loss": None}
    assert bench.missed(ended_early)[0] == "losses are apart by: not known, the bar is 0.005"
