"""An elastic job whose Pods are real processes: one is killed whole, the others train on, it alone is replaced."""

import json
from pathlib import Path

import pytest

from ringweave.jobs.request import ElasticRequest, JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from ringweave.membership import membership_records
from ringweave.platforms.api import LogQuery
from ringweave.platforms.kubernetes import objects
from tests.launcher import until_back
from tests.launcher.small_training import SUM, epoch, prepared
from tests.platforms.kubernetes.pods import SOON_S, Place, place

__all__ = ["place"]
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]


def submit(place: Place, folder: Path, name: str, *capacities: int, least: int) -> None:
    (folder / "train.py").write_text(until_back.SCRIPT)
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=each, max_retries=2) for index, each in enumerate(capacities))
    request = JobRequest(
        name=name,
        num_workers=sum(capacities),
        device="cpu",
        script="train.py",
        nodes=nodes,
        min_per_node=1,
        mode="sync",
        elastic=ElasticRequest(min=least),
    )
    place.service.submit(request, base=folder)


def said(place: Place, job: str, node: str, attempt: int, rank: int) -> list[dict]:
    """What a worker printed."""
    lines = place.service.logs(job, LogQuery(node=node, attempt=attempt, rank=rank))
    return [json.loads(line.text) for line in lines if line.text.startswith("{") and line.text.endswith("}")]


@pytest.mark.thorough
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_pod_comes_back_while_the_others_train_on(place: Place, tmp_path: Path, node: int) -> None:
    """Node 0 has the coordinator that decides and half of the members: it takes the Service to find it again."""
    job, other = f"elastic{node}", 1 - node
    submit(place, tmp_path, job, 2, 2, least=2)
    place.wait(lambda: len(said(place, job, f"n{other}", 1, 2 * other)) > 5)
    before = place.service.job(job)
    assert (before.state, before.reason) == (JobState.RUNNING, None)
    assert sorted(place.left_secrets(job)) == [
        objects.config_name(job),
        objects.credential_pool_name(job, 0),
        objects.credential_pool_name(job, 1),
    ]
    assert place.kubelet is not None
    place.kubelet.signal_pod(objects.pod_name(job, node, 1))
    place.wait(lambda: place.service.job(job).state is JobState.SUCCEEDED, 3 * SOON_S)

    seen = place.service.job(job)
    assert (seen.round, [each.retries for each in seen.nodes]) == (1, [int(node == 0), int(node == 1)])
    assert [len(each.attempts) for each in seen.nodes] == [1 + int(node == 0), 1 + int(node == 1)]
    assert "Degraded" in {event.kind for event in seen.events}
    check_steps(place, job, node)
    assert place.service.act(job, "delete").name == job
    place.wait(lambda: place.service.jobs() == [])
    assert place.left_secrets(job) == []


def check_steps(place: Place, job: str, node: int) -> None:
    """No step was lost: those who stayed did each once, some of them alone, and all end with the same parameters."""
    other = 1 - node
    words = said(place, job, f"n{other}", 1, 2 * other)
    steps = [each["step"] for each in words if "step" in each]
    assert steps == list(range(1, len(steps) + 1))
    sizes = [len(each["members"]) for each in words if "step" in each]
    assert sizes[0] == sizes[-1] == 4
    assert 2 in sizes, "the others went on alone"
    epochs = [each for each in words if "epoch" in each]
    assert all(each["trained"] + each["lost"] == 96 for each in epochs), "every sample is accounted for"
    whose = [(f"n{other}", 1, 2 * other), (f"n{other}", 1, 2 * other + 1), (f"n{node}", 2, 2 * node)]
    whose.append((f"n{node}", 2, 2 * node + 1))
    ends = {who: [each["sum"] for each in said(place, job, *who) if "sum" in each] for who in whose}
    late = [who for who, sums in ends.items() if not sums]
    for name, attempt, rank in late:  # who is not level yet when the others have finished hears so, and that is well
        lines = [line.text for line in place.service.logs(job, LogQuery(node=name, attempt=attempt, rank=rank))]
        assert name == f"n{node}"
        assert any(membership_records.REASON_ALL_DONE in line for line in lines), (name, rank, lines[-5:])
    assert len({each for sums in ends.values() for each in sums}) == 1, ends


RINGS_SCRIPT = f"""{prepared(num_samples=96, batch=24, lr=0.1, shuffles=True)}
here = pathlib.Path({{folder!r}})
for epoch in loader.epochs(3):
{epoch(indent=4)}
    if epoch == 0:
        (here / ("waits-" + os.environ["RANK"])).touch()
        while not (here / "killed").exists():
            time.sleep(0.05)
{SUM}"""


@pytest.mark.thorough
def test_the_pod_of_the_leading_server_is_killed_and_the_standby_takes_over(place: Place, tmp_path: Path) -> None:
    """The first Pod has the leading server and the coordinator that decides."""
    (tmp_path / "train.py").write_text(RINGS_SCRIPT.format(folder=str(tmp_path)))
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=1, max_retries=2) for index in range(3))
    request = JobRequest(
        name="rings",
        num_workers=3,
        device="cpu",
        script="train.py",
        nodes=nodes,
        min_per_node=1,
        mode="ps-hra",
        elastic=ElasticRequest(min=1),
        standby=True,
    )
    place.service.submit(request, base=tmp_path)

    def leads() -> dict:
        found = place.leadership("rings")
        return found["record"] if found and found["round"] == 1 else {}

    place.wait(lambda: len(leads().get("members", ())) == 2, SOON_S)
    assert (leads()["leader"], leads()["term"]) == (0, 0)
    place.wait(lambda: all((tmp_path / f"waits-{rank}").exists() for rank in range(3)), SOON_S)
    assert place.kubelet is not None
    place.kubelet.signal_pod(objects.pod_name("rings", 0, 1))
    place.wait(lambda: leads()["leader"] == 1, SOON_S)
    (tmp_path / "killed").touch()
    place.wait(lambda: place.service.job("rings").state is JobState.SUCCEEDED, 3 * SOON_S)
    seen = place.service.job("rings")
    assert (seen.round, [each.retries for each in seen.nodes]) == (1, [1, 0, 0])
    lines = [line.text for node in (1, 2) for line in place.service.logs("rings", LogQuery(node=f"n{node}", rank=node))]
    sums = {line.split()[-1] for line in lines if line.startswith("sum ")}
    assert len(sums) == 1
    assert place.service.act("rings", "delete").name == "rings"
    place.wait(lambda: place.service.jobs() == [])
