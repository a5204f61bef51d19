"""What becomes of one reduction, or of what is spread: from the first bucket to the commit that all members know of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringweave.membership.rules.follower import resolve
from ringweave.membership.rules.records import Decree
from ringweave.training.elastic import rows, seams
from ringweave.training.elastic.kept import Reduction, Room, Said, Spread
from ringweave.training.elastic.rows import Commit, Row
from ringweave.training.elastic.standing.footing import Footing

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What becomes of a reduction if it counts."""

    commit: Commit
    buffers: Sequence[tuple[Tensor, Tensor]]
    """(buffer of the model, what it becomes)."""


class Counting:
    """Of one member, through all epochs. Called without the lock."""

    def __init__(
        self, footing: Footing, buffers: Callable[[], list[Tensor]], *, is_mean: bool, num_parameters: int
    ) -> None:
        """`buffers` are tensors of the model that become those of the first member with every reduction."""
        self._footing, self._buffers, self._is_mean = footing, buffers, is_mean
        self._num_parameters = num_parameters
        self._room = Room()
        self._prepared: _Prepared | None = None
        self._is_settling = False
        """It counts, and the script does not have it yet; with the lock held."""
        self.source = 0
        """Rank of the member whose buffers all get."""

    # The thread that trains.

    def add(self, bucket: Tensor) -> torch.futures.Future[Tensor]:
        """One more bucket of this backward pass; the future has the mean once all of them count."""
        return self._hand_in(lambda reduction: reduction.add(bucket, self._room))

    def end_pass(self, used: int) -> torch.futures.Future[int]:
        """All buckets of this backward pass are there; the future has the parameters that any member has used."""

        def end(reduction: Reduction) -> torch.futures.Future[int]:
            footing = self._footing
            future = reduction.end(footing.crew.row(), used, self._room)
            footing.layout, footing.is_waiting = reduction.layout, True
            return future

        return self._hand_in(end)

    def _hand_in(self, hand_in: Callable[[Reduction], torch.futures.Future[_T]]) -> torch.futures.Future[_T]:
        footing = self._footing
        with footing.lock:
            footing.num_signs += 1
            reduction = self._present()
            future = hand_in(reduction)
            error, generation = footing.start_buckets(), footing.generation
            if footing.out is not None and footing.catching is None:
                reduction.fail(seams.error_of(footing.out))
            if reduction.is_whole:  # else nobody waits for it
                footing.lock.notify_all()
        footing.tell_broken(error, generation)
        return future

    def _present(self) -> Reduction:
        """What the script's backward pass is part of; with the lock held."""
        footing = self._footing
        if footing.catching is not None:
            return footing.catching.present()
        reduction = footing.reduction or Reduction(number=footing.where.committed + 1)
        assert isinstance(reduction, Reduction), "what is spread is waited for"
        footing.reduction = reduction
        return reduction

    def begin_spread(self, fetch: Callable[[], Said], tensors: Sequence[Tensor]) -> Spread:
        """Let the first member fetch it, for all; it is there once it counts."""
        footing = self._footing
        with footing.lock:
            footing.num_signs += 1
            spread = Spread(footing.where.committed + 1, fetch, tensors, lambda: footing.generation)
            footing.reduction, footing.is_waiting = spread, True
            footing.where = replace(footing.where, at_border=False)  # who joined now would have no part in it
            error, generation = footing.start_buckets(), footing.generation
            footing.lock.notify_all()
        footing.tell_broken(error, generation)
        return spread

    def wait_counted(self) -> None:
        """Until what was begun counts, and what came of it is there.

        Raises:
            MembershipError: It never will: this member was put out, or the job is over.
        """
        footing = self._footing
        with footing.bequeathing(), footing.lock:
            footing.lock.wait_for(lambda: not self._is_settling and (footing.reduction is None or footing.has_ended))
            if footing.reduction is not None or footing.refusal is not None:
                footing.raise_reason()

    # The session's own thread.

    def finish(self, reduction: Reduction | Spread, generation: int) -> None:
        """Sum what is left, hear that all members have all sums, and let them count."""
        footing = self._footing
        assert footing.decree is not None, "a group is up"
        try:
            if _is_nothing(reduction):
                reduction.wait()  # its script may be level by then, which the row says
            with footing.lock:
                row = self._row(reduction)
            said = footing.groups.exchange(rows.to_tensor(row, reduction.used, self._num_parameters))
            every, used = rows.of_tensor(said)
            commit = Commit(number=reduction.number, members=footing.decree.members, rows=every, used=used)
            reduction.wait()  # whatever comes after it the others wait for
            buffers = self._sync_buffers(self._buffers() if isinstance(reduction, Reduction) else ())
            with footing.lock:
                if generation != footing.generation:
                    return
                prepared = self._prepared = _Prepared(commit, buffers)
                footing.where = replace(footing.where, is_prepared=True)
                wants_stop = footing.wants_stop and row.may_stop
            stops = footing.groups.vote(is_for=wants_stop)
        except RuntimeError as error:
            footing.tell_broken(error, generation)
            return
        with footing.lock:
            if generation != footing.generation:
                return  # an order came first: what becomes of this is decided when the next epoch begins
            footing.stops = stops
            self._take(prepared, reduction)
        self._settle(prepared, reduction)

    def end(self, decree: Decree, generation: int) -> bool:
        """As an epoch begins: take over the results if one of the members may have, else be ready to reduce again.

        Returns:
            Whether the order still holds: this member may have promised to follow another one meanwhile.
        """
        footing = self._footing
        with footing.lock:
            reduction, resolution = footing.reduction, resolve(footing.standing(), decree)
        if reduction is not None:
            reduction.let_go()
        if resolution != "take":
            with footing.lock:
                if generation != footing.generation:
                    return False
                footing.where = replace(footing.where, is_prepared=False)
                if _is_nothing(reduction):
                    footing.reduction = None  # there will be another one
                return True
        prepared = self._prepared
        assert reduction is not None, "it was prepared"
        assert prepared is not None, "it was prepared"
        with footing.lock:
            if generation != footing.generation:
                return False
            self._take(prepared, reduction)
        self._settle(prepared, reduction)
        return True

    def _row(self, reduction: Reduction | Spread) -> Row:
        """What this member says of it; with the lock held."""
        if not _is_nothing(reduction):
            return reduction.row
        catching = self._footing.catching
        return Row(is_following=True, is_level=catching is not None and catching.say_level())

    def _take(self, prepared: _Prepared, reduction: Reduction | Spread) -> None:
        """It counts; with the lock held."""
        footing, commit = self._footing, prepared.commit
        if _is_nothing(reduction):
            self._keep(prepared, reduction)
            return
        footing.crew.withdraw()
        footing.crew.commit(commit)
        self._is_settling = True  # not before: what raises there is the end, and the script hears of it
        footing.reduction = None
        footing.where = replace(footing.where, committed=commit.number, is_prepared=False)
        footing.num_signs += 1
        footing.num_counted += 1
        footing.is_waiting = False  # the script goes on when it is settled, and is not woken before

    def _keep(self, prepared: _Prepared, reduction: Reduction) -> None:
        """It counts, and this member's script does it later; with the lock held."""
        footing, commit = self._footing, prepared.commit
        assert footing.catching is not None, "who takes part with nothing follows"
        is_level = footing.catching.keep(commit, reduction, prepared.buffers)
        footing.reduction = None
        footing.where = replace(
            footing.where,
            committed=commit.number,
            is_prepared=False,
            has_state=is_level,
            is_following=not is_level,
            at_border=False,
        )
        footing.num_signs += 1
        footing.lock.notify_all()

    def _settle(self, prepared: _Prepared, reduction: Reduction | Spread) -> None:
        """Hand what counts to the script, unless it does it later."""
        if _is_nothing(reduction):
            return
        try:
            for own, first in prepared.buffers:
                own.copy_(first)
            reduction.resolve(prepared.commit, is_mean=self._is_mean)
        except Exception as error:  # such as one of the device: the script is to hear of it, and not to wait
            reduction.fail(seams.refusal_of(error))
            raise
        finally:
            with self._footing.lock:
                self._is_settling = False
                self._footing.lock.notify_all()

    def _sync_buffers(self, buffers: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(buffer, that of the first member), for all of these."""
        found = []
        for buffer in buffers:
            first = buffer.detach().clone()
            dist.broadcast(first, self.source, group=self._footing.groups.reducing)
            found.append((buffer, first))
        return found


def _is_nothing(reduction: Reduction | Spread | None) -> TypeGuard[Reduction]:
    """Whether this member takes part in it with nothing."""
    return isinstance(reduction, Reduction) and reduction.is_nothing
