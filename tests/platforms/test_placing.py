"""Commands in what places say can be typed as they stand."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ringweave.errors import JobError
from ringweave.jobs import admission, records, states
from ringweave.jobs.records import Job, JobEvent
from ringweave.jobs.request import JobRequest, NodeRequest
from ringweave.jobs.states import make_reason
from ringweave.platforms import api
from ringweave.platforms.api import EventView, JobView, LogLine, LogQuery, Platform, Submission
from ringweave.platforms.kubernetes import job_resource
from ringweave.platforms.registry import QualifiedPlatform, with_platform_option

REQUEST = JobRequest(name="text", num_workers=3, script="s.py", nodes=(NodeRequest(name="n0", capacity=3),))
HELPS = "ringweave resume text"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Look: ringweave logs text --node n0.", "Look: ringweave logs text --on slurm --node n0."),
        (
            "ringweave logs -f text, ringweave stop text",
            "ringweave logs -f text --on slurm, ringweave stop text --on slurm",
        ),
        ("ringweave delete text --on slurm", "ringweave delete text --on slurm"),
        ("ringweave delete text-2; ringweave split --gpus 3", "ringweave delete text-2; ringweave split --gpus 3"),
    ],
)
def test_the_place_stands_behind_the_job(text: str, shown: str) -> None:
    assert with_platform_option(text, "text", "slurm") == shown
    assert with_platform_option(text, "text", "local") == text


def test_an_address_is_a_place() -> None:
    assert with_platform_option("ringweave why a", "a", r"http://x:1/\1") == r"ringweave why a --on http://x:1/\1"


@pytest.mark.parametrize("code", states.REASON_TEMPLATES)
def test_no_reason_names_a_command_without_its_place(code: str) -> None:
    words = {"nodes": "node n0", "node": "n0", "detail": "it is so", "attempt": 1, "count": 10, "job": "text"}
    words["fix"] = "fix it"
    text = with_platform_option(str(make_reason(code, **words)), "text", "slurm")
    assert re.findall(r"ringweave \w+ (?:-f )?text(?! --on slurm)", text) == []


def job() -> Job:
    made = records.new_job(REQUEST, requester="ann", counts=(3,), now=0.0)
    why = make_reason("Suspended", job="text")
    node = replace(made.record.nodes[0], reason=make_reason("NodeSuspended", job="text"))
    return replace(made, record=replace(made.record, reason=why, nodes=(node,)))


class Told(Platform):
    """Of a place that is not this machine."""

    script_text: str | None = None

    def submit(
        self, request: JobRequest, *, base: Path, script_text: str | None = None, dry_run: bool = False
    ) -> Submission:
        self.script_text = script_text
        if base.name == "taken":
            raise JobError(f"remove it with ringweave delete {request.name}.")
        return Submission(job=self.job(request.name))

    def jobs(self) -> list[JobView]:
        return [self.job("text")]

    def job(self, name: str) -> JobView:
        if name != "text":
            raise JobError(f"no job; ringweave status {name} will not help.")
        return api.job_view(job(), platform="slurm", events=[EventView(time_s=1.0, kind="Suspended", text=HELPS)])

    def act(self, name: str, verb: str) -> JobView:
        if verb == "stop":
            raise JobError("ringweave delete text removes it.")
        return self.job(name)

    def logs(self, name: str, which: LogQuery) -> Iterator[LogLine]:
        yield LogLine(node="n0", attempt=1, round=1, rank=0, text="ringweave stop text")


def test_all_that_a_service_says() -> None:
    told = Told()
    service = QualifiedPlatform(told, "slurm")
    seen = [service.job("text"), *service.jobs(), service.act("text", "resume")]
    seen.append(service.submit(REQUEST, base=Path("free"), script_text="print()").job)
    assert told.script_text == "print()"
    for view in seen:
        assert view.reason is not None
        assert view.nodes[0].reason is not None
        assert [view.reason.hint, view.nodes[0].reason.hint, view.events[0].text] == [f"{HELPS} --on slurm"] * 3
    with pytest.raises(JobError, match=r"ringweave delete text --on slurm\.$"):
        service.submit(REQUEST, base=Path("taken"))
    with pytest.raises(JobError, match="ringweave delete text --on slurm removes it"):
        service.act("text", "stop")
    with pytest.raises(JobError, match="ringweave status other --on slurm will"):
        service.job("other")
    (line,) = service.logs("text", LogQuery())
    assert line.text == "ringweave stop text", "what workers print is theirs"


def test_the_status_of_a_training_job_names_the_place_and_its_record_does_not() -> None:
    events = [JobEvent(key="a", kind="Suspended", text=HELPS)]
    status = job_resource.status_from_job(job(), before={}, generation=1, events=events, now=0.0)
    wanted = f"{HELPS} --on kubernetes"
    assert [status["hint"], status["nodes"][0]["hint"], status["events"][0]["text"]] == [wanted] * 3
    assert all(wanted in item["message"] for item in status["conditions"] if item["type"] != "Admitted")
    assert records.RECORD_JSON.parse(status["record"]) == job().record


def test_all_verbs_are_known() -> None:
    for verb in admission.VERB_NAMES:
        assert with_platform_option(f"ringweave {verb} a", "a", "slurm").endswith("a --on slurm")
