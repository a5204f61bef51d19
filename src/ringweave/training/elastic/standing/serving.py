"""The session's own thread: it forms the epochs that are ordered, sums what is whole, and decides nothing."""

import threading

import torch

from ringweave.errors import MembershipError, RingweaveError, TrainingError
from ringweave.membership.rules.records import Decree
from ringweave.training.elastic.joining.backlog import Begun
from ringweave.training.elastic.joining.entering import Entrance
from ringweave.training.elastic.joining.reading import Reading
from ringweave.training.elastic.standing import notes
from ringweave.training.elastic.standing.counting import Counting
from ringweave.training.elastic.standing.following import Following
from ringweave.training.elastic.standing.footing import Footing


class Serving:
    """Of one member, until it changes nothing any more."""

    def __init__(self, footing: Footing, counting: Counting, following: Following) -> None:
        self._footing, self._counting, self._following = footing, counting, following
        self._thread = threading.Thread(target=self._serve, name="ringweave elastic", daemon=True)

    def start(self) -> None:
        """Begin to wait for orders."""
        self._thread.start()

    def wait_stopped(self, timeout_s: float) -> None:
        """Until the thread has ended, if it ever began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
        except Exception as error:  # whatever it is, nobody but the script can hear of it
            self._footing.refuse(error)

    def _serve_once(self) -> bool:
        """Wait for an order or a whole reduction, and do it; False at the end."""
        footing, following = self._footing, self._following
        with footing.lock:
            footing.lock.wait_for(lambda: footing.out or footing.next or self._is_ready() or following.is_due())
            if footing.out is not None:
                return False
            error = following.take_part() if footing.next is None and following.is_due() else None
            decree, footing.next = footing.next, None
            reduction, generation, num_aborts = footing.reduction, footing.generation, footing.groups.num_aborts
        with torch.inference_mode(mode=False), torch.no_grad():
            if error is not None:
                footing.tell_broken(error, generation)
            elif decree is not None:
                self._form(decree, generation, num_aborts)
            elif reduction is not None:
                self._counting.finish(reduction, generation)
        return True

    def _is_ready(self) -> bool:
        footing = self._footing
        return footing.is_up and footing.reduction is not None and footing.reduction.is_whole

    def _form(self, decree: Decree, generation: int, num_aborts: int) -> None:
        """Meet the members of the next epoch, and end what the one before left unfinished.

        In this order: what one of them takes over all of them have heard of then, and a coordinator that some of them
        ask next cannot have others of the epoch before do it again.
        """
        footing = self._footing
        told = [notes.note_of(each.member, each.note) for each in decree.standings]
        rank = decree.members.index(footing.member)
        footing.crew.check(decree, told)
        if decree.standings[rank].is_following and not footing.where.is_following:
            error = MembershipError("it begins anew: the state could not be read")
            footing.tell_broken(error, generation, decree)
            return
        entrance = Entrance.of(decree)
        begun = Begun(decree=decree, notes=told, is_newcomer=rank in entrance.newcomers)
        try:
            self._meet(begun, entrance, num_aborts)
        except TrainingError:
            raise  # this member's own: another epoch would not mend it
        except (RuntimeError, RingweaveError, OSError) as error:
            footing.tell_broken(error, generation, decree)
            return
        if self._counting.end(decree, generation) and self._begin(begun, entrance, generation):
            self._pass_state(begun, entrance)

    def _meet(self, begun: Begun, entrance: Entrance, num_aborts: int) -> None:
        """Form the groups, and read the state where the others wait for that."""
        crew, decree, told = self._footing.crew, begun.decree, begun.notes
        name, rank = _name_of(decree), decree.members.index(self._footing.member)
        if entrance.gives(rank):
            crew.capture()
        place, is_apart = told[0]["store"], bool(entrance.followers)
        self._footing.groups.form(place, name, rank, len(decree.members), num_aborts, is_apart=is_apart)
        if begun.is_newcomer and not entrance.layout:
            donor = decree.standings[entrance.donor(rank)].place
            reading = Reading(lambda: num_aborts != self._footing.groups.num_aborts)
            reading.run(lambda: crew.pull(donor, name, reading))

    def _begin(self, begun: Begun, entrance: Entrance, generation: int) -> bool:
        """The epoch stands, unless another order came first; whether it does."""
        footing = self._footing
        with footing.lock:
            if generation != footing.generation:
                return False
            footing.decree, self._counting.source = begun.decree, entrance.holders[0]
            self._following.begin(begun, entrance)
            footing.is_frozen, footing.is_ordered, footing.is_up, footing.stops = False, False, True, False
            footing.num_epochs += 1
            error = footing.start_buckets()
            footing.lock.notify_all()
        footing.tell_broken(error, generation)
        return True

    def _pass_state(self, begun: Begun, entrance: Entrance) -> None:
        """Let newcomers read the state, or begin to read it, while the others go on."""
        name, rank = _name_of(begun.decree), begun.decree.members.index(self._footing.member)
        if entrance.gives(rank):
            self._footing.crew.offer(name, is_lasting=bool(entrance.layout))
        if begun.is_newcomer and entrance.layout:
            self._following.read(begun, entrance.donor(rank), name)


def _name_of(decree: Decree) -> str:
    return "{}.{}".format(*decree.ballot)
