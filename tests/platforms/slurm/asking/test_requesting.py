"""The split as components, in an order in which Slurm cannot paint itself into a corner; the batch script."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringweave.errors import JobError
from ringweave.jobs import records
from ringweave.platforms.slurm import batch_script
from ringweave.platforms.slurm.batch_script import AllocationComponent
from ringweave.platforms.slurm.commands import SlurmHost
from tests.platforms.slurm.fakes import a_request

GOLDEN = Path(__file__).parent / "golden"


def a_job(**changes: str):
    request = a_request(**changes)
    counts = request.split.counts
    assert counts is not None
    return records.new_job(request, requester="ann", counts=counts, now=0.0)


def hosts(**gpus: int) -> list[SlurmHost]:
    return [SlurmHost(name=name, gpus=count, cpus=2 * count, state="idle") for name, count in gpus.items()]


def test_the_largest_comes_first():
    job = a_job(gpus="11", nodes="[{capacity: 5}, {capacity: 8}]")
    parts = batch_script.allocation_components(job, {"x", "y"})
    assert [(part.node, part.workers, part.host) for part in parts] == [(1, 6, None), (0, 5, None)]


def test_a_name_of_a_machine_means_that_machine_and_is_kept_from_the_others():
    job = a_job(nodes="[{capacity: 10}, {name: small, capacity: 5}]")
    parts = batch_script.allocation_components(job, {"big", "small"})
    text = batch_script.render_batch_script(job, "text-1", parts, Path("/jobs/text"), ["controller"])
    assert "--nodelist=small" in text
    assert "--exclude=small" in text


def test_one_node_is_no_heterogeneous_job():
    job = a_job(gpus="7")
    parts = batch_script.allocation_components(job, ())
    assert "hetjob" not in batch_script.render_batch_script(job, "text-1", parts, Path("/jobs/text"), ["controller"])
    assert "--het-group=0" not in batch_script.srun_command(0, 1, "rw-0-1", ["agent"])
    assert batch_script.srun_command(1, 2, "rw-1-1", ["agent"])[:2] == ["srun", "--het-group=1"]


@pytest.mark.parametrize("device", ["gpus", "cpu_workers"])
def test_the_batch_script(device, check_golden):
    request = {"gpus": "15"} if device == "gpus" else {"gpus": "", "cpu_workers": "15"}
    job = a_job(**request)
    text = batch_script.render_batch_script(
        job,
        "text-1a2b",
        batch_script.allocation_components(job, ()),
        Path("/home/ann/100% mine/text"),
        ["python", "-m", "controller", "a b"],
    )
    check_golden(GOLDEN / f"{device}.sh", text)


@pytest.mark.parametrize(
    ("changes", "there", "text"),
    [
        ({"gpus": "20", "nodes": "[{capacity: 20}]"}, {"a": 10, "b": 5}, "GPUs of a 10, b 5. Ask for 15. [slurm]"),
        ({"gpus": "15"}, {"a": 10}, "'10+5', expected at most the capacity of the machines: GPUs of a 10. Ask for 10."),
        ({"gpus": "15"}, {}, "there is none. Ask the administrator of the cluster."),
        ({"gpus": "15"}, {"a": 8, "b": 8}, "Correct the capacities of the nodes: 15 can be shared as 15 on (8, 8)"),
        ({"nodes": "[{name: aa, capacity: 15}]"}, {"ab": 15}, "node: 'aa', expected a machine of Slurm: GPUs of ab 15"),
    ],
)
def test_what_no_machine_can_give_is_refused(changes, there, text):
    with pytest.raises(JobError) as caught:
        batch_script.check_feasible(a_job(**changes), hosts(**there))
    assert text in str(caught.value)


def test_more_nodes_than_slurm_takes_components():
    job = a_job(gpus="390", nodes="[{capacity: 3, count: 130}]")
    with pytest.raises(JobError, match="nodes: 130, expected at most 128 on Slurm"):
        batch_script.check_feasible(job, hosts(**{f"x{index}": 3 for index in range(130)}))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_first_fit_finds_machines_whenever_there_are_any(counts, rooms):
    """Slurm gives each component the first machine with room; in our order that never ends in a corner."""
    parts = [AllocationComponent(node=node, workers=count, host=None) for node, count in enumerate(counts)]
    parts.sort(key=lambda part: -part.workers)
    room = {f"h{index}": count for index, count in enumerate(rooms)}
    possible = any(
        all(count <= space for count, space in zip(counts, chosen, strict=False))
        for chosen in itertools.permutations(rooms, len(counts))
    )
    assert batch_script._fits_hosts(parts, room) == possible
    free = list(rooms)
    for part in parts:
        first = next((space for space in free if space >= part.workers), None)
        if first is None:
            assert not possible
            return
        free.remove(first)
    assert possible
