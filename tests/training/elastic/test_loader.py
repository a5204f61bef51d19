"""What the loader of an elastic job says and gives, with members that are not there."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ringweave.errors import TrainingError
from ringweave.planning.balancing import EpochOrder
from ringweave.training.data import order
from ringweave.training.data.shared_loader import SharedLoader
from ringweave.training.data.sources import OrderSource
from ringweave.training.elastic.accounting import DataProgress, EpochAccount
from ringweave.training.elastic.elastic_membership import ElasticMembership
from ringweave.training.elastic.retained_reductions import Commit, ReductionRow
from ringweave.training.elastic.share_table import ShareTable
from ringweave.training.gradients import SampleWeights
from tests.training import fakes

MEMBERS = ("0.0", "1.0")
NUM_SAMPLES, BATCH = 96, 12


def made(place: DataProgress) -> SharedLoader:
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=4)
    trainer, nothing = cast(Any, SimpleNamespace(progress=place, accounting=None)), cast(Any, None)
    membership = ElasticMembership(nothing, trainer, nothing, nothing, nothing, is_mean=True)
    weights = cast(Any, SimpleNamespace(fraction=0.25))
    return SharedLoader(loader, OrderSource(loader, order.read_loader(loader), 0, membership), weights, nothing)


class _Session:
    """A session whose members are always there."""

    has_stopped = False

    def __init__(self, job: "Job") -> None:
        self._job = job

    @property
    def num_committed(self) -> int:
        return self._job.num_reductions

    def pass_step_boundary(self, draw: Callable[[], None]) -> None:
        draw()

    def change_atomically(self, change: Callable[[], None]) -> None:
        change()

    def record_progress(self) -> None:
        pass


class Job:
    """The first of two members, whose steps count as soon as they are done."""

    def __init__(self, *, recomputes: bool = False) -> None:
        self.num_reductions = 0
        self.share_table = ShareTable(BATCH, is_balanced=False)
        trainer = fakes.trainer_state(MEMBERS[0], self.share_table, recomputes=recomputes)
        self.books, self.place = trainer.accounting, trainer.progress
        self.accounts: list[EpochAccount] = []
        self.change_members()
        loader = DataLoader(TensorDataset(torch.arange(NUM_SAMPLES)), batch_size=BATCH, shuffle=True)
        timer: Any = SimpleNamespace(begin_step=lambda: None, record_samples=lambda _: None)
        self.incomplete_step: Any = SimpleNamespace(restore=lambda: None)
        session: Any = _Session(self)
        membership = ElasticMembership(
            session, trainer, timer, self.incomplete_step, self.accounts.append, is_mean=True
        )
        self.source = OrderSource(loader, order.read_loader(loader), 3, membership)
        self.loader = SharedLoader(loader, self.source, SampleWeights(num_ranks=1, is_mean=True), timer)

    def change_members(self, members: tuple[str, ...] = MEMBERS) -> None:
        """What was read ahead is of no use any more."""
        alike = [None] * len(members)
        self.share_table.start_generation(self.place.num_drawn, members, alike, alike, [1.0] * len(members))

    def step(self, members: tuple[str, ...] = MEMBERS) -> None:
        rows = tuple(
            ReductionRow(account=self.books.account_of(each), num_planned=self.books.num_planned) for each in members
        )
        self.num_reductions += 1
        self.books.record_commit(Commit(number=self.num_reductions, members=members, rows=rows))
        self.place.num_since_commit = 0
        if self.books.missing:
            self.place.repeat_step(self.books.missing)
        else:
            self.place.committed = (self.place.epoch, self.place.position)

    def train(self, at: int = -1, then: Callable[[], object] = lambda: None) -> int:
        """One pass; after that step something else happens. How many steps it was of."""
        number = -1
        for number, _ in enumerate(self.loader):
            self.step()
            if number == at:
                then()
        return number + 1


def test_the_next_epoch_is_that_of_the_members_where_they_are_further() -> None:
    place = DataProgress()
    loader = made(place)
    assert loader.next_epoch == 0
    loader.set_epoch(2)
    assert loader.next_epoch == 2
    place.epoch = 5
    assert loader.next_epoch == 5


def test_it_says_of_itself_what_every_prepared_loader_does() -> None:
    loader = made(DataProgress())
    assert (loader.batch_size, loader.fraction, len(loader.dataset)) == (4, 0.25, 10)


def test_batches_go_on_where_they_were_when_members_change() -> None:
    job = Job()
    job.train(3, job.change_members)
    assert job.accounts[0].is_exact
    assert job.accounts[0].expected.num_samples == NUM_SAMPLES


@pytest.mark.parametrize("shift", [BATCH, -BATCH])
def test_a_place_that_is_not_where_the_members_are_is_found_out(shift: int) -> None:
    job = Job()

    def move() -> None:
        job.place.position += shift
        job.change_members()

    with pytest.raises(TrainingError, match=r"samples of worker 0\.0: 6 \(.*\), expected 6 \(.*bug of ringweave"):
        job.train(3, move)


@pytest.mark.parametrize("is_doubled", [True, False])
def test_a_batch_that_is_skipped_or_doubled_is_found_out(monkeypatch: pytest.MonkeyPatch, is_doubled: bool) -> None:
    job = Job()
    order_of = job.source._epoch_order

    def wrong(num_back: int = 0) -> EpochOrder:
        order = order_of(num_back)
        known = order.indices
        changed = np.append(known, known[-BATCH:]) if is_doubled else known[:-BATCH]
        return dataclasses.replace(order, indices=changed) if num_back else order

    monkeypatch.setattr(job.source, "_epoch_order", wrong)
    with pytest.raises(
        TrainingError, match=r"batches of epoch 0: SampleAccount\(.*, expected SampleAccount\(.*skipped or doubled"
    ):
        job.train(3, job.change_members)


def test_a_step_that_misses_samples_goes_back_and_hands_them_out_again() -> None:
    job, restored, seen = Job(recomputes=True), list[bool](), list[tuple[int, int, int]]()
    job.incomplete_step.restore = lambda: restored.append(True)
    for number, (batch,) in enumerate(job.loader):
        seen.append((len(batch), job.place.position, job.loader.num_train_steps))
        job.step(MEMBERS[:1] if number == 3 else MEMBERS)
        if number == 3:
            assert (job.place.position, job.place.committed) == (3 * BATCH, (0, 3 * BATCH))
            assert job.loader.misses_samples
            job.change_members(MEMBERS[:1])
    assert [length for length, _, _ in seen] == [6, 6, 6, 6, 6, 12, 12, 12, 12]
    assert [position // BATCH for _, position, _ in seen] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert [steps for _, _, steps in seen] == list(range(9)), "as the script counts them"
    assert restored == [True]
    assert job.accounts[0].is_exact


def test_what_the_script_advances_is_set_back_for_each_loss_in_one_step() -> None:
    job, restored = Job(recomputes=True), list[int]()
    for number, _ in enumerate(job.loader):
        job.incomplete_step.restore = lambda at=number: restored.append(at)  # pyrefly: ignore
        if number == 3:
            job.step(MEMBERS[:1])  # both have their parts of what is missing, and the second one is lost again
        else:
            job.step(MEMBERS[:1] if number == 4 else MEMBERS)
    assert restored == [3, 4]
    assert job.accounts[0].is_exact


def test_a_script_that_breaks_off_at_a_step_that_misses_samples_takes_it_without_them() -> None:
    job, scales = Job(recomputes=True), list[float]()
    job.incomplete_step.take_without_missing = scales.append  # pyrefly: ignore
    for number, _ in enumerate(job.loader):
        job.step(MEMBERS[:1] if number == 3 else MEMBERS)
        if number == 3:
            break
    assert scales == [2.0]
    assert (job.place.position, job.loader.num_train_steps) == (4 * BATCH, 4)
    account = job.books.epoch_account()
    assert account.is_accounted
    assert account.lost.num_samples == 6


def test_samples_that_were_given_in_the_place_of_others_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    batches = job.source._reader.batches

    def other(*args: Any) -> Any:
        for batch, own in batches(*args):
            yield batch, dataclasses.replace(own, indices=own.indices + 1)

    monkeypatch.setattr(job.source._reader, "batches", other)
    with pytest.raises(TrainingError, match=r"samples of worker 0\.0: .*this is a bug of ringweave"):
        job.train()


def test_batches_that_are_accumulated_over_the_end_of_an_epoch_are_no_error() -> None:
    job = Job()
    for _ in job.loader.epochs(2):
        for number, _ in enumerate(job.loader):
            if number != NUM_SAMPLES // BATCH - 1:
                job.step()
    assert [each.is_accounted for each in job.accounts] == [True, True]


def test_an_epoch_that_was_broken_off_is_not_in_the_account_of_the_next() -> None:
    job = Job()
    for epoch in job.loader.epochs(2):
        for _ in job.loader:
            job.step()
            if epoch == 0:
                break
    account = job.loader.account
    assert account is not None
    assert (account.epoch, account.expected.num_samples) == (1, NUM_SAMPLES)
    assert account.is_exact


def test_an_epoch_that_was_broken_off_and_is_named_again_begins_anew() -> None:
    job = Job()
    for _ in job.loader:
        job.step()
        break
    for _ in job.loader:  # the second one, whose last batch nothing came of
        if job.place.position > BATCH:
            break
        job.step()
    job.loader.set_epoch(1)
    assert job.train() == NUM_SAMPLES // BATCH
    account = job.accounts[0]
    assert (account.epoch, account.expected.num_samples, account.is_exact) == (1, NUM_SAMPLES, True)


def test_of_an_epoch_that_the_members_are_in_who_comes_later_gets_the_rest() -> None:
    job = Job()
    job.place.epoch, job.place.position = 1, 3 * BATCH
    job.books.open_epoch(1)
    for epoch in range(2):
        job.loader.set_epoch(epoch)
        job.train()
    assert [each.expected.num_samples for each in job.accounts] == [NUM_SAMPLES - 3 * BATCH]


def test_a_look_at_a_batch_is_refused_since_who_joins_could_not_have_it() -> None:
    job = Job()
    assert len(next(iter(job.loader))[0]) == BATCH // 2
    job.loader.set_epoch(0)
    expected = (
        r"pass of the loader of an elastic job: 'broken off before its first train step', expected train steps\. "
        r"Look at a batch of the DataLoader that prepare was given:"
    )
    with pytest.raises(TrainingError, match=expected):
        job.train()
