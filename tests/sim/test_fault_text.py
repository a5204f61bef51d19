import pytest

from ringweave.errors import UsageError
from ringweave.sim import LinkRateChange, NodeSlowdown, RankFailure, StartDelay
from ringweave.sim.scenario import parse_failure, parse_straggler


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a-0=2", NodeSlowdown(node="a-0", times=2.0)),
        ("r0->core=50Mbit/s", LinkRateChange(link="r0->core", bytes_per_s=6.25e6)),
        ("r0->core=50Mbit/s@500ms", LinkRateChange(link="r0->core", bytes_per_s=6.25e6, at_s=0.5)),
        ("rank:3=20ms", StartDelay(rank=3, seconds=0.02)),
    ],
)
def test_stragglers(text: str, fault) -> None:
    assert parse_straggler(text) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("rank:3", RankFailure(rank=3)),
        ("rank:3@0.1s", RankFailure(rank=3, at_s=0.1)),
        ("r0->core@1", LinkRateChange(link="r0->core", bytes_per_s=0.0, at_s=1.0)),
    ],
)
def test_failures(text: str, fault) -> None:
    assert parse_failure(text) == fault


@pytest.mark.parametrize("text", ["", "a-0", "a-0=", "=2", "a-0=fast", "a-0=0", "a-0=inf", "a-0=nan", "rank:x=1s"])
def test_stragglers_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match=r"straggler: '.*', expected NODE=2 \(twice as slow\), LINK=50Mbit/s or"):
        parse_straggler(text)


@pytest.mark.parametrize("text", ["", "a-0", "rank:", "rank:-1", "rank:²", "@1s"])
def test_failures_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match=r"failure: '.*', expected rank:3@0\.1s, LINK@0\.1s, or either without @"):
        parse_failure(text)
