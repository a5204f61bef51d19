"""Requests for another number of workers, without any workers."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ringweave import telemetry
from ringweave.errors import LaunchError, UsageError
from ringweave.launcher import run_dir as launcher_run_dir
from ringweave.launcher import scale_requests
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.scale_requests import NodeRequests, ScaleAnswer, ScaleLimits, ScaleRequests, WantedWorkers
from ringweave.membership.settings import MemberBounds

LIMITS = ScaleLimits(
    bounds=MemberBounds(min_members=2, max_members=6), num_slots=4, reason="the number of devices in its cluster file"
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    """Of an elastic run that is under way."""
    found = RunDir(root=tmp_path)
    found.run_json.write_text(json.dumps({"format": 2, "elastic": "2:6"}))
    with launcher_run_dir.hold_run_dir(found):
        yield found


def answering(desk: ScaleRequests, answer: Callable[[int], object]) -> Callable[[float], None]:
    """Sleeps as long as the run needs for its next look."""

    def look(seconds: float) -> None:
        del seconds
        workers = desk.take_request()
        if workers is not None:
            answer(workers)

    return look


def test_a_request_is_taken_once_and_answered(run_dir: RunDir) -> None:
    said: list[str] = []
    desk, taken = ScaleRequests(run_dir, LIMITS, 2, said.append), list[int]()

    def grant(workers: int) -> None:
        taken.append(workers)
        assert not desk.refuse_request(workers, "")
        desk.grant_request(workers, starting=[2, 3], leaving=[])

    found = scale_requests.request_workers(run_dir, 4, sleep=answering(desk, grant))
    assert found == ScaleAnswer(workers=4, before=2, starting=[2, 3], leaving=[])
    assert (taken, desk.workers, desk.take_request()) == ([4], 4, None)
    assert said == ["4 workers requested, 2 before; started: rank 2, 3"]
    assert not run_dir.scale_request.exists()


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (7, r"--workers: 7, expected 2 to 4 \(the number of devices in its cluster file\)\. Ask for a number"),
        (5, r"--workers: 5, expected 2 to 4 \(the number of devices in its cluster file\)\."),
        (1, r"--workers: 1, expected 2 to 4 \(--elastic 2:6\)\."),
        (-3, r"--workers: -3, expected 2 to 4"),
        (3, r"^not now$"),
    ],
)
def test_what_cannot_be_is_refused_by_the_run(run_dir: RunDir, workers: int, text: str) -> None:
    desk = ScaleRequests(run_dir, LIMITS, 2)
    with pytest.raises(UsageError, match=text):
        scale_requests.request_workers(
            run_dir, workers, sleep=answering(desk, lambda asked: desk.refuse_request(asked, "not now"))
        )
    assert desk.workers == 2


def test_a_run_that_is_stopped_does_not_answer_and_forgets_the_request(run_dir: RunDir) -> None:
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    with pytest.raises(
        LaunchError, match=r"run: 'no answer within 30 s', expected one\. Check whether its ringweave run"
    ):
        scale_requests.request_workers(run_dir, 4, clock=lambda: now_s[0], sleep=sleep)
    assert not run_dir.scale_request.exists()


_RUBBISH = [
    b"",
    b"{",
    b"[]",
    b'{"request_id": "a"}',
    b'{"request_id": 1, "workers": 3}',
    b'{"workers": 3}',
    b"\xff\xfe",
    b"[" * 4000,
]


@pytest.mark.parametrize("text", [*_RUBBISH, b'{"request_id": "a", "workers": 3' + b" " * 5000 + b"}"], ids=range(9))
def test_what_is_no_request_is_thrown_away(run_dir: RunDir, text: bytes) -> None:
    desk = ScaleRequests(run_dir, LIMITS, 2)
    run_dir.scale_request.write_bytes(text)
    assert desk.take_request() is None
    assert not run_dir.scale_request.exists()
    run_dir.scale_request.write_text(json.dumps({"request_id": "a", "workers": True}))
    assert desk.take_request() is None


def test_what_was_asked_of_an_earlier_run_is_forgotten(run_dir: RunDir) -> None:
    run_dir.scale_request.write_text(json.dumps({"request_id": "a", "workers": 3}))
    assert ScaleRequests(run_dir, LIMITS, 2).take_request() is None
    assert list(telemetry.read_events(run_dir.events)) == []


def test_runs_that_cannot_be_asked(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path / "run")
    with pytest.raises(UsageError, match=r"run directory: .*, expected one with a run\.json\. Give the directory that"):
        scale_requests.request_workers(run_dir, 3)
    run_dir.root.mkdir()
    record: dict[str, Any] = {"format": 2, "elastic": None}
    run_dir.run_json.write_text(json.dumps(record))
    with pytest.raises(UsageError, match=r"which is over', expected a current run\. Start it again"):
        scale_requests.request_workers(run_dir, 3)
    descriptor = os.open(run_dir.root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match=r"expected a run with --elastic MIN:MAX\. Start it again with"):
        scale_requests.request_workers(run_dir, 3)
    os.close(descriptor)


def test_a_node_takes_its_part_of_a_request_once_and_again_after_a_refusal() -> None:
    now_s = [0.0]
    node = NodeRequests([1, 4], WantedWorkers(workers=3, number=0), clock=lambda: now_s[0])
    assert (node.workers, node.take_request()) == (1, None)
    node.request(WantedWorkers(workers=5, number=1))
    assert node.take_request() == 2
    assert node.refuse_request(2, "no member yet")
    assert node.take_request() is None
    now_s[0] = 1.0
    assert node.take_request() == 2
    assert not node.refuse_request(2, "")
    node.grant_request(2, starting=[4], leaving=[])
    node.request(WantedWorkers(workers=5, number=1))
    assert (node.workers, node.take_request()) == (2, None)
    node.request(WantedWorkers(workers=1, number=2))
    assert node.take_request() == 0
