"""The speed test: who begins when, the queue of completions, who never reports, and the rings on real ranks."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from ringweave.comm import peer_data
from ringweave.errors import DisagreementError, PeerError
from ringweave.testing.ranks import Ranks
from ringweave.training import speed_test
from ringweave.training.speed_test import SpeedTestParticipant
from tests.clock import Clock
from tests.param_server.ring.test_rings import TIMEOUT_S, serving
from tests.training import speed_test_functions


def referees(num_ranks: int, patience_s: float = 300.0) -> tuple[list[SpeedTestParticipant], list[Clock]]:
    store, clocks = HashStore(), [Clock() for _ in range(num_ranks)]
    made = [
        SpeedTestParticipant(store, rank, num_ranks, timeout_s=patience_s, clock=clock, sleep=clock.sleep)
        for rank, clock in enumerate(clocks)
    ]
    return made, clocks


def test_the_model_is_as_it_was_before() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[0].weight.grad = torch.full((4, 4), 7.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = torch.get_rng_state()

    with speed_test.preserve_model_state(model):
        model.train()(torch.randn(8, 4)).sum().backward()

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((4, 4), 7.0))
    assert model[0].bias.grad is None
    assert not model.training
    assert torch.equal(torch.get_rng_state(), expected)


def test_all_ranks_make_as_many_trials_as_the_fastest_makes_in_half_a_second() -> None:
    ranks, _ = referees(3)
    store = ranks[0]._store
    for referee, trial_s in zip(ranks[1:], (0.2, 0.01), strict=True):
        referee._report_ready(trial_s)
    assert ranks[0].wait_start(0.04) == 50
    assert store.check(["go"])


def finish(ranks: list[SpeedTestParticipant], clocks: list[Clock], seconds: dict[int, float]) -> None:
    """Ranks report in this order, each after so many seconds."""
    for rank, each_s in seconds.items():
        ranks[rank]._is_ready = True
        clocks[rank].now_s += each_s
        ranks[rank].report_finished()


def test_the_queue_is_in_order_of_arrival() -> None:
    ranks, clocks = referees(4)
    finish(ranks, clocks, {2: 0.1, 0: 0.2, 3: 0.9, 1: 2.0})
    assert ranks[0].finish_order() == (2, 0, 3, 1)
    assert ranks[3].finish_order() == (2, 0, 3, 1), "the others read what rank 0 found"


def test_who_finishes_at_about_the_same_time_arrives_together() -> None:
    ranks, clocks = referees(5)
    finish(ranks, clocks, {3: 0.50, 1: 0.55, 0: 0.60, 4: 2.1, 2: 2.0})
    assert ranks[0].finish_order() == (0, 1, 3, 2, 4)


def test_one_that_was_not_tried_out_is_waited_for_by_nobody() -> None:
    ranks, clocks = referees(3)
    ranks[0].withdraw()
    ranks[0].withdraw()
    assert ranks[1]._wait_published("go", speed_test._parse_num_trials) == 1
    finish(ranks, clocks, {1: 0.1, 2: 0.2})
    assert [referee.finish_order() for referee in ranks] == [None] * 3


NOTHING = (
    r"^speed test of 4 workers: 'nothing from worker 1, 3 within 20 s', expected a report of each\. Look into the log "
    r"of that worker; give slow ones longer by Asynchronous\(speed_test_s=\.\.\.\); ringweave run --elastic goes on wi"
)


def test_who_never_reports_is_named_to_all_that_have_and_to_itself_when_it_comes() -> None:
    ranks, clocks = referees(4, patience_s=20)
    finish(ranks, clocks, {0: 0.1, 2: 0.2})
    for rank in (0, 2):
        with pytest.raises(PeerError, match=NOTHING):
            ranks[rank].finish_order()
    assert 20 <= clocks[0].now_s < 21
    finish(ranks, clocks, {3: 50})
    with pytest.raises(PeerError, match=NOTHING):
        ranks[3].finish_order()


def test_who_never_has_its_samples_is_named_before_anybody_computes() -> None:
    ranks, clocks = referees(4, patience_s=20)
    ranks[2]._report_ready(0.1)
    with pytest.raises(PeerError, match=NOTHING):
        ranks[0].wait_start(0.1)
    with pytest.raises(PeerError, match=NOTHING):
        ranks[2].wait_start(0.1)
    assert clocks[0].now_s < 21


def test_a_silent_rank_0_is_named() -> None:
    ranks, clocks = referees(2, patience_s=20)
    finish(ranks, clocks, {1: 0.1})
    with pytest.raises(
        PeerError, match=r"^speed test of 2 workers: 'nothing from worker 0 within 50 s', expected a re"
    ):
        ranks[1].finish_order()


def test_a_late_one_is_waited_for() -> None:
    ranks, clocks = referees(2)
    clocks[0].sleep = lambda seconds: finish(ranks, clocks, {1: 5.0}) if not ranks[1]._has_reported else None
    ranks[0]._sleep = clocks[0].sleep
    finish(ranks, clocks, {0: 0.1})
    assert ranks[0].finish_order() == (0, 1)


RUBBISH = [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b"[0, NaN]", b"[7, 0.5]", b"[0, -1]"]


@pytest.mark.parametrize("value", [*RUBBISH, b'[0, "1"]', b"[true, 1]", b" " * (peer_data.MAX_PEER_BYTES + 1)])
def test_what_is_no_report_is_a_disagreement(value: bytes) -> None:
    ranks, _ = referees(2)
    ranks[0]._store.set(f"arrived/{ranks[0]._store.add('arrived', 1)}", value)
    with pytest.raises(
        DisagreementError, match=r"speed test: .*, expected .*keep others out of the store\. \[arrived/1"
    ):
        ranks[0].finish_order()


@pytest.mark.parametrize("content", ["0", "1.5", "true", "1e9", "null", '"1"', "10000000", "[" * 100_000])
def test_a_number_of_trials_that_is_none_is_a_disagreement(content: str) -> None:
    ranks, _ = referees(2)
    ranks[1]._store.set("go", f'{{"absent": [], "content": {content}}}')
    with pytest.raises(DisagreementError, match=r"speed test: .*, expected the message of rank 0.* \[go\]"):
        ranks[1].wait_start(0.1)


@pytest.mark.parametrize(
    "said",
    [
        *(b'{"absent": [], "content": [0, 0]}', b'{"absent": [], "content": [0]}', b'{"absent": [], "content": 1}'),
        *(b'{"absent": [2], "content": null}', b'{"absent": 1, "content": null}', b'{"absent": []}', b"\xff"),
    ],
)
def test_an_order_of_other_ranks_is_a_disagreement(said: bytes) -> None:
    ranks, _ = referees(2)
    ranks[1]._store.set("order", said)
    with pytest.raises(DisagreementError, match=r"speed test: .*, expected the message of rank 0.* \[order\]"):
        ranks[1].finish_order()


def run(folder: Path, *settings: object) -> list:
    with (
        serving(folder, 4) as (server, _),
        Ranks(
            speed_test_functions.prepare, 4, server.port, str(folder / "keys"), *settings, timeout_s=TIMEOUT_S
        ) as ranks,
    ):
        return ranks.values(timeout_s=TIMEOUT_S)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_prepare_forms_rings_of_the_first_that_complete(tmp_path: Path) -> None:
    """Three rings of four workers of two kinds: one that reports first, the other one, and those that come last."""
    found = run(tmp_path, 3, [2, 0, 2, 0], [], 300.0)
    assert all(rings == found[0] for rings in found)
    assert sorted(found[0][:2]) == [(1,), (3,)]
    assert sorted(found[0][2]) == [0, 2]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_a_worker_that_never_comes_to_prepare_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    found = run(tmp_path, 2, [0] * 4, [2], 6.0)
    assert found[2] is None
    for text in (found[0], found[1], found[3]):
        assert text.startswith(
            "speed test of 4 workers: 'nothing from worker 2 within 6 s', expected a report of each."
        )
