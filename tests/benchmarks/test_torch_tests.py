"""Report of torch's own tests on ringweave beside Gloo."""

import argparse
import unittest
from pathlib import Path

import pytest

from bench import torch_tests
from bench.torch_tests import FAILED, GLOO, PASSED, SKIPPED, Outcome


def outcome(kind: str, reason: str = "") -> Outcome:
    return Outcome(outcome=kind, seconds=1.0, reason=reason)


def test_only_tests_that_pass_on_gloo_are_due_on_others_and_failures_are_repeated() -> None:
    for kind in (PASSED, FAILED, SKIPPED):
        assert torch_tests.is_due({GLOO: outcome(kind)}, "ring") == (kind == PASSED)
        assert torch_tests.is_due({GLOO: outcome(kind)}, GLOO) == (kind == FAILED)
        assert torch_tests.is_due({GLOO: outcome(PASSED), "ring": outcome(kind)}, "ring") == (kind == FAILED)
    assert torch_tests.is_due({}, GLOO)
    assert not torch_tests.is_due({}, "ring")


def test_the_report_names_what_passes_on_gloo_alone(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = {
        "test_barrier": {GLOO: outcome(PASSED), "ring": outcome(FAILED, "AssertionError: 2 != 3")},
        "test_get_backend": {GLOO: outcome(PASSED), "ring": outcome(FAILED, "AssertionError: 'ringweave' != 'gloo'")},
        "test_broadcast": {GLOO: outcome(PASSED), "ring": outcome(PASSED)},
        "test_cuda": {GLOO: outcome(SKIPPED)},
    }
    assert torch_tests.report(outcomes, list(outcomes), ["ring"]) == ["test_barrier on ring"]
    printed = capsys.readouterr().out
    assert "gloo: 3 passed, 0 failed, 1 skipped" in printed
    assert "ring: 1 passed, 2 failed, 0 skipped" in printed
    assert "| test_barrier | ring | no | AssertionError: 2 != 3 |" in printed
    assert "| test_get_backend | ring | compares the backend's name with gloo |" in printed


def test_outcomes_are_kept_from_call_to_call(tmp_path: Path) -> None:
    outcomes = {"test_barrier": {GLOO: outcome(PASSED)}}
    options = argparse.Namespace(out=tmp_path / "out.json", world_size=3)
    assert torch_tests.load_outcomes(options.out) == {}
    torch_tests.save_outcomes(outcomes, options)
    assert torch_tests.load_outcomes(options.out) == outcomes


def test_an_outcome_has_the_last_error_of_a_test(tmp_path: Path) -> None:
    class Case(unittest.TestCase):
        def test_wrong(self) -> None:
            raise RuntimeError("Process 0 failed:\nValueError: 1 is no group\nmore")

        def test_right(self) -> None:
            print("printed")

        def test_left_out(self) -> None:
            self.skipTest("needs GPUs")

    wrong = torch_tests.run_test(Case, "test_wrong", tmp_path / "wrong.log", 2)
    assert (wrong.outcome, wrong.reason, wrong.tries) == (FAILED, "ValueError: 1 is no group", 2)
    assert torch_tests.run_test(Case, "test_right", tmp_path / "right.log", 1).outcome == PASSED
    left_out = torch_tests.run_test(Case, "test_left_out", tmp_path / "left_out.log", 1)
    assert (left_out.outcome, left_out.reason) == (SKIPPED, "needs GPUs")
