"""What every member of a ring does with the parameter server, through the ring's first member, whoever that is.

The first member is the ring's representative. What it gets from the server all members take over or none does
(`Session.spread`); if it dies meanwhile, the next one says the same again: the server knows pushes, tickets and
meetings by ring and number, and answers as it did before. All members of a ring have the same gradients when they push,
so any of them can.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringweave import wire
from ringweave.comm import hearing
from ringweave.errors import WireError
from ringweave.membership.rules.records import Decree, slot_of
from ringweave.params import flat
from ringweave.params.flat import Flat
from ringweave.params.messages import Option
from ringweave.params.resuming import Ruled
from ringweave.params.ring.client import RingClient, Round
from ringweave.params.ring.member import Samples
from ringweave.params.rules.positions import united
from ringweave.training.elastic import exits
from ringweave.training.elastic.kept import Said
from ringweave.training.elastic.session import Session
from ringweave.training.rings.elastic import accounts
from ringweave.training.rings.elastic.changes import LocalChanges
from ringweave.training.rings.elastic.crew import RingCrew
from ringweave.training.rings.elastic.places import RingPlace
from ringweave.training.rings.resuming import Offered, Start

_FROZEN_S = 1.0
"""For so long members stand still where some come or go, at most, if there are enough of them."""


class RingMember:
    """One member of a ring."""

    def __init__(
        self,
        member: str,
        session: Callable[[], Session],
        crew: Callable[[], RingCrew],
        servers: Sequence[Callable[[], wire.Client]],
        parameters: Sequence[Tensor],
        *,
        local_steps: int = 0,
    ) -> None:
        """Talks to nobody yet.

        Args:
            member: Its name.
            session: Its part in the ring's membership, once there is one.
            crew: What it knows, likewise.
            servers: Each connects to one server of the job.
            parameters: Those that are trained, in the order of the server's.
            local_steps: Steps from one push to the next; 0 pushes the gradients of each step.
        """
        self._member, self._session, self._crew = member, session, crew
        self._servers, self._parameters = list(servers), list(parameters)
        specs = flat.specs_of([(str(index), each) for index, each in enumerate(parameters)])
        device = str(parameters[0].device)
        self._specs = specs
        self.landed = Flat(specs, device=device)
        """Where parameters arrive, on every member."""
        self._outbox: Flat | None = None
        self._inbox: Flat | None = self.landed if device == "cpu" else None
        self.changes = LocalChanges(self, crew, parameters, specs, local_steps) if local_steps else None
        """What the ring moves by itself, if it does."""
        self._lock = threading.Lock()
        self._client: RingClient | None = None
        self._frozen_since_s: float | None = None

    @torch.no_grad()
    def push_gradients(self, options: list[dict[str, Option]]) -> None:
        """Push the gradients that the ring agrees on, and take the next parameters."""
        crew = self._crew()
        place, samples = crew.ring_place, crew.samples
        absent = [index for index, each in enumerate(self._parameters) if each.grad is None]
        round_ = _round(place, samples, absent, options, accounts.testament(crew.books))

        def exchange() -> Said:
            self._outbox = self._outbox or Flat(self._specs)  # only the representative has it
            self._fill(self._outbox)
            return {"version": self.exchange(round_, self._outbox)}

        said = self.spread(exchange, self.landed.pieces)
        self._take_over(said["version"])
        crew.ring_place.num_pushed += 1
        samples.clear()

    def take(self, epoch: int, wanted: int, total: int, least: int) -> tuple[int, int]:
        """The ring's next ticket, as (first, how many)."""
        place = self._crew().ring_place

        def ask() -> Said:
            number = place.num_tickets + 1
            first, count = self._client_of().take(epoch, wanted, total, least=least, number=number)
            return {"first": first, "count": count}

        said = self.spread(ask)
        place.num_tickets += 1
        return said["first"], said["count"]

    @property
    def beside(self) -> tuple[Tensor, ...]:
        """What a newcomer has to have beside model and optimizer: what the ring has pushed last."""
        return self.changes.outbox.pieces if self.changes is not None else ()

    def join(self) -> None:
        """This member has its ring's state from another one, as it was between two steps."""
        if self.changes is not None:
            self.changes.begin_anew()

    def send(self) -> None:
        """Between two steps: what the ring has to push begins to."""
        if self.changes is not None:
            self.changes.send()

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the newest parameters when the ring begins, or begins again, and its place as the server knows it."""

        def pull() -> Said:
            return self._begin(self._client_of())

        self._go_on(self.spread(pull, self.landed.pieces))

    @torch.no_grad()
    def resume(self, offered: Offered | None, num_samples: int) -> Ruled:
        """Agree with all rings on the checkpoint to go on from; epochs are of so many samples."""

        def agree() -> Said:
            client = self._client_of()
            own = (offered.train_step, offered.check) if offered else (0, "")
            ruled = client.offer(*own)
            if ruled.verdict == "give" and offered is not None:
                start = Start.of_state(offered.state, num_samples)
                client.restore(offered.content(), ruled, start.to_message(start.epoch))
                ruled = client.offer(*own)
            begun = self._begin(client) if ruled.verdict == "resumed" else {}
            return {"ruled": ruled.model_dump(), **begun}

        said = self.spread(agree, self.landed.pieces)
        if "place" in said:
            self._go_on(said)
        return Ruled(**said["ruled"])

    def has_begun(self) -> bool:
        """A ring has pushed: for all members of this one, or none, however late each of them asks."""
        return bool(self.spread(lambda: {"version": self._client_of().status().version})["version"])

    def connect(self) -> RingClient:
        """A connection for this member's ring, beside that of its representative."""
        return RingClient(self._servers, self._crew().ring_place.ring)

    def _begin(self, client: RingClient) -> Said:
        """Have the newest parameters land; where the ring stands."""
        seated = client.seek(slot_of(self._member)[0], begins=True)
        if self.changes is not None:  # of what those before have under way nothing will come
            client.leave(is_for_good=False)
        version = client.pull(seated.num_pushed, self._inbox_of().buffers())
        self._arrive()
        start = None
        if seated.resumed_seed is not None:
            start = {"epoch": seated.resumed_epoch, "done": seated.resumed, "seed": seated.resumed_seed}
        words = [seated.num_pushed, version, seated.num_tickets, seated.num_meetings, version, None, start]
        return {"place": words, "epoch": seated.epoch, "testament": seated.testament}

    def _go_on(self, said: Said) -> None:
        left = _said("testament of a ring", said["testament"], "what it has used up") if said["testament"] else {}
        self._session().change(lambda: self._crew().go_on(said["place"], said["epoch"], left))
        self._take_over(self._crew().ring_place.base_version)

    @torch.no_grad()
    def meet(self, epoch: int, said: Said, *, use_up: int | None = None) -> dict[int, Said]:
        """Where all rings meet and rest: what each of them says, and the same parameters for all.

        Args:
            epoch: That ends.
            said: What the others shall know of this ring.
            use_up: Samples of an epoch that was broken off: nobody gets further ones of it.
        """
        if self.changes is not None:
            self.changes.finish()
        place = self._crew().ring_place
        text = json.dumps(said)

        def gather() -> Said:
            client = self._client_of()
            if use_up is not None:
                client.take(epoch, use_up, use_up, number=place.num_tickets + 1, ended_epoch=epoch)
            client.leave(is_for_good=False)
            met = client.meet(place.num_meetings + 1, epoch, text)
            version = client.pull(place.num_pushed, self._inbox_of().buffers())
            client.meet(place.num_meetings + 2, epoch, "")  # nobody pushes before all have the same parameters
            self._arrive()
            return {"version": version, "met": {str(ring): each for ring, each in met.items()}}

        found = self.spread(gather, self.landed.pieces)
        self._take_over(found["version"])
        place.num_meetings += 2
        place.num_tickets += use_up is not None
        expected = "its account"
        return {int(ring): _said(f"what ring {ring} says", each, expected) for ring, each in found["met"].items()}

    def rest(self) -> None:
        """The ring computes nothing until it meets the others. Waits for no other member: it may have failed."""
        client = self._client
        if self.changes is not None:
            self.changes.give_up()
        if client is not None and self.is_first:
            if self.changes is not None:
                self.changes.wait_answered()
            client.leave(is_for_good=False)

    def pausing(self, decree: Decree) -> None:
        """The ring forms anew: its representative lets the server know that nobody has to wait for it."""
        if decree.members[0] == self._member:
            threading.Thread(target=self._pause, name="ringweave pause", daemon=True).start()

    def look(self, now_s: float, *, is_frozen: bool) -> None:
        """Called again and again: a ring that stands still since too few of it are heard holds nobody up either."""
        if not is_frozen:
            self._frozen_since_s = None
        elif self._frozen_since_s is None:
            self._frozen_since_s = now_s
        elif now_s - self._frozen_since_s > _FROZEN_S:
            self._frozen_since_s = math.inf  # once
            self.pausing(self._session().decree)

    def leave(self) -> None:
        """At the end of the process: the ring has done all there was to do, unless this one fails or is out."""
        session, client = self._session(), self._client
        has_failed = session.is_out or exits.has_failed()
        if client is not None and not has_failed and self.is_first:
            if self.changes is not None:
                self.changes.wait_answered()
            client.leave(is_for_good=True)

    def hang_up(self) -> None:
        """As the end of the process does, but with a goodbye."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _pause(self) -> None:
        try:
            self._client_of().pause()
        except WireError:
            return  # who waits for the ring waits a little longer

    @property
    def is_first(self) -> bool:
        """This member represents the ring."""
        return self._session().decree.members[0] == self._member

    def spread(self, fetch: Callable[[], Said], tensors: Sequence[Tensor] = ()) -> Said:
        """What the representative fetches from the server, on all members; none has it unless all have."""
        session, crew = self._session(), self._crew()
        if not self.is_first:  # it was, and one with a lower number has come
            self.hang_up()
        crew.is_spreading = True
        try:
            return session.spread(fetch, tensors)
        finally:
            crew.is_spreading = False

    def change(self, change: Callable[[], None]) -> None:
        """Do something that newcomers are told of, while nobody is asked for it."""
        self._session().change(change)

    def exchange(self, round_: Round, outbox: Flat) -> int:
        """Push, and have the parameters that follow land; their version. For the representative."""
        _, version = self._client_of().exchange(round_, outbox.buffers(), self._inbox_of().buffers())
        self._arrive()
        return version

    def push(self, round_: Round, outbox: Flat) -> None:
        """Push, and ask for nothing; likewise."""
        self._client_of().push(round_, outbox.buffers())

    def _client_of(self) -> RingClient:
        with self._lock:
            if self._client is None:
                ballot = lambda: self._session().decree.ballot  # noqa: E731 - each epoch has another
                self._client = RingClient(self._servers, self._crew().ring_place.ring, ballot=ballot, is_missed=True)
            return self._client

    def _inbox_of(self) -> Flat:
        """Where parameters come from the server; of the representative."""
        self._inbox = self._inbox or Flat(self._specs)
        return self._inbox

    def _arrive(self) -> None:
        """Parameters have come there."""
        if self._inbox is not None and self._inbox is not self.landed:
            self.landed.copy_(self._inbox)

    def _fill(self, outbox: Flat) -> None:
        for parameter, view in zip(self._parameters, outbox.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)

    def _take_over(self, version: int) -> None:
        torch._foreach_copy_(self._parameters, self.landed.views)
        place = self._crew().ring_place
        place.base_version = place.next_version = version
        if self.changes is not None:
            self.changes.begin_anew()


def _said(what: str, text: str, expected: str) -> Said:
    return hearing.read(text.encode(), what, hearing.an_object, expected=expected)


def _round(
    place: RingPlace, samples: Samples, absent: list[int], options: list[dict[str, Option]], testament: str
) -> Round:
    return Round(
        sequence=place.num_pushed + 1,
        base_version=place.base_version,
        content="gradient",
        num_samples=samples.num_samples,
        batch_share=samples.mean_share,
        absent=absent,
        options=options,
        testament=testament,
        num_batches=max(1, samples.num_batches),
        pass_number=samples.pass_number,
        epoch=samples.epoch,
        spans=united(samples.spans),
    )
