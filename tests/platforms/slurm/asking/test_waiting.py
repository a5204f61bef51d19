"""Slurm's words for waiting, in ours."""

import pytest

from ringweave.platforms.slurm import allocation as slurm_allocation
from ringweave.platforms.slurm.commands import Allocation


def allocation(reason: str, start: str = "") -> Allocation:
    return Allocation(job_id=7, state="PENDING", reason=reason, restarts=0, hosts=(), start=start)


@pytest.mark.parametrize("word", slurm_allocation.PENDING_REASON_TEXTS)
def test_every_reason_names_slurms_word(word):
    text = slurm_allocation.pending_text(allocation(word))
    assert text.startswith(f"Slurm job 7 ({word}): ")
    assert "{" not in text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("ReqNodeNotAvail,_UnavailableNodes:small", "a requested machine is down"),
        ("JobHeldUser", "scontrol release 7 releases it"),
        ("QOSMaxSomethingNew", "a limit of the account or the quality of service is reached"),
        ("SomethingNew", "see the job reason codes"),
        ("", "Slurm has not considered it yet"),
    ],
)
def test_what_it_waits_for(reason, text):
    assert text in slurm_allocation.pending_text(allocation(reason))


def test_when_slurm_expects_to_start_it_is_told():
    text = slurm_allocation.pending_text(allocation("Priority", "2026-11-21T14:05:00"))
    assert text.endswith("expects to start it at 2026-11-21T14:05:00")
