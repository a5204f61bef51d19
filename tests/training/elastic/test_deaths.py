"""Real kills of real members at every moment of a step: no step is lost, and what is left is exact."""

import itertools
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ringweave.membership import coordinator, failure_detector
from ringweave.membership.failure_detector import PROGRESS_TIMEOUT
from ringweave.membership.membership_records import REASON_ALL_DONE
from ringweave.planning import balancing
from ringweave.training.checkpoints import store
from tests import effort
from tests.fakes.elastic_job import ElasticJob
from tests.polling import wait_until
from tests.training.elastic import elastic_functions

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

SILENCE_S = 6.0
"""Of one that is waited for; longer than a busy machine keeps a heartbeat."""
NUM_STEPS = elastic_functions.NUM_SAMPLES // elastic_functions.BATCH
COUNTS_AFTER = ("heard", "committed", "optimizer")
"""Moments at which one who dies knows that all members have all sums of the step, and all rows: its samples count,
whether anybody else has heard so or not."""
MAY_COUNT_AFTER = ("commit",)
"""The moment at which one who dies has them itself: its samples count if all others have them too by then."""


def replay(batches: Mapping[int, Sequence[int]], hidden: int) -> list[np.ndarray]:
    """Parameters after steps whose gradients are means over these samples, computed in one process."""
    model, data = elastic_functions.make_model(hidden), elastic_functions.make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in sorted(batches):
        inputs, targets, _ = data[torch.tensor(sorted(batches[step]))]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [each.detach().numpy() for each in model.parameters()]


def samples_that_count(
    job: ElasticJob, faults: Mapping[str, tuple[int, str]], heard: Sequence[str] = ()
) -> dict[int, list[int]]:
    """Step -> samples of those that were there to the end of it, by what they said themselves.

    `heard` are those whose last step counts though they died in it.
    """
    found: dict[int, list[int]] = {}
    for member in job.members:
        job.read_messages(member)
        died_at, _ = faults.get(member, (10**9, ""))
        for (word, step, what), _ in [each for each in job.messages(member) if each[0][0] == "drawn"]:
            assert word == "drawn"
            if step < died_at or (step == died_at and member in heard):
                found.setdefault(step, []).extend(what)
    return found


def what_counted(job: ElasticJob, faults: Mapping[str, tuple[int, str]], num_lost: int) -> list[dict[int, list[int]]]:
    """The ways in which so many samples can have been lost."""
    certain = [member for member, (_, moment) in faults.items() if moment in COUNTS_AFTER]
    doubtful = [member for member, (_, moment) in faults.items() if moment in MAY_COUNT_AFTER]
    ways = itertools.chain.from_iterable(itertools.combinations(doubtful, num) for num in range(len(doubtful) + 1))
    found = [samples_that_count(job, faults, [*certain, *heard]) for heard in ways]
    return [each for each in found if 2 * elastic_functions.NUM_SAMPLES - sum(map(len, each.values())) == num_lost]


def check_alike(values: Sequence[dict[str, Any]]) -> None:
    for value in values:
        for own, first in zip(value["parameters"], values[0]["parameters"], strict=True):
            assert (own == first).all(), "bitwise"


def is_exact(value: dict[str, Any], batches: Mapping[int, Sequence[int]]) -> bool:
    pairs = zip(value["parameters"], replay(batches, elastic_functions.HIDDEN), strict=True)
    return all(np.allclose(own, wanted, rtol=0, atol=1e-12) for own, wanted in pairs)


def check_exact(
    value: dict[str, Any], batches: Mapping[int, Sequence[int]], hidden: int = elastic_functions.HIDDEN
) -> None:
    for own, wanted in zip(value["parameters"], replay(batches, hidden), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)


def value_of(job: ElasticJob, member: str) -> dict[str, Any]:
    outcome = job.outcome(member)
    lost = [each.lost_members for each in job.coordinators]
    assert not outcome.error, f"{member}: {outcome.error}; lost {lost}"
    return outcome.value


def drawn_in(job: ElasticJob, member: str, step: int) -> list[int]:
    """Samples that it was given in that step, each time that it was."""
    job.read_messages(member)
    return [each for said, _ in job.messages(member) if said[:2] == ("drawn", step) for each in said[2]]


def draws(job: ElasticJob, member: str) -> list[tuple[int, list[int]]]:
    """(step, samples) of each batch that the member drew."""
    return [(said[1], said[2]) for said, _ in job.messages(member) if said[0] == "drawn"]


def done_steps(job: ElasticJob, member: str) -> list[int]:
    return [said[1] for said, _ in job.messages(member) if said[0] == "done"]


@pytest.mark.parametrize(
    ("mode", "faults"),
    [
        ("sync", {"1.0": (2, "forward"), "2.0": (5, "backward"), "0.0": (9, "bucket1")}),
        ("sync", {"3.0": (2, "bucket3"), "2.0": (4, "rows"), "0.0": (7, "commit")}),
        ("sync", {"0.0": (3, "heard"), "2.0": (7, "committed")}),
        ("sync", {"0.0": (3, "optimizer"), "1.0": (3, "backward")}),
        ("balanced", {"3.0": (2, "bucket3"), "0.0": (9, "backward"), "2.0": (12, "committed")}),
    ],
    ids=["forward-backward-bucket", "bucket-rows-commit", "heard-committed", "two-at-once", "balanced"],
)
def test_no_step_is_lost_and_the_mean_is_over_those_who_are_left(mode: str, faults: dict[str, tuple[int, str]]) -> None:
    with ElasticJob(elastic_functions.train, 4, 2, faults, 0.0, "", mode) as job:
        left = [member for member in job.members if member not in faults]
        values = [value_of(job, member) for member in left]
        for member in faults:
            assert job.outcome(member).exit_code == -signal.SIGKILL
        check_alike(values)
        num_lost = sum(account.lost.num_samples for account in values[0]["accounts"])
        possible = what_counted(job, faults, num_lost)
        assert possible, f"{num_lost} samples lost"
        assert all(sorted(batches) == list(range(2 * NUM_STEPS)) for batches in possible)
        assert any(is_exact(values[0], batches) for batches in possible)
        for member in left:
            assert done_steps(job, member) == list(range(2 * NUM_STEPS)), "every step once"
        for value in values:
            assert sum(account.lost.num_samples for account in value["accounts"]) == num_lost
            assert all(account.is_accounted for account in value["accounts"])


def test_kills_while_gradients_travel_in_int8(tmp_path: Path) -> None:
    """Survivors keep their residuals, say whose are lost, hold the same bits, and checkpoints have what is left."""
    faults, losses = {"1.0": (3, "bucket1"), "2.0": (9, "backward")}, {}
    for wire in ("exact", "int8"):
        run_dir = tmp_path / wire
        run_dir.mkdir()
        environ = {"RINGWEAVE_WIRE": wire, "RINGWEAVE_RUN_DIR": str(run_dir)}
        arguments = (elastic_functions.train_encoded, 4, faults, str(run_dir / "checkpoints"))
        with ElasticJob(*arguments, environ=environ) as job:
            survivors = [member for member in job.members if member not in faults]
            values = [value_of(job, member) for member in survivors]
            check_alike(values)
            for member in faults:
                assert job.outcome(member).exit_code == -signal.SIGKILL
            for member in survivors:
                job.read_messages(member)
                assert sorted(set(done_steps(job, member))) == list(range(2 * NUM_STEPS))
        losses[wire] = values[0]["loss"]
        assert all((value["left"] > 0) == (wire == "int8") for value in values), "what encoding has left"
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        lost = [each["members"] for each in events if each["kind"] == "residuals_lost"]
        assert lost == ([["1.0"], ["2.0"]] if wire == "int8" else [])
    assert losses["int8"] != losses["exact"]
    assert losses["int8"] == pytest.approx(losses["exact"], rel=0.02)


THIN_NODE = """name: thin
nodes:
  - {{name: n0, nic: 10Gbit/s, devices: 1}}
  - {{name: n1, nic: 10Gbit/s, devices: 1}}
  - {{name: n2, nic: {nic}, devices: 1}}
  - {{name: n3, nic: 10Gbit/s, devices: 1}}
"""
"""Cluster of the members 0 to 3, of which one may have a link that binds."""


def environ_within_bound(run_dir: Path, nic: str = "2Mbit/s") -> dict[str, str]:
    """Environment of a job that may lose 1 % for speed."""
    (run_dir / "cluster.yaml").write_text(THIN_NODE.format(nic=nic))
    cluster = {"RINGWEAVE_CLUSTER": str(run_dir / "cluster.yaml"), "RINGWEAVE_RUN_DIR": str(run_dir)}
    return {**cluster, "RINGWEAVE_WIRE": "auto", "RINGWEAVE_MAX_LOSS_INCREASE": "1%"}


def choices(run_dir: Path) -> list[dict[str, Any]]:
    """Events of chosen formats."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [each for each in events if each["kind"] == "wire_chosen"]


def test_a_format_within_the_bound_is_chosen_again_when_the_thin_link_is_gone(tmp_path: Path) -> None:
    """What int8 has left goes with the first exact sum, and all have the same bits."""
    faults = {"2.0": (5, "bucket1"), "1.0": (11, "backward")}
    arguments = (elastic_functions.train_encoded, 4, faults, str(tmp_path / "checkpoints"))
    with ElasticJob(*arguments, environ=environ_within_bound(tmp_path)) as job:
        survivors = [member for member in job.members if member not in faults]
        values = [value_of(job, member) for member in survivors]
        check_alike(values)
        for member in survivors:
            assert sorted(set(done_steps(job, member))) == list(range(2 * NUM_STEPS))
    first, second = choices(tmp_path)
    assert (first["wire"], first["reduction"], len(first["members"])) == ("int8", 2, 4)
    assert "up to 1 % more loss at equal samples is allowed, for a gain of 10%" in first["reason"]
    assert "sync in int4" in first["reason"]
    assert first["reason"].endswith("too much; chosen: sync in int8")
    assert (second["wire"], second["members"]) == ("exact", ["0.0", "1.0", "3.0"])
    assert second["reduction"] > 5
    assert [value["left"] for value in values] == [0.0, 0.0]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [each["members"] for each in events if each["kind"] == "residuals_lost"] == [["2.0"]]
    (prepared,) = (each for each in events if each["kind"] == "training_prepared")
    assert prepared["reason"].endswith("chosen: sync in int8")


def test_a_format_within_the_bound_is_chosen_again_when_a_worker_with_a_thin_link_joins(tmp_path: Path) -> None:
    """It follows with zeros through the change of the format, and has the same bits as the others."""
    arguments = (elastic_functions.train_encoded_together, 2, 3, NUM_STEPS)
    with ElasticJob(*arguments, environ=environ_within_bound(tmp_path)) as job:
        job.wait_message("0.0", lambda said: said[:2] == ("done", 3))
        job.start_worker(2, 0)
        values = [value_of(job, member) for member in job.members]
        check_alike(values)
    (choice,) = choices(tmp_path)
    assert (choice["wire"], choice["members"]) == ("int8", ["0.0", "1.0", "2.0"])
    assert max(value["left"] for value in values) > 0


def test_fast_links_stay_exact_within_any_bound(tmp_path: Path) -> None:
    arguments = (elastic_functions.train_encoded, 3, {}, str(tmp_path / "checkpoints"))
    with ElasticJob(*arguments, environ=environ_within_bound(tmp_path, "10Gbit/s")) as job:
        values = [value_of(job, member) for member in job.members]
        check_alike(values)
    assert choices(tmp_path) == []
    assert [value["left"] for value in values] == [0.0] * 3


RECOMPUTED = [
    ("sync", {"1.0": (2, "forward"), "2.0": (5, "backward"), "0.0": (9, "bucket1")}),
    ("sync", {"3.0": (2, "bucket3"), "2.0": (7, "rows"), "0.0": (8, "commit")}),
    ("sync", {"0.0": (3, "heard"), "2.0": (7, "committed")}),
    ("sync", {"0.0": (3, "optimizer"), "1.0": (3, "backward")}),
    ("balanced", {"3.0": (2, "bucket3"), "0.0": (9, "backward"), "2.0": (15, "forward")}),
]
"""Steps 7 and 15 are the last ones of an epoch. Samples of a member that dies after a step are missing in the next."""


@pytest.mark.parametrize(("case", "on_failure"), effort.alternating(RECOMPUTED, ["recompute", "restart"]))
def test_samples_of_lost_members_are_computed_in_the_same_step(
    case: tuple[str, dict[str, tuple[int, str]]], on_failure: str
) -> None:
    mode, faults = case
    arguments = (elastic_functions.train, 4, 2, faults, 0.0, "", mode, elastic_functions.HIDDEN, on_failure)
    with ElasticJob(*arguments) as job:
        left = [member for member in job.members if member not in faults]
        values = [value_of(job, member) for member in left]
        for member in faults:
            assert job.outcome(member).exit_code == -signal.SIGKILL
        check_alike(values)
        check_exact(values[0], whole_batches())
        for value in values:
            assert all(account.is_exact for account in value["accounts"])
        for member in left:
            steps = done_steps(job, member)
            assert sorted(set(steps)) == list(range(2 * NUM_STEPS))
            repeated = {step for step in steps if steps.count(step) > 1}
            lossy = {at + (moment in COUNTS_AFTER) for at, moment in faults.values()}
            assert repeated <= lossy | {at for at, _ in faults.values()}, "no step without a loss is repeated"
            for step in repeated:
                drawn = [[own for at, own in draws(job, each) if at == step] for each in job.members]
                last = [each[-1] for each in drawn if len(each) == steps.count(step)]
                is_whole = sum(map(len, last)) == elastic_functions.BATCH
                assert is_whole == (on_failure == "restart"), f"step {step}: {drawn}"


ACCUMULATED = [
    {"1.0": (2, "forward"), "2.0": (9, "backward")},
    {"0.0": (5, "bucket1"), "3.0": (5, "forward")},
    {"2.0": (7, "backward"), "1.0": (15, "bucket3")},
]
"""In the first and second batch of a step; two in one step; at the end of an epoch."""


@pytest.mark.parametrize(("faults", "restarts"), effort.alternating(ACCUMULATED, [False, True]))
def test_accumulated_batches_clipping_and_a_schedule_are_those_of_a_run_without_a_loss(
    faults: dict[str, tuple[int, str]], restarts: bool
) -> None:
    with ElasticJob(elastic_functions.train_accumulating, 4, 2, faults, 0.0, restarts) as job:
        left = [member for member in job.members if member not in faults]
        values = [value_of(job, member) for member in left]
        check_alike(values)
        parameters, last_lr = accumulate()
        for value in values:
            assert value["lr"] == last_lr
            assert all(account.is_exact for account in value["accounts"])
            for own, wanted in zip(value["parameters"], parameters, strict=True):
                np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)
        assert any(said[2] for said, _ in job.messages(left[0]) if said[0] == "done"), "a step missed samples"


@pytest.mark.parametrize("restarts", [False, True], ids=["missing samples", "whole step"])
def test_a_worker_that_joins_repeats_steps_that_missed_samples(restarts: bool) -> None:
    faults = {"1.0": (2, "backward")}
    with ElasticJob(elastic_functions.train_accumulating, 4, 10, faults, 0.1, restarts, "1.1") as job:
        assert job.outcome("1.0").exit_code == -signal.SIGKILL
        newcomer = job.start_worker(1, 1)
        job.wait_message(newcomer, lambda said: said == ("prepared",))
        job.send_signal("2.0", signal.SIGKILL)
        values = [value_of(job, member) for member in ("0.0", "3.0", newcomer)]
        check_alike(values)
        assert len({tuple(value["lr"]) for value in values}) == 1
        assert all(account.is_exact for value in values for account in value["accounts"][-4:])
        for own, wanted in zip(values[0]["parameters"], accumulate(10)[0], strict=True):
            np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)


def accumulate(num_epochs: int = 2) -> tuple[list[np.ndarray], list[float]]:
    """Parameters and learning rate after `elastic_functions.train_accumulating` in one process."""
    model, data = elastic_functions.make_model(), elastic_functions.make_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    for number, samples in sorted(whole_batches(num_epochs).items()):
        inputs, targets, _ = data[torch.tensor(samples)]
        nn.functional.mse_loss(model(inputs), targets).backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), elastic_functions.CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [each.detach().numpy() for each in model.parameters()], schedule.get_last_lr()


def whole_batches(num_epochs: int = 2) -> dict[int, list[int]]:
    """Number of each batch -> its samples."""
    return {
        epoch * NUM_STEPS + number: list(order[number * elastic_functions.BATCH :][: elastic_functions.BATCH])
        for epoch in range(num_epochs)
        for order in [balancing.shuffle_indices(elastic_functions.NUM_SAMPLES, 3, epoch)]
        for number in range(NUM_STEPS)
    }


@pytest.mark.parametrize(
    ("victim", "schedule"), [("1.0", ""), ("0.0", "ring")], ids=["by the native backend", "by a schedule"]
)
def test_one_dies_in_the_midst_of_a_sum_when_all_have_the_one_before_it_and_both_are_done_again(
    victim: str, schedule: str
) -> None:
    """The sum that is there has the gradients of the one who dies in it, as the mean may not."""
    faults, at = {victim: (3, "second sum")}, 3
    arguments = (elastic_functions.train, 3, 2, faults, 0.0, "", "sync", elastic_functions.WIDE)
    with ElasticJob(*arguments, environ={"RINGWEAVE_SCHEDULE": schedule}) as job:
        left = [member for member in job.members if member != victim]
        job.wait_message(victim, lambda said: said == ("halts",))
        for member in left:
            job.wait_message(member, lambda said: said == ("summed", at, 0))
        job.send_signal(victim, signal.SIGKILL)
        values = [value_of(job, member) for member in left]
        for member in left:
            summed = [said[2] for said, _ in job.messages(member) if said[:2] == ("summed", at)]
            assert summed[0] == 0, "there when the other one died"
            assert 1 not in summed, "that one was in its midst"
            assert len(summed) >= 3, "both were done again"
            assert done_steps(job, member) == list(range(2 * NUM_STEPS)), "every step once"
        check_alike(values)
        lost = len(drawn_in(job, victim, at))
        assert lost > 0
        for value in values:
            assert sum(account.lost.num_samples for account in value["accounts"]) == lost
            assert all(account.is_accounted for account in value["accounts"])
        check_exact(values[0], samples_that_count(job, faults), elastic_functions.WIDE)


def test_a_replacement_goes_on_with_the_state_of_the_others_and_one_that_is_asked_to_leaves() -> None:
    faults = {"1.0": (2, "backward")}
    with ElasticJob(elastic_functions.train, 3, 8, faults, 0.1, "1.1") as job:
        assert job.outcome("1.0").exit_code == -signal.SIGKILL
        newcomer = job.start_worker(1, 1)
        job.wait_message(newcomer, lambda said: said[0] == "done")
        job.send_signal("2.0", signal.SIGTERM)
        left = job.outcome("2.0")
        assert (left.exit_code, left.error) == (143, "")
        values = [value_of(job, "0.0"), value_of(job, newcomer)]
        check_alike(values)
        batches = samples_that_count(job, faults)
        assert sorted(batches) == list(range(8 * NUM_STEPS))
        check_exact(values[0], batches)
        assert done_steps(job, "0.0") == list(range(8 * NUM_STEPS))
        first = min(done_steps(job, newcomer))
        assert done_steps(job, newcomer) == list(range(first, 8 * NUM_STEPS)), "it takes part from its first step on"
        assert values[0]["accounts"][-1] == values[1]["accounts"][-1]
        assert values[0]["accounts"][-1].is_exact


def test_a_stopped_member_is_left_behind_and_changes_nothing_when_it_wakes() -> None:
    with ElasticJob(elastic_functions.train, 3, 8, {}, 0.1, silence_s=SILENCE_S) as job:
        # Before so many heartbeats that silence counts as learnt, it would be given a minute.
        job.wait_message("1.0", lambda said: said[:2] == ("done", 30))
        job.send_signal("1.0", signal.SIGSTOP)
        job.wait_message("0.0", lambda said: said[0] == "done" and len(said[2]) == 2)
        job.send_signal("1.0", signal.SIGCONT)
        zombie = job.outcome("1.0")
        assert "MembershipError: this worker is no member any more" in zombie.error
        values = [value_of(job, member) for member in ("0.0", "2.0")]
        check_alike(values)
        assert done_steps(job, "0.0") == list(range(8 * NUM_STEPS))
        assert all(account.is_accounted for account in values[0]["accounts"])


def test_two_of_three_that_are_stopped_for_a_while_come_back_and_lose_nothing() -> None:
    """The third may not go on alone: nothing has happened without them."""
    with ElasticJob(elastic_functions.train, 3, 6, {}, 0.1, silence_s=SILENCE_S) as job:
        for member in ("1.0", "2.0"):
            job.wait_message(member, lambda said: said[:2] == ("done", 30))
        for member in ("1.0", "2.0"):
            job.send_signal(member, signal.SIGSTOP)
        wait_until(lambda: {each for each, _ in job.coordinators[0].lost_members} == {"1.0", "2.0"})
        for member in ("1.0", "2.0"):
            job.send_signal(member, signal.SIGCONT)
        values = [value_of(job, member) for member in job.members]
        assert {membership.members for membership in job.coordinators[0].memberships} == {tuple(job.members)}
        assert sorted(job.coordinators[0].returned_members) == ["1.0", "2.0"]
        check_alike(values)
        for member in job.members:
            assert done_steps(job, member) == list(range(6 * NUM_STEPS)), "every step once"
        assert all(account.is_accounted and not account.lost.num_samples for account in values[0]["accounts"])
        check_exact(values[0], samples_that_count(job, {}))


def test_what_one_drew_in_an_epoch_that_the_others_never_formed_the_others_draw_so_too() -> None:
    """The others' batch was shared with one that is gone, and that one's in an epoch without it."""
    at = 5
    faults = {"3.0": (at - 1, "committed"), "0.0": (at - 1, "met in vain"), "1.0": (at - 1, "met in vain")}
    with ElasticJob(elastic_functions.train, 4, 1, faults, 0.5) as job:
        left = ["0.0", "1.0", "2.0"]
        values = [value_of(job, member) for member in left]
        epochs = [membership.members for membership in job.coordinators[0].memberships]
        assert epochs[:3] == [("0.0", "1.0", "2.0", "3.0"), tuple(left), tuple(left)]
        second, third = (membership.generation_id for membership in job.coordinators[0].memberships[1:3])
        drawn = {member: [said[2] for said, _ in job.messages(member) if said[:2] == ("in", at)] for member in left}
        assert drawn == {"0.0": [third], "1.0": [third], "2.0": [second]}
        assert [len(drawn_in(job, member, at)) for member in left] == [4, 4, 4], "no sample is lost"
        check_alike(values)
        check_exact(values[0], samples_that_count(job, {"3.0": faults["3.0"]}, ["3.0"]))
        assert all(account.is_accounted and not account.lost.num_samples for account in values[0]["accounts"])


def test_one_that_misses_what_it_has_to_do_is_not_waited_for_for_ever_and_all_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault of this system, as there was one: each waits for the others, and says so."""
    for module in (failure_detector, coordinator):
        monkeypatch.setattr(module, "REDUCTION_TIMEOUT", elastic_functions.SHORT_REDUCTION)
    with ElasticJob(elastic_functions.train, 3, 3, {"1.0": (16, "miss")}, 0.3) as job:
        values = [value_of(job, member) for member in job.members]
        assert len(job.coordinators[0].restarted_generations) == 1, "once is enough"
        assert {why for _, why in job.coordinators[0].lost_members} <= {"", REASON_ALL_DONE}, "nobody is put out"
        check_alike(values)
        for member in job.members:
            assert done_steps(job, member) == list(range(3 * NUM_STEPS)), "every step once"
        assert all(account.is_accounted and not account.lost.num_samples for account in values[0]["accounts"])
        check_exact(values[0], samples_that_count(job, {}))


def test_one_that_hangs_while_its_heartbeats_go_on_is_put_out_and_no_step_is_lost() -> None:
    at = 30  # of as many gaps between signs of progress as count as learnt: before, it would be given an hour
    faults = {"1.0": (at, "hang")}
    with ElasticJob(elastic_functions.train, 3, 5, faults, 0.1) as job:
        hangs_s = job.wait_message("1.0", lambda said: said == ("hangs",))
        goes_on_s = job.wait_message("0.0", lambda said: said[:2] == ("done", at))
        values = [value_of(job, member) for member in ("0.0", "2.0")]
        assert job.coordinators[0].lost_members[0] == ("1.0", "it made no progress while others waited for it")
        assert goes_on_s - hangs_s > PROGRESS_TIMEOUT.min_s - 1.0, "a step may take so long"
        job.send_signal("1.0", signal.SIGUSR1)
        assert "no member any more: it made no progress while others waited for it" in job.outcome("1.0").error
        assert done_steps(job, "1.0") == list(range(at)), "what it computes when it wakes changes nothing"
        check_alike(values)
        for member in ("0.0", "2.0"):
            assert done_steps(job, member) == list(range(5 * NUM_STEPS)), "every step once"
        lost = len(drawn_in(job, "1.0", at))
        assert [sum(each.lost.num_samples for each in value["accounts"]) for value in values] == [lost, lost]
        check_exact(values[0], samples_that_count(job, faults))


def test_training_goes_on_without_its_coordinator_and_the_standby_takes_over() -> None:
    with ElasticJob(elastic_functions.train, 3, 4, {"1.0": (24, "backward")}, 0.1, services=("standby",)) as job:
        job.wait_message("1.0", lambda said: said[:2] == ("done", 2))
        job.coordinators[0].close()
        job.wait_message("0.0", lambda said: said[:2] == ("done", 20))
        assert job.coordinators[0].memberships[0].members == ("0.0", "1.0", "2.0")
        values = [value_of(job, member) for member in ("0.0", "2.0")]
        check_alike(values)
        assert job.coordinators[1].memberships[-1].members == ("0.0", "2.0")
        assert job.coordinators[1].memberships[-1].generation_id[0] % 2 == 0, "a term of the standby's"
        assert done_steps(job, "0.0") == list(range(4 * NUM_STEPS))


def test_when_all_are_asked_to_leave_the_last_saves_the_state_and_another_run_goes_on_exactly(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with ElasticJob(elastic_functions.train_from_checkpoints, 2, first, 10_000, 0.02) as job:
        job.wait_message("0.0", lambda said: said[:2] == ("done", 7))
        for member in job.members:
            job.send_signal(member, signal.SIGTERM)
        left = [job.outcome(member) for member in job.members]
        assert [(each.exit_code, each.error) for each in left] == [(143, "")] * 2
        last = max(max(done_steps(job, member)) for member in job.members)
    with ElasticJob(elastic_functions.train_from_checkpoints, 2, first, last + 5) as job:
        job.wait_message("0.0", lambda said: said == ("loaded", last))
        again = [value_of(job, member)["parameters"] for member in job.members]
    with ElasticJob(elastic_functions.train_from_checkpoints, 1, second, last + 5) as job:
        whole = value_of(job, "0.0")["parameters"]
    for own, other, wanted in zip(*again, whole, strict=True):
        assert (own == other).all(), "bitwise"
        np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["sync", pytest.param("balanced", marks=pytest.mark.thorough)])
def test_where_too_few_are_left_one_saves_the_state_and_another_run_goes_on_exactly(tmp_path: Path, mode: str) -> None:
    """The step that one died in does not count: too few are left to do it again, and the next run does."""
    at, faults = 4, {"1.0": (4, "backward")}
    arguments = (elastic_functions.train_from_checkpoints, 3, str(tmp_path), 10_000, 0.0, mode, faults)
    with ElasticJob(*arguments, min_members=3, patience_s=15.0) as job:
        ends = {member: job.outcome(member) for member in ("0.0", "2.0")}
        before = samples_that_count(job, dict.fromkeys(job.members, (at, "")))
        assert [done_steps(job, member) for member in ends] == [list(range(1, at))] * 2
    (saved,) = store.list_checkpoints(tmp_path)
    assert saved.train_step == at - 1
    ended = "MembershipError: job is over: workers left: 2, expected at least 3, and no other came within 15 s. "
    where = f"The state after {at - 1} train steps is in {tmp_path}. Start the run again to go on from it."
    assert f"{ended}{where}" in ends["0.0"].error
    assert f"{ended}Start it again: worker 0.0 saves the state" in ends["2.0"].error
    with ElasticJob(elastic_functions.train_from_checkpoints, 2, str(tmp_path), NUM_STEPS, 0.0, mode) as job:
        job.wait_message("0.0", lambda said: said == ("loaded", at - 1))
        values = [value_of(job, member) for member in job.members]
        after = samples_that_count(job, {})
    check_alike(values)
    assert sorted(before) + sorted(after) == list(range(1, NUM_STEPS + 1))
    drawn = [sample for step in (*before.values(), *after.values()) for sample in step]
    assert sorted(drawn) == list(range(elastic_functions.NUM_SAMPLES)), "each sample of the epoch once, over both runs"
    check_exact(values[0], before | after)


def test_a_replacement_loads_no_checkpoint_and_counts_train_steps_as_the_others_do(tmp_path: Path) -> None:
    with ElasticJob(elastic_functions.train_from_checkpoints, 2, str(tmp_path), 1_000_000, 0.05) as job:
        job.wait_message("0.0", lambda said: said[:2] == ("done", 9))
        job.send_signal("1.0", signal.SIGKILL)
        newcomer = job.start_worker(1, 1)
        job.wait_message(newcomer, lambda said: said[0] == "loaded")
        job.wait_message(newcomer, lambda said: said[0] == "done")
        loaded = next(said[1] for said, _ in job.messages(newcomer) if said[0] == "loaded")
        assert loaded >= 9, "no checkpoint is so new"
        assert min(done_steps(job, newcomer)) == loaded + 1
        job.wait_message("0.0", lambda said: said == ("done", loaded + 1, ("0.0", newcomer)))
