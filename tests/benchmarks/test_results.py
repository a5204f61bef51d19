import pytest

from ringweave_bench.results import WIRE_PER_PAYLOAD, BenchmarkResult, TimeSummary, schedule_used, summarize


def result(**changes) -> BenchmarkResult:
    values = {
        "system": "ringweave",
        "knob": "as it chooses",
        "order": "block",
        "num_bytes": 1000,
        "num_ranks": 4,
        "seconds": (2.0, 1.0, 3.0, 2.0, 9.0),
        "processor_s": 0.5,
        "bound_s": 1.0,
        "raw_bound_s": 0.8,
        "wire_bytes": {"r0->core": 1000 * WIRE_PER_PAYLOAD},
        "theory_bytes": {"r0->core": 1000.0},
        "schedule": "ring",
    }
    return BenchmarkResult(**(values | changes))


def test_median_and_quartiles() -> None:
    assert summarize([2.0, 1.0, 3.0, 2.0, 9.0]) == TimeSummary(median_s=2.0, iqr_s=1.0)
    assert summarize([5.0]) == TimeSummary(median_s=5.0, iqr_s=0.0)
    assert summarize([1.0, 2.0]) == TimeSummary(median_s=1.5, iqr_s=0.5)


def test_the_document_of_a_result() -> None:
    document = result().document()
    assert {key: document[key] for key in ("system", "bytes", "median_s", "iqr_s", "bound_s", "fraction_of_bound")} == {
        "system": "ringweave",
        "bytes": 1000,
        "median_s": 2.0,
        "iqr_s": 1.0,
        "bound_s": 1.0,
        "fraction_of_bound": 0.5,
    }
    assert (document["kind"], document["rounds"], document["rounds_s"]) == ("measured", 5, [2.0, 1.0, 3.0, 2.0, 9.0])
    assert document["processor_s_per_gb"] == pytest.approx(0.5e6)
    assert (document["algbw_bytes_per_s"], document["busbw_bytes_per_s"]) == (500.0, 750.0)
    assert document["fraction_of_raw_bound"] == pytest.approx(0.4)
    link = document["links"]["r0->core"]
    assert link["payload_per_byte"] == pytest.approx(1.0)
    assert link["wire_per_byte"] == pytest.approx(1.0456, abs=1e-4)
    assert link["theory_per_byte"] == 1.0


def test_without_limited_links_there_is_no_bound() -> None:
    document = result(bound_s=None, raw_bound_s=None, wire_bytes={}, theory_bytes=None).document()
    assert (document["bound_s"], document["fraction_of_bound"], document["fraction_of_raw_bound"]) == (None,) * 3
    assert document["links"] == {}
    assert result(theory_bytes=None).document()["links"]["r0->core"]["theory_per_byte"] is None


@pytest.mark.parametrize(
    ("before", "after", "used"),
    [
        ({}, {}, None),
        ({"native": 2, "ring": 1}, {"native": 17, "ring": 16}, "ring"),
        ({"native": 2, "ring": 9}, {"native": 40, "ring": 9}, "native"),
        ({"ring": 3}, {"ring": 3, "direct": 15, "native": 15}, "direct"),
    ],
)
def test_barriers_do_not_hide_the_schedule(before, after, used) -> None:
    assert schedule_used(before, after) == used
