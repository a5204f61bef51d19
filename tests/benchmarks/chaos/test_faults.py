"""Faults as text, and at random from a seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import UsageError
from ringweave_bench.chaos import fault_script
from ringweave_bench.chaos.fault_script import Fault, FaultTargets

TARGETS = FaultTargets(num_workers=4, nodes=["a0", "b0"], link_rates={"a0->r0": 5e7, "r0->a0": 5e7})
SCRIPT = """\
at 12.5s kill worker 3
at 20s pause worker 2 for 30s
at 40s cut a0 for 30s
at 41s cut b0 in for 2.5s
at 60s slow a0->r0 to 50Mbit/s for 20s
at 80s fill disk for 10s
at 81s kill coordinator
at 82s pause standby for 3s
at 82.5s kill server
at 82.75s pause server-standby for 3s
at 83s kill worker 1 during bucket 2
at 84s kill worker 1 during committed
at 85s clock b0 by -3600s for 20s
"""
SECONDS = st.integers(0, 10**6).map(lambda hundredths: hundredths / 100)


@st.composite
def drawn_faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(fault_script.KINDS))
    targets = {"kill": "3", "pause": "0", "cut": "a0", "slow": "a0->r0", "clock": "b0", "fill": "disk"}
    is_service = kind in ("kill", "pause") and draw(st.booleans())
    target = draw(st.sampled_from(fault_script.SERVICES)) if is_service else targets[kind]
    moments = ["", "forward", "bucket 0", "bucket 12", "commit", "committed", "optimizer"]
    return Fault(
        at_s=draw(st.sampled_from([0.0, 0.01, 12.5, 100.0, 3600.25, 86400.25, 12345678.9, 1e-7])),
        kind=kind,
        target=target,
        lasts_s=0.0 if kind == "kill" else draw(st.sampled_from([0.5, 1.0, 30.0, 1e6])),
        direction=draw(st.sampled_from(["in", "out", "both"])) if kind == "cut" else "both",
        rate_bytes_per_s=draw(st.sampled_from([1e3, 6.25e6, 1.25e9])) if kind == "slow" else 0.0,
        moment=draw(st.sampled_from(moments)) if kind == "kill" and not is_service else "",
        shift_s=draw(st.sampled_from([-3600.0, 0.5, 86400.0])) if kind == "clock" else 0.0,
    )


def test_a_script_prints_as_it_was_written() -> None:
    found = fault_script.parse_faults(SCRIPT, TARGETS)
    assert fault_script.faults_text(found) == SCRIPT
    kinds = [fault.kind for fault in found]
    services = ["kill", "pause", "kill", "pause"]
    assert kinds == ["kill", "pause", "cut", "cut", "slow", "fill", *services, "kill", "kill", "clock"]
    assert [fault.target for fault in found if fault.hits_service] == list(fault_script.SERVICES)
    assert [fault.moment for fault in found if fault.moment] == ["bucket 2", "committed"]
    assert found[-1].shift_s == -3600.0
    assert found[4].rate_bytes_per_s == 6.25e6


@given(drawn_faults())
def test_any_fault_prints_and_parses(fault: Fault) -> None:
    assert fault_script.parse_faults(str(fault), TARGETS) == (fault,)


def test_lines_are_sorted_and_remarks_left_out() -> None:
    found = fault_script.parse_faults("# begin\n\nat 9s kill worker 1 # later\nat 3s kill worker 0\n")
    assert [fault.at_s for fault in found] == [3.0, 9.0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("kill worker 3", r"fault: 'kill worker 3', expected a line like \"at 20s pause worker 2 for 30s\"\. See docs"),
        ("at 3s kil worker 3", r"fault: 'at 3s kil worker 3', expected .*\. Did you mean \"kill\"\? \[line 1\]"),
        ("at 3s kill worker 3 for 4s", r"fault: .*See docs/how-to/inject-faults\.md\. \[line 1\]"),
        ("at 3s pause worker 3", r"fault: .*\[line 1\]"),
        ("at 3s pause 3 for 4s", r"fault: .*\[line 1\]"),
        ("at 3s cut a0 in to 3Mbit/s for 4s", r"fault: .*\[line 1\]"),
        ("at 3s fill root for 4s", r"fault: .*\[line 1\]"),
        ("at 3s kill worker coordinator", r"fault: .*\[line 1\]"),
        ("at 3s kill serve", r"fault: .*\[line 1\]"),
        ("at 3s kill server during commit", r"fault: .*\[line 1\]"),
        ("at 3s kill coordinator during commit", r"fault: .*See docs/how-to/inject-faults\.md\. \[line 1\]"),
        ("at 3s kill worker 1 during bucket", r"fault: .*\[line 1\]"),
        ("at 3s kill worker 1 during lunch", r"fault: .*\[line 1\]"),
        ("at 3s pause worker 1 during commit for 3s", r"fault: .*\[line 1\]"),
        ("at 3s clock a0 for 3s", r"fault: .*\[line 1\]"),
        ("at 3s clock a9 by 3s for 3s", r"node of a fault: 'a9', expected one of a0, b0\. .*\[line 1\]"),
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
        fault_script.parse_faults(line, TARGETS)
