"""Faults as text, and at random from a seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.benchmarks.chaos import faults
from ringweave.benchmarks.chaos.faults import Fault, Targets
from ringweave.errors import UsageError

TARGETS = Targets(num_workers=4, nodes=["a0", "b0"], link_rates={"a0->r0": 5e7, "r0->a0": 5e7})
SCRIPT = """\
at 12.5s kill worker 3
at 20s pause worker 2 for 30s
at 40s cut a0 for 30s
at 41s cut b0 in for 2.5s
at 60s slow a0->r0 to 50Mbit/s for 20s
at 80s fill disk for 10s
"""
SECONDS = st.integers(0, 10**6).map(lambda hundredths: hundredths / 100)


@st.composite
def drawn_faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(faults.KINDS))
    target = {"kill": "3", "pause": "0", "cut": "a0", "slow": "a0->r0", "fill": "disk"}[kind]
    return Fault(
        at_s=draw(st.sampled_from([0.0, 0.01, 12.5, 100.0, 3600.25])),
        kind=kind,
        target=target,
        lasts_s=0.0 if kind == "kill" else draw(st.sampled_from([0.5, 1.0, 30.0])),
        way=draw(st.sampled_from(["in", "out", "both"])) if kind == "cut" else "both",
        rate_bytes_per_s=draw(st.sampled_from([1e3, 6.25e6, 1.25e9])) if kind == "slow" else 0.0,
    )


def test_a_script_prints_as_it_was_written() -> None:
    found = faults.parse(SCRIPT, TARGETS)
    assert faults.to_text(found) == SCRIPT
    assert [fault.kind for fault in found] == ["kill", "pause", "cut", "cut", "slow", "fill"]
    assert found[4].rate_bytes_per_s == 6.25e6


@given(drawn_faults())
def test_any_fault_prints_and_parses(fault: Fault) -> None:
    assert faults.parse(str(fault), TARGETS) == (fault,)


def test_lines_are_sorted_and_remarks_left_out() -> None:
    found = faults.parse("# begin\n\nat 9s kill worker 1 # later\nat 3s kill worker 0\n")
    assert [fault.at_s for fault in found] == [3.0, 9.0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("kill worker 3", r"fault: 'kill worker 3', expected a line like \"at 20s pause worker 2 for 30s\"\. See docs"),
        ("at 3s kil worker 3", r"fault: 'at 3s kil worker 3', expected .*\. Did you mean \"kill\"\? \[line 1\]"),
        ("at 3s kill worker 3 for 4s", r"fault: .*See docs/chaos\.md\. \[line 1\]"),
        ("at 3s pause worker 3", r"fault: .*\[line 1\]"),
        ("at 3s pause 3 for 4s", r"fault: .*\[line 1\]"),
        ("at 3s cut a0 in to 3Mbit/s for 4s", r"fault: .*\[line 1\]"),
        ("at 3s fill root for 4s", r"fault: .*\[line 1\]"),
        ("at 3s slow a0->r0 to 3 for 4s", r"rate: '3', expected"),
        (
            "at 3s kill worker 4",
            r"worker of a fault: '4', expected one of 0, 1, 2, 3\. Name one of the cluster\. \[lin",
        ),
        ("at 3s cut a1 for 4s", r"node of a fault: 'a1', expected one of a0, b0\. .*\[line 1\]"),
        ("at 3s slow a0->r1 to 3Mbit/s for 4s", r"link of a fault: 'a0->r1', expected .* Did you mean \"a0->r0\"\?"),
    ],
)
def test_what_is_no_fault_is_refused_with_its_line(line: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        faults.parse(line, TARGETS)


def test_the_same_seed_draws_the_same_and_another_one_others() -> None:
    def draw(seed: int) -> str:
        times = {"every_s": 15.0, "until_s": 600.0, "lasts_s": 10.0, "calm_s": 20.0}
        return faults.to_text(faults.draw(faults.KINDS, TARGETS, seed=seed, **times))

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    found = faults.parse(draw(7), TARGETS)
    assert {fault.kind for fault in found} == set(faults.KINDS)
    assert found[0].at_s == 20.0
    assert found[-1].at_s <= 600.0
    assert 20 <= len(found) <= 70, "about one every 15 s"


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(UsageError, match=r"kind of fault: 'kil', expected kill, pause, .*\. Did you mean \"kill\"\?"):
        faults.draw(["kil"], TARGETS, seed=0, every_s=1, until_s=2, lasts_s=1, calm_s=0)
