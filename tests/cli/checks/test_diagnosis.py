from pathlib import Path

from ringweave.cli.doctor import (
    REQUIREMENTS,
    CheckResult,
    diagnose,
    findings_document,
    findings_table,
    is_fit_for_training,
)

GOOD = {name: CheckResult(state="ok", seen="1.0") for name in REQUIREMENTS}


def changed(**states: str) -> dict[str, CheckResult]:
    return GOOD | {name: CheckResult(state=state, seen="nothing") for name, state in states.items()}  # type: ignore


def test_all_is_well() -> None:
    findings = diagnose(GOOD)
    assert is_fit_for_training(findings)
    assert [finding.name for finding in findings] == list(REQUIREMENTS)
    assert all(finding.fix is None for finding in findings)
    assert findings_table(findings).endswith("\nTraining on workers of this machine works.\n")


def test_only_what_the_main_job_needs_decides() -> None:
    required = [name for name, need in REQUIREMENTS.items() if need.is_required]
    assert required == ["python", "ringweave", "autoload", "torch", "backend", "gloo"]
    for name in REQUIREMENTS:
        assert is_fit_for_training(diagnose(changed(**{name: "broken"}))) == (name not in required)
        assert is_fit_for_training(diagnose(changed(**{name: "missing"}))) == (name not in required)


def test_missing_and_broken_have_mends_of_their_own() -> None:
    missing = diagnose(changed(hwloc="missing"))[list(REQUIREMENTS).index("hwloc")]
    assert missing.fix == "apt-get install hwloc"
    broken = diagnose(changed(hwloc="broken"))[list(REQUIREMENTS).index("hwloc")]
    assert broken.fix == "apt-get install --reinstall hwloc"
    assert all(need.fix_missing and need.needed_for for need in REQUIREMENTS.values())
    assert all(finding.fix for finding in diagnose(changed(**dict.fromkeys(REQUIREMENTS, "broken"))))


def test_what_was_not_looked_at_is_left_out() -> None:
    assert [finding.name for finding in diagnose({"torch": GOOD["torch"]})] == ["torch"]


def test_the_verdict_names_what_to_mend() -> None:
    table = findings_table(diagnose(changed(torch="missing", gloo="broken", mpi="missing")))
    assert table.endswith("\nTraining on workers of this machine does not work: fix torch, gloo first.\n")


def test_the_table(check_golden) -> None:
    seen = {
        "python": CheckResult(state="ok", seen="3.11.7 at /usr/bin/python3"),
        "ringweave": CheckResult(state="broken", seen="0.1.0, but no entry point in group torch.backends"),
        "torch": CheckResult(state="ok", seen="2.13.0"),
        "examples": CheckResult(state="missing", seen="not installed: matplotlib, tensorboard, tqdm, scikit-learn"),
        "lab": CheckResult(state="broken", seen="unshare: unshare failed: Operation not permitted"),
        "mpi": CheckResult(state="missing", seen="mpirun is not on the PATH"),
    }
    check_golden(Path(__file__).parents[1] / "golden" / "doctor.txt", findings_table(diagnose(seen)))


def test_no_line_is_wider_than_a_terminal() -> None:
    for state in ("ok", "missing", "broken"):
        odd = {name: CheckResult(state=state, seen="word " * 40 + "w" * 130) for name in REQUIREMENTS}  # type: ignore
        assert all(len(line) <= 120 for line in findings_table(diagnose(odd)).splitlines())


def test_the_document() -> None:
    document = findings_document(diagnose(changed(torch="missing")))
    assert document["fit"] is False
    assert document["checks"][3] == {  # type: ignore
        "name": "torch",
        "state": "missing",
        "seen": "nothing",
        "needed_for": "training",
        "is_required": True,
        "fix": "pip install 'ringweave[train]'   (in a clone: make setup)",
    }
