"""How exactly a TTL is kept, in virtual time: how long a supervisor waits, and that nothing is waited for then."""

from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.jobs.records import new_job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import JobState
from ringweave.platforms import api
from ringweave.platforms.local import supervisor
from ringweave.platforms.local.job_folder import REGISTRY, job_folder
from ringweave.platforms.local.platform import LocalPlatform
from ringweave.platforms.local.registry import LocalJobRegistry, LocalRegistryEntry
from ringweave.platforms.local.supervisor import TTL_POLL_S, JobSupervisor
from ringweave.platforms.submission import JobOrigin

TTL_S = 100.0


def test_how_it_ended_is_told_if_it_is_forgotten_while_somebody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ensure_supervisor", lambda state, job_id, environ: None)
    (tmp_path / "s.py").touch()
    nodes = (NodeRequest(name="n0", capacity=3),)
    service = LocalPlatform(tmp_path, requester="ann", environ={})
    service.submit(
        JobRequest(name="job", num_workers=3, script="s.py", nodes=nodes, device="cpu", ttl_s=0.0), base=tmp_path
    )
    registry, find = service._registry, service._registry.find_by_name
    entry = find("job")
    assert entry is not None
    folder = job_folder(tmp_path, entry.id).root
    folder.mkdir(parents=True)
    service.job("job")

    def find_and_forget(name: str) -> LocalRegistryEntry | None:
        found = find(name)
        if found is not None:
            api.write_tombstone(folder, replace(found.job.record, state=JobState.SUCCEEDED, outcome=JobState.SUCCEEDED))
            registry.delete(found.id)
        return found

    monkeypatch.setattr(registry, "find_by_name", find_and_forget)
    assert [service.job("job").state for _ in range(2)] == [JobState.PENDING, JobState.SUCCEEDED]


@pytest.mark.parametrize("before_s", [TTL_S, 40.0, 7.25, 0.001])
def test_a_supervisor_wakes_at_the_end_of_a_ttl_and_removes_the_job_then(tmp_path: Path, before_s: float) -> None:
    now = [1000.0 + TTL_S - before_s]
    nodes = (NodeRequest(name="n0", capacity=3),)
    request = JobRequest(name="job", num_workers=3, script="s.py", nodes=nodes, device="cpu", ttl_s=TTL_S)
    job = new_job(request, requester="ann", counts=(3,), now=900.0)
    record = replace(job.record, state=JobState.SUCCEEDED, outcome=JobState.SUCCEEDED, ended_s=1000.0)
    registry = LocalJobRegistry(tmp_path / REGISTRY)
    origin = JobOrigin(directory=str(tmp_path), script_text="", environ={})
    job = replace(job, record=record)
    registry.insert(LocalRegistryEntry(id="job-1", job=job, origin=origin), lambda _: job)
    job_folder(tmp_path, "job-1").root.mkdir(parents=True)
    leads = JobSupervisor(tmp_path, "job-1", clock=lambda: now[0])
    place = leads._runtime(registry.find_by_id("job-1"))
    while (wait_s := leads.step(place)) == 0.0:
        pass
    assert wait_s == pytest.approx(min(TTL_POLL_S, before_s)), "not a moment longer than it is kept"
    now[0] = 1000.0 + TTL_S
    while leads.step(place) is not None:
        assert now[0] == 1000.0 + TTL_S, "nothing of its removal waits"
    assert registry.find_by_id("job-1") is None
    assert not list((tmp_path / "jobs").iterdir())
