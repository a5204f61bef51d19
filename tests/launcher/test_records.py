import importlib.metadata
import json
from pathlib import Path

import pytest

from ringweave import telemetry
from ringweave.launcher import run_dir
from ringweave.launcher.outcome import RunRecorder
from ringweave.launcher.run_dir import RunDir
from ringweave.launcher.workers import WorkerGroup, WorkerSpec


def collectives(rank: int, group: str, **by_schedule: tuple[int, int, int]) -> dict:
    names = ("collectives", "bytes", "messages")
    counts = {name: dict(zip(names, values, strict=True)) for name, values in by_schedule.items()}
    return {"kind": "collectives", "rank": rank, "group": group, "by_schedule": counts}


def test_a_collective_of_a_group_counts_once_and_messages_of_all_ranks_add_up() -> None:
    events = [collectives(rank, "world", ring=(10, 1000, 60 + rank), native=(2, 8, 0)) for rank in (2, 1, 3)]
    assert run_dir.count_collectives(events) == {
        "ring": {"collectives": 10, "bytes": 1000, "messages": 186},
        "native": {"collectives": 2, "bytes": 8, "messages": 0},
    }


def test_the_last_event_of_each_rank_and_group_counts() -> None:
    events = [collectives(0, "world", ring=(1, 100, 6)), collectives(0, "world", ring=(5, 500, 30))]
    assert run_dir.count_collectives(events) == {"ring": {"collectives": 5, "bytes": 500, "messages": 30}}


def test_groups_add_up() -> None:
    events = [
        collectives(0, "a", ring=(1, 100, 6)),
        collectives(2, "b", ring=(2, 20, 4)),
        collectives(3, "b", ring=(9, 90, 5)),
    ]
    assert run_dir.count_collectives(events) == {"ring": {"collectives": 3, "bytes": 120, "messages": 15}}


def test_other_events_count_nothing() -> None:
    assert run_dir.summarize_events([{"kind": "run_started", "attempt": 1}]) == {
        "collectives_by_schedule": {},
        "networks": [],
        "plan": [],
        "plan_versions": [],
        "ranks": {},
        "tuned": [],
        "training": None,
    }


def test_plans_and_tunings_are_listed() -> None:
    made = {"kind": "plan_made", "group": "g", "rank": 0, "bound_s_per_byte": 1.0, "binding": "cut"}
    events = [
        made | {"version": 1, "rates": {}},
        {
            "kind": "schedule_tuned",
            "group": "g",
            "version": 1,
            "collective": "allgather",
            "bytes": 9,
            "schedule": "ring",
            "measured_s": {},
        },
        made | {"version": 2, "rates": {"a->core": 5.0}},
        {"kind": "plan_changed", "group": "g", "version": 2, "why": "slower"},
    ]
    assert run_dir.list_plan_versions(events) == [
        {"group": "g", "version": 1, "rates": {}, "why": None},
        {"group": "g", "version": 2, "rates": {"a->core": 5.0}, "why": "slower"},
    ]
    assert run_dir.list_tuned_schedules(events) == [
        {"group": "g", "version": 1, "collective": "allgather", "bytes": 9, "schedule": "ring", "measured_s": {}}
    ]


def test_every_agreement_is_listed_once() -> None:
    kept = {"group": "world", "collective": "allreduce", "schedule": "ring", "digest": "ab", "bytes": 100}
    agreed = {"kind": "schedule_agreed", **kept}
    events = [agreed | {"rank": 0}, agreed | {"rank": 1}, agreed | {"rank": 0, "bytes": 200}]
    assert run_dir.list_agreed_schedules(events) == [kept, kept | {"bytes": 200}]


def test_training_is_summed_up() -> None:
    prepared = {"mode": "balanced", "requested_mode": "auto", "reason": "r", "batch_samples": 20, "shares": [10, 10]}
    events = [
        {"kind": "training_prepared", "rank": 0, **prepared},
        {"kind": "shares_changed", "shares": [16, 4]},
        {"kind": "memory_limited", "rank": 1, "samples_at_once": 5},
        {"kind": "memory_limited", "rank": 0, "samples_at_once": 60},
        {"kind": "samples_accounted", "samples": 40, "exact": True},
        {"kind": "samples_accounted", "samples": 40, "exact": True},
    ]
    accounted = {"epochs_accounted": 2, "samples_accounted": 80, "exact": True, "samples_at_once": {"1": 5, "0": 60}}
    found = run_dir.summarize_training(events)
    assert found == {**prepared, "shares": [16, 4], "changes": 1, **accounted}
    told = (
        "ringweave: trained in mode balanced: r. 80 samples in 2 epochs, each exactly once. "
        "Rank 1 computes at most 5 samples at once, limited by memory (predicted).\n"
    )
    assert run_dir.describe_training(found) == told
    lost = [{"kind": "samples_accounted", "samples": 39, "exact": False}, events[-1]]
    found = run_dir.summarize_training([*events, *lost])
    assert found["exact"] is False
    assert "159 samples in 4 epochs, not each exactly once" in run_dir.describe_training(found)
    assert "No epoch was completed" in run_dir.describe_training(run_dir.summarize_training(events[:2]))
    assert run_dir.describe_training(run_dir.summarize_training([])) == ""


def test_keys_of_others_survive_an_update(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_dir.update_run_json(path, {"outcome": "running", "schedule": None})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"loss": 2.5}))
    run_dir.update_run_json(path, {"outcome": "done"})
    assert json.loads(path.read_text()) == {"outcome": "done", "schedule": None, "loss": 2.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_a_record_that_cannot_be_read_is_kept_beside(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    deep = '{"loss": ' + "[" * 5000 + "]" * 5000 + "}"
    for text in (b'{"half', b"[]", b"[" * 100_000, deep.encode(), b'{"\xff": 1}', b"9" * 5000):
        path.write_bytes(text)
        run_dir.update_run_json(path, {"outcome": "done"})
        assert json.loads(path.read_text()) == {"outcome": "done"}
        assert (tmp_path / "run.json.unreadable").read_bytes() == text


def test_a_record_that_is_too_long_is_kept_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "MAX_RUN_JSON_BYTES", 100)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"losses": [0.5] * 50}))
    run_dir.update_run_json(path, {"outcome": "done"})
    assert json.loads(path.read_text()) == {"outcome": "done"}
    assert len((tmp_path / "run.json.unreadable").read_text()) > 100


def test_versions_come_without_importing_torch() -> None:
    assert run_dir.software_versions()["torch"] == importlib.metadata.version("torch")
    assert run_dir.software_versions()["ringweave"] == importlib.metadata.version("ringweave")


@pytest.mark.parametrize(
    ("ranks", "more", "is_recorded"),
    [((0, 1), 0, True), ((2, 3), 0, False), ((), 0, True), ((0,), 1, False)],
    ids=["first node", "other node", "torchrun", "too long"],
)
def test_one_event_of_an_attempt_has_the_cluster_file(
    tmp_path: Path, ranks: tuple[int, ...], more: int, is_recorded: bool
) -> None:
    directory, text = RunDir(root=tmp_path), "#".ljust(telemetry.MAX_CLUSTER_TEXT + more, "é")
    directory.cluster_file.write_text(text, encoding="utf-8")
    workers = tuple(WorkerSpec(global_rank=rank, local_rank=0, node="a", environ={}) for rank in ranks)
    record = {"attempt": 1, "command": ["s.py"], "world_size": 4, "cluster": {"name": "c"}}
    RunRecorder(directory, WorkerGroup(argv=(), workers=workers), record)
    (event,) = telemetry.read_events(directory.events)
    assert event["cluster_text"] == (text if is_recorded else "")
