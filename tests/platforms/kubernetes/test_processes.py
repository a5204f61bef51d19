"""A job whose Pods are real processes: operator, desk, agents and workers, asked for as the commands do."""

from pathlib import Path

import pytest

from ringweave.errors import JobError
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from ringweave.platforms.api import LogLine, LogQuery
from ringweave.platforms.kubernetes import api_client
from tests.launcher.small_training import PREPARED
from tests.platforms.kubernetes.pods import SOON_S, Place, place

SCRIPT = """
import os, pathlib, time
flag = pathlib.Path(os.environ["FLAG"])
steps = pathlib.Path(os.environ["RINGWEAVE_CLAIM"], "steps-of-rank-" + os.environ["RANK"])
print("after step", steps.read_text() if steps.exists() else 0, end=": ")
steps.write_text(str(int(steps.read_text() if steps.exists() else 0) + 1))
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "meets at", os.environ["MASTER_ADDR"], flush=True)
while not flag.exists():
    time.sleep(0.05)
"""
__all__ = ["place"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def key(line: LogLine) -> tuple[str, int, int, int | None]:
    return line.node, line.attempt, line.round, line.rank


def test_a_job_of_real_processes(place: Place, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "train.py").write_text(SCRIPT)
    nodes = (NodeRequest(name="n0", capacity=3), NodeRequest(name="n1", capacity=3))
    request = JobRequest(
        name="real",
        num_workers=4,
        device="cpu",
        script="train.py",
        nodes=nodes,
        min_per_node=1,
        environment={"FLAG": str(flag)},
        claim="checkpoints",
    )
    service = place.service
    submission = service.submit(request, base=tmp_path)
    assert submission.job.requester == "admin"
    assert "kind: TrainingJob" in submission.objects[0].text
    with pytest.raises(JobError, match=r"job name real: 'taken by admin .* ago \(\w+\)', expected a free name"):
        service.submit(request, base=tmp_path)

    place.wait(lambda: service.job("real").state is JobState.RUNNING)
    place.wait(lambda: len(list(service.logs("real", LogQuery()))) == 4)
    assert place.kubelet is not None
    # It is made again, with another token, before the next Pod: the agent that runs on shows that one from then on.
    place.remove(api_client.SECRETS, "real-config")
    place.kubelet.signal_pod("real-1-1")
    place.wait(lambda: service.job("real").nodes[1].retries == 1)
    place.wait(lambda: service.job("real").state is JobState.RUNNING)
    place.wait(lambda: len(list(service.logs("real", LogQuery(node="n0")))) == 6)
    place.wait(lambda: len(list(service.logs("real", LogQuery(node="n1")))) == 2)  # who still connects would fail, too
    place.remove(api_client.PODS, "real-0-1")
    place.wait(lambda: service.job("real").nodes[0].retries == 1)
    place.wait(lambda: len(list(service.logs("real", LogQuery(node="n0", attempt=1)))) == 6)
    flag.touch()
    place.wait(lambda: service.job("real").state is JobState.SUCCEEDED)
    seen = service.job("real")
    assert [len(node.attempts) for node in seen.nodes] == [2, 2]
    assert {"Starting", "Running", "Retrying", "Succeeded"} <= {event.kind for event in seen.events}

    # The Pods are gone by now; what they printed is not, also of the one that somebody else removed.
    first = [("n0", 1, 1, 0), ("n0", 1, 1, 1), ("n0", 1, 1, 2), ("n1", 1, 1, 3)]
    second = [("n0", 1, 2, 0), ("n0", 1, 2, 1), ("n0", 1, 2, 2), ("n1", 2, 2, 3)]
    third = [("n0", 2, 3, 0), ("n0", 2, 3, 1), ("n0", 2, 3, 2), ("n1", 2, 3, 3)]
    wanted = {*first, *second, *third}
    lines = list(service.logs("real", LogQuery()))
    assert {key(line) for line in lines} >= wanted
    assert all(f"rank {line.rank} of 4 meets at 127.0.0." in line.text for line in lines)
    assert all(f"after step {line.round - 1}:" in line.text for line in lines), "the claim outlives every Pod"
    assert {line.attempt for line in service.logs("real", LogQuery(node="n1", rank=3))} == {1, 2}

    assert service.act("real", "delete").name == "real"
    place.wait(lambda: service.jobs() == [])


TRAINS = PREPARED
TRAINS += """
for a, b in loader:
    optimizer.zero_grad()
    (model(a) - b).square().mean().backward()
    optimizer.step()
print(f"sum {sum(p.sum().item() for p in model.parameters()):.6f} by {os.environ['RINGWEAVE_SERVER']}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.thorough  # daily on Slurm and on hosts
def test_a_job_with_a_parameter_server(place: Place, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    nodes = (NodeRequest(name="n0", capacity=1), NodeRequest(name="n1", capacity=1))
    request = JobRequest(
        name="served", num_workers=2, device="cpu", script="train.py", nodes=nodes, min_per_node=1, mode="ps-hra"
    )
    place.service.submit(request, base=tmp_path)
    place.wait(lambda: place.service.job("served").state is JobState.SUCCEEDED, 2 * SOON_S)
    lines = [line.text for line in place.service.logs("served", LogQuery()) if line.text.startswith("sum")]
    assert len(lines) == 2
    assert len(set(lines)) == 1, "all rings have the same parameters at the end, and met at the same server"
    assert [node.retries for node in place.service.job("served").nodes] == [0, 0]
    assert place.service.act("served", "delete").name == "served"
    place.wait(lambda: place.service.jobs() == [])
    assert place.left_secrets("served") == []
