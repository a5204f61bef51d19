from pathlib import Path

from ringweave.cli.checks.diagnosis import NEEDS, Observation, diagnose, is_fit, to_json, to_table

GOOD = {name: Observation(state="ok", seen="1.0") for name in NEEDS}


def changed(**states: str) -> dict[str, Observation]:
    return GOOD | {name: Observation(state=state, seen="nothing") for name, state in states.items()}  # type: ignore


def test_all_is_well() -> None:
    findings = diagnose(GOOD)
    assert is_fit(findings)
    assert [finding.name for finding in findings] == list(NEEDS)
    assert all(finding.mend is None for finding in findings)
    assert to_table(findings).endswith("\nTraining on workers of this machine works.\n")


def test_only_what_the_main_job_needs_decides() -> None:
    required = [name for name, need in NEEDS.items() if need.is_required]
    assert required == ["python", "ringweave", "autoload", "torch", "backend", "gloo"]
    for name in NEEDS:
        assert is_fit(diagnose(changed(**{name: "broken"}))) == (name not in required)
        assert is_fit(diagnose(changed(**{name: "missing"}))) == (name not in required)


def test_missing_and_broken_have_mends_of_their_own() -> None:
    missing = diagnose(changed(hwloc="missing"))[list(NEEDS).index("hwloc")]
    assert missing.mend == "apt-get install hwloc"
    broken = diagnose(changed(hwloc="broken"))[list(NEEDS).index("hwloc")]
    assert broken.mend == "apt-get install --reinstall hwloc"
    assert all(need.mend_missing and need.mend_broken and need.needed_for for need in NEEDS.values())


def test_what_was_not_looked_at_is_left_out() -> None:
    assert [finding.name for finding in diagnose({"torch": GOOD["torch"]})] == ["torch"]


def test_the_verdict_names_what_to_mend() -> None:
    table = to_table(diagnose(changed(torch="missing", gloo="broken", mpi="missing")))
    assert table.endswith("\nTraining on workers of this machine does not work: mend torch, gloo first.\n")


def test_the_table(check_golden) -> None:
    seen = {
        "python": Observation(state="ok", seen="3.11.7 at /usr/bin/python3"),
        "ringweave": Observation(state="broken", seen="0.1.0, but no entry point in group torch.backends"),
        "torch": Observation(state="ok", seen="2.13.0"),
        "examples": Observation(state="missing", seen="not installed: matplotlib, tensorboard, tqdm, scikit-learn"),
        "lab": Observation(state="broken", seen="unshare: unshare failed: Operation not permitted"),
        "mpi": Observation(state="missing", seen="mpirun is not on the PATH"),
    }
    check_golden(Path(__file__).parents[1] / "golden" / "doctor.txt", to_table(diagnose(seen)))


def test_no_line_is_wider_than_a_terminal() -> None:
    for state in ("ok", "missing", "broken"):
        odd = {name: Observation(state=state, seen="word " * 40 + "w" * 130) for name in NEEDS}  # type: ignore
        assert all(len(line) <= 120 for line in to_table(diagnose(odd)).splitlines())


def test_the_document() -> None:
    document = to_json(diagnose(changed(torch="missing")))
    assert document["fit"] is False
    assert document["checks"][3] == {  # type: ignore
        "name": "torch",
        "state": "missing",
        "seen": "nothing",
        "needed_for": "training",
        "is_required": True,
        "mend": "pip install 'ringweave[train]'   (in a clone: make setup)",
    }
