import time
from pathlib import Path

from ringweave import planning, topology
from ringweave.comm.tuning.selector import TuningCache
from ringweave.planning.autotune.tuner import MAX_AGE_S


def plan_of(rate: str) -> planning.Plan:
    cluster = topology.loads(f"name: c\nnodes: [{{name: a, nic: {rate}, devices: 1, count: 2}}]\n")
    return planning.plan_group(cluster, ["a-0", "a-1"])


def test_what_was_saved_is_loaded_for_the_same_plan_only(tmp_path: Path) -> None:
    cache = TuningCache.for_user({"XDG_CACHE_HOME": str(tmp_path)})
    assert cache.load(plan_of("1Gbit/s")) == {}
    cache.save(plan_of("1Gbit/s"), {"allreduce 40": "ring", "allreduce 50": "native"})
    assert cache.load(plan_of("1Gbit/s")) == {"allreduce 40": "ring", "allreduce 50": "native"}
    assert cache.load(plan_of("2Gbit/s")) == {}
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "ringweave" / "tuning"]


def test_a_relative_cache_folder_counts_as_none(tmp_path: Path) -> None:
    cache = TuningCache.for_user({"XDG_CACHE_HOME": "here", "HOME": str(tmp_path)})
    cache.save(plan_of("1Gbit/s"), {"allreduce 40": "ring"})
    assert len(list((tmp_path / ".cache" / "ringweave" / "tuning").iterdir())) == 1


def test_files_that_are_none_of_ours_count_as_nothing(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path)
    cache.save(plan_of("1Gbit/s"), {"allreduce 40": "ring"})
    (path,) = tmp_path.iterdir()
    rows = (
        '{"a": ["ring", 1]}',
        f'{{"40": ["carousel", {time.time()}]}}',
        '{"40": "ring"}',
        '{"40": ["ring", "late"]}',
    )
    for text in ("", "[]", *(f'{{"ringweave-tuning-3": {row}}}' for row in rows)):
        path.write_text(text)
        assert cache.load(plan_of("1Gbit/s")) == {}


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TuningCache(tmp_path / "file" / "below")
    cache.save(plan_of("1Gbit/s"), {"allreduce 40": "ring"})
    assert cache.load(plan_of("1Gbit/s")) == {}


def test_what_won_long_ago_is_not_known_any_more(tmp_path: Path) -> None:
    now = [1000.0]
    cache, plan = TuningCache(tmp_path, clock=lambda: now[0]), plan_of("1Gbit/s")
    cache.save(plan, {"allreduce 40": "ring", "allreduce 41": "native"})
    now[0] += MAX_AGE_S - 1
    cache.save(plan, {"allreduce 40": "ring", "allreduce 41": "ps", "allreduce 42": "native"})
    assert cache.load(plan) == {"allreduce 40": "ring", "allreduce 41": "ps", "allreduce 42": "native"}
    now[0] += 2
    assert cache.load(plan) == {"allreduce 41": "ps", "allreduce 42": "native"}, (
        "what is saved again was not tried again"
    )
    cache.save(plan, {"allreduce 40": "ring", "allreduce 41": "ps", "allreduce 42": "native"})
    now[0] += MAX_AGE_S - 1
    assert cache.load(plan) == {"allreduce 40": "ring"}, "tried again, with the same result"
    now[0] = 0.0
    assert cache.load(plan) == {}, "from the future"
