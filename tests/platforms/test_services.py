"""What users see of jobs, and where services are found."""

import importlib.metadata
import json
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringweave.errors import LaunchError, UsageError
from ringweave.jobs import records
from ringweave.jobs.records import AttemptEnd, EndCause, Job
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.platforms import api, metrics, registry
from ringweave.platforms.api import EventView


@pytest.fixture
def job() -> Job:
    nodes = tuple(NodeRequest(name=f"n{index}", capacity=4) for index in range(3))
    request = JobRequest(name="job", num_workers=7, script="s.py", nodes=nodes, ttl_s=5.0)
    made = records.new_job(request, requester="ann", counts=(4, 3, 0), now=10.0)
    ended = AttemptEnd(attempt=1, cause=EndCause.PLATFORM, charged=True, text="killed", exit_code=None)
    first = records.NodeRecord(attempt=2, history=(ended,), retries=1, iterations=12, last_loss=0.5)
    record = records.JobRecord(
        **{
            **{key: getattr(made.record, key) for key in made.record.__dataclass_fields__},
            "nodes": (first, *made.record.nodes[1:]),
        }
    )
    return Job(request=request, requester="ann", created_s=10.0, counts=(4, 3, 0), desired=made.desired, record=record)


def test_a_view_shows_all_attempts_and_reads_back(job: Job) -> None:
    seen = api.job_view(job, platform="here", events=[EventView(time_s=1.0, kind="Running", text="x")], files="/f")
    assert [(each.attempt, each.text, each.charged) for each in seen.nodes[0].attempts] == [
        (1, "killed", True),
        (2, "", False),
    ]
    assert [len(node.attempts) for node in seen.nodes] == [2, 1, 0]
    assert (seen.nodes[0].iterations, seen.nodes[0].last_loss, seen.ttl_s) == (12, 0.5, 5.0)
    assert [node.name for node in seen.used_nodes] == ["n0", "n1"]
    assert api.parse_job_view(json.loads(json.dumps(api.job_view_document(seen)))) == seen


def test_metrics_are_what_prometheus_reads(job: Job) -> None:
    text = metrics.metrics_text([api.job_view(job, platform="here")])
    samples = {
        (sample.name, sample.labels.get("node"), sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["ringweave_job_state", None, "Pending"] == 1
    assert samples["ringweave_job_state", None, "Running"] == 0
    assert samples["ringweave_job_workers", None, None] == 7
    assert samples["ringweave_node_iterations", "n0", None] == 12
    assert samples["ringweave_node_last_loss", "n0", None] == 0.5
    assert samples["ringweave_node_retries", "n0", None] == 1
    assert ("ringweave_node_iterations", "n1", None) not in samples
    assert ("ringweave_node_workers", "n2", None) not in samples


class Listing:
    """Lists jobs, slowly, and counts how often; it can fail."""

    def __init__(self, found: Sequence[api.JobView]) -> None:
        self.now_s, self.cost_s, self.num_lists = 100.0, 0.0, 0
        self.found: Sequence[api.JobView] | LaunchError = found

    def jobs(self) -> Sequence[api.JobView]:
        self.num_lists += 1
        self.now_s += self.cost_s
        if isinstance(self.found, LaunchError):
            raise self.found
        return self.found


def test_scrapes_of_a_second_share_a_list_and_those_of_a_costly_one_more(job: Job) -> None:
    listing = Listing([api.job_view(job, platform="here")])
    collector = metrics.JobsCollector(listing.jobs, lambda: listing.now_s)

    def scrape(after_s: float) -> int:
        listing.now_s += after_s
        assert {family.name for family in collector.collect()} >= {"ringweave_job_state", "ringweave_node_retries"}
        return listing.num_lists

    assert [scrape(0.001) for _ in range(999)][-1] == 1
    assert [scrape(0.01), scrape(1.01), scrape(0.5)] == [2, 3, 3]
    listing.cost_s = 4.0
    assert [scrape(1.0), scrape(35.9), scrape(0.2)] == [4, 4, 5], "a tenth of the time at most"


def test_an_error_is_shared_as_an_answer_is(job: Job) -> None:
    listing = Listing([api.job_view(job, platform="here")])
    collector = metrics.JobsCollector(listing.jobs, lambda: listing.now_s)
    listing.found = LaunchError("API server: no answer")
    for _ in range(100):
        with pytest.raises(LaunchError, match="no answer"):
            list(collector.collect())
    assert listing.num_lists == 1
    listing.found = []
    listing.now_s += 1.0
    assert all(not family.samples for family in collector.collect())


def test_scrapes_at_the_same_time_share_a_list(job: Job) -> None:
    listing, begun, go_on = Listing([api.job_view(job, platform="here")]), threading.Event(), threading.Event()

    def jobs() -> Sequence[api.JobView]:
        begun.set()
        assert go_on.wait(60)
        return listing.jobs()

    collector = metrics.JobsCollector(jobs, lambda: 0.0)
    with ThreadPoolExecutor(16) as threads:
        scrapes = [threads.submit(lambda: len(list(collector.collect()))) for _ in range(16)]
        assert begun.wait(60)
        go_on.set()
        assert {each.result(60) for each in scrapes} == {9}
    assert listing.num_lists == 1


class Entry:
    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [Entry("theirs", "builtins:dict"), Entry("broken", "nosuch.module:f"), Entry("empty", "builtins:nosuch")]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: entries if group == registry.ENTRY_POINT_GROUP else []
    )


@pytest.mark.usefixtures("installed")
def test_services_of_others_are_entry_points() -> None:
    assert registry.open_platform("theirs", {"A": "1"}) == {"A": "1"}


@pytest.mark.usefixtures("installed")
def test_a_service_that_is_not_there() -> None:
    names = "broken, empty, hosts, kubernetes, local, runs, slurm, theirs"
    with pytest.raises(UsageError, match=rf"service: 'slrum', expected one of {names}\. Did you mean \"slurm"):
        registry.open_platform("slrum", {})
    with pytest.raises(UsageError, match=r"Install a package with an entry point x in the group ringweave\.services\."):
        registry.open_platform("x", {})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["broken", "empty"])
def test_a_service_that_cannot_be_loaded(name: str) -> None:
    with pytest.raises(LaunchError, match=rf"service {name}: .*, expected a module that can be loaded\. Install"):
        registry.open_platform(name, {})


def test_ours_that_needs_an_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILT_IN_PLATFORMS, "kubernetes", "nosuch.module:f")
    with pytest.raises(LaunchError, match=r"Install it with pip install 'ringweave\[kubernetes\]', or choose"):
        registry.open_platform("kubernetes", {})


def test_what_logs_have_got_comes_in_pieces_however_much_it_is(tmp_path: Path) -> None:
    content = b"".join(b"step %d\n" % number for number in range(200_000)) + b"unfinished"
    log = tmp_path / "rank-0.log"
    log.write_bytes(content)
    positions: dict[str, str] = {}
    read = b""
    for most in (1_000_000, 100, len(content)):
        pieces = list(api.read_new_text([("n0/1/1/0", log)], positions, most))
        assert max(len(text) for _, _, text in pieces) < api.PIECE_BYTES + 100
        assert sum(len(text) for _, _, text in pieces) < most + 100
        positions["n0/1/1/0"] = pieces[-1][1]
        read += b"".join(text for _, _, text in pieces)
    assert read == content
    assert list(api.read_new_text([("n0/1/1/0", log)], positions)) == []
