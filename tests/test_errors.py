import re
import sqlite3

import pytest

from ringweave import errors


def test_a_text_says_what_value_allowed_mend_and_place():
    text = errors.explain(
        "nic rate of node a0",
        got="0bit/s",
        expected="a positive rate",
        do="Remove the link",
        where="c.yaml:4: nodes.0.nic",
    )
    assert text == "nic rate of node a0: '0bit/s', expected a positive rate. Remove the link. [c.yaml:4: nodes.0.nic]"


def test_a_text_without_a_place_has_no_brackets():
    assert (
        errors.explain("count", got=0, expected="at least 1", do="Raise it")
        == "count: 0, expected at least 1. Raise it."
    )


def test_a_question_keeps_its_mark():
    text = errors.explain("key", got="uplnk", expected="uplink", do='Did you mean "uplink"?')
    assert text.endswith('Did you mean "uplink"?')


@pytest.mark.parametrize(
    "got",
    ["x" * 10_000, ["y" * 10_000] * 100, {str(index): index for index in range(1000)}, 10**10_000, "a\nb\x1b[31m"],
    ids=["long text", "long list", "large map", "huge number", "control characters"],
)
def test_whatever_the_value_the_text_stays_short_and_on_one_line(got):
    text = errors.explain("value", got=got, expected="less", do="Shorten it")
    assert len(text) < 600
    assert text.isprintable()


def test_an_object_with_a_long_repr_is_shortened_to_one_line():
    class Verbose:
        def __repr__(self) -> str:
            return "line\n" * 1000

    assert len(errors.shorten(Verbose())) <= 80
    assert "\n" not in errors.shorten(Verbose())


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (errors.UsageError, 2),
        (errors.ClusterError, 2),
        (errors.JobError, 2),
        (errors.PlacementError, 1),
        (errors.ScheduleError, 1),
        (errors.LaunchError, 1),
        (errors.PeerError, 1),
        (errors.DisagreementError, 1),
        (errors.RefusedError, 1),
        (errors.MessageError, 1),
        (errors.ConnectionLostError, 1),
        (errors.DeadlineError, 1),
        (errors.RemoteError, 1),
    ],
)
def test_every_error_belongs_to_the_tree_and_carries_an_exit_code(error, exit_code):
    assert issubclass(error, errors.RingweaveError)
    assert error.exit_code == exit_code


def test_a_communication_error_is_also_the_runtime_error_that_torch_users_catch():
    assert issubclass(errors.PeerError, RuntimeError)


def test_what_a_terminal_would_act_on_is_shown_escaped():
    text = "loss\x1b[31m 2.1\r\n\u202egood\x07\t\u2066"
    assert errors.printable(text) == r"loss\x1b[31m 2.1\r\n\u202egood\x07\t\u2066"
    assert errors.printable("a\tb\nc", keeps="\t\n") == "a\tb\nc"
    assert errors.printable("größer 漢字") == "größer 漢字"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(28, "No space left on device", "/a\x1bb"),
            r"use of /a\\x1bb: 'No space left on device', expected no error\. Free",
        ),
        (OSError(24, "Too many open files"), r"operation of this machine: 'Too many open files', .* \(ulimit -n\)\."),
        (MemoryError(), "'no memory left'"),
        (RuntimeError("can't start new thread"), r"can't start new thread\", expected no error.*\(ulimit -a\)\."),
        (sqlite3.OperationalError("disk I/O error"), "'disk I/O error'"),
        (ExceptionGroup("two", [OSError(5, "Input/output error"), MemoryError()]), "'Input/output error'"),
        (errors.JobError("job: gone."), "^job: gone\\.$"),
    ],
)
def test_what_a_machine_refuses_is_an_error_of_one_line(error, text):
    found = errors.from_system(error)
    assert re.search(text, str(found))
    assert len(str(found).splitlines()) == 1


@pytest.mark.parametrize(
    "bug", [ValueError("x"), RuntimeError("x"), KeyError("x"), ExceptionGroup("two", [OSError(5, "x"), KeyError("x")])]
)
def test_a_bug_stays_a_bug(bug):
    assert errors.from_system(bug) is None
