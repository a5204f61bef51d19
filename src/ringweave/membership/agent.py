"""A member's own thread: beats, listens for orders, and finds another coordinator when its own is lost."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from ringweave import wire
from ringweave.errors import WireError
from ringweave.membership.asking import Question
from ringweave.membership.connecting import Connector
from ringweave.membership.messages import Accuse, Enter, Heartbeat, Leave, Listen, Stand, Told
from ringweave.membership.rules.contact import Contact
from ringweave.membership.rules.electing import Rejoining
from ringweave.membership.rules.follower import Follower, Form, Freeze, Out
from ringweave.membership.rules.records import Ballot, Decree, Standing
from ringweave.membership.rules.rhythm import BEAT_S
from ringweave.membership.rules.signs import Beat

CALL_S = 3.0
"""What is said takes no longer, or was not heard. That a coordinator is lost is noticed by heartbeats (`Contact`)."""
SEARCH_S = 30.0
"""How long a member that cannot go on without a coordinator looks for one. One whose epoch works needs none."""
_END_S = 5.0
_TAKE_OVER_S = 4.0
"""How long it waits for a standby to take over, before it asks the other one again."""
_DOUBT_S = 0.5
"""After which it asks the one that it has left whether it decides after all."""
_BREATH_S = 0.1
_MOMENT_S = 0.005
_IN_DOUBT = 0.5
"""Of the time that an answer may take: with less left the other coordinator is connected to, just in case."""
_MORE_PATIENCE = 2.0
"""With each address that does not answer: on a busy machine connecting takes longer than an answer."""


class Participant(Protocol):
    """The part of a process that trains, as the agent sees it. Called in the agent's thread: nothing here waits."""

    def freeze(self, *, is_urgent: bool) -> Standing | None:
        """Stand still, at once if it is urgent, and say where; None if that will be known later (`Agent.stand`)."""
        ...

    def standing(self) -> Standing:
        """Where it stands just now; only its name and what it has committed count."""
        ...

    def form(self, decree: Decree) -> None:
        """Go on in this epoch."""
        ...

    def end(self, out: Out) -> None:
        """Change nothing any more."""
        ...


class Agent:
    """Speaks for one member. `start` returns at once; all else happens in its threads."""

    def __init__(
        self,
        member: str,
        addresses: Sequence[tuple[str, int]],
        trust: wire.Trust,
        participant: Participant,
        beat: Callable[[], Beat],
        *,
        enter: Enter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`addresses` are where coordinators are, the one that decides first before the others; `beat` is sent.

        `enter` says whose membership is meant; None is the job's.
        """
        self._connector = Connector(addresses, trust)
        self._enter_as = enter or Enter()
        self._participant, self._beat, self._clock = participant, beat, clock
        self._follower = Follower(member)
        self._decree: Decree | None = None
        self._pending: Ballot | None = None
        self._is_settled = True
        self._accusation: Accuse | None = None
        self._is_leaving = False
        self._client: wire.Client | None = None
        self._decides = False
        self._contact = Contact(clock())
        self._last_beat = Beat()
        self._at = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=f"ringweave {name}", daemon=True)
            for run, name in ((self._listen, "orders"), (self._beat_on, "heartbeat"))
        ]

    def start(self) -> "Agent":
        """Ask to become a member."""
        for thread in self._threads:
            thread.start()
        return self

    def stand(self, standing: Standing) -> None:
        """Where this member stands, for the proposal that it had no answer to yet."""
        with self._lock:
            ballot, self._pending = self._pending, None
        if ballot is not None:
            self._say_stand(ballot, standing)

    def accuse(self, ballot: Ballot, suspects: Sequence[str]) -> None:
        """The epoch is broken. Said again to every other coordinator, until there is another epoch."""
        accusation = Accuse(ballot=ballot, suspects=list(suspects))
        if self._decree is None or ballot >= self._decree.ballot:
            self._accusation = accusation
        self._say(accusation)

    def leave(self, *, is_finished: bool) -> None:
        """This member goes: at the next border, or, finished, now; then it waits a little until it could say so."""
        leave = Leave(standing=self._participant.standing(), is_finished=is_finished)
        self._is_leaving = not is_finished
        deadline_s = self._clock() + _END_S
        while not self._say(leave) and is_finished and self._clock() < deadline_s and not self._stop.is_set():
            self._stop.wait(_BREATH_S)

    def close(self, timeout_s: float = _END_S, *, says_goodbye: bool = False) -> None:
        """End the threads, and the connection as the process's end would, or with a goodbye: this process goes on.

        Each of them within so many seconds.
        """
        self._stop.set()
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close() if says_goodbye else client.hang_up()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout_s)

    def _say_stand(self, ballot: Ballot, standing: Standing) -> None:
        self._say(Stand(ballot=ballot, standing=standing))

    def _say(self, message: wire.Message) -> bool:
        """Whether it has arrived. If not, the connection is given up: whoever is asked next starts afresh."""
        client = self._client
        if client is None:
            return False
        try:
            client.call(message, timeout_s=CALL_S)
        except WireError:
            self._drop(client)
            return False
        return True

    def _say_again(self) -> None:
        """What a coordinator that was lost may not have heard."""
        if self._accusation is not None:
            self._say(self._accusation)
        if self._is_leaving:
            self._say(Leave(standing=self._participant.standing(), is_finished=False))

    def _run(self, run: Callable[[], None]) -> None:
        """What a thread does; if it fails this member goes, for others would wait for it for ever."""
        try:
            run()
        except Exception as error:
            if not self._stop.is_set():
                self._stop.set()
                self._participant.end(Out(reason=f"its agent failed: {error!r}", is_end=False))

    def _beat_on(self) -> None:
        """One heartbeat after the other; a coordinator that leaves one unanswered for too long is given up."""
        asked: tuple[wire.Client, wire.Pending] | None = None
        while not self._stop.wait(self._nap_s(is_asking=asked is not None)):
            with self._lock:
                self._last_beat = self._contact.look(self._beat(), self._clock())
            client = self._client
            if client is None:
                asked = None
                continue
            try:
                if asked is not None and asked[0] is client:
                    if not asked[1].done:
                        self._check_silence(client)
                        continue
                    asked[1].wait()
                    self._connector.forget()
                    with self._lock:
                        self._contact.note_answer(self._clock(), decides=self._decides)
                asked = client, client.start(Heartbeat(beat=self._last_beat), timeout_s=2 * CALL_S)
            except WireError:
                self._drop(client)

    def _nap_s(self, *, is_asking: bool) -> float:
        with self._lock:
            left_s = self._contact.left_s(self._clock()) + _MOMENT_S if is_asking else BEAT_S
        return min(BEAT_S, left_s)

    def _check_silence(self, client: wire.Client) -> None:
        with self._lock:
            left_s, patience_s = self._contact.left_s(self._clock()), self._contact.patience_s
        if left_s == 0.0:
            self._drop(client)
        elif self._decides and left_s < _IN_DOUBT * patience_s:
            self._connector.prepare(self._at + 1, patience_s)

    def _listen(self) -> None:
        serial = 0
        while not self._stop.is_set():
            client = self._client
            if client is None:
                client, serial = self._connect(), 0
                if client is None:
                    continue
                self._say_again()
            try:
                told = client.call(Listen(serial=serial), timeout_s=2 * CALL_S).message
            except WireError:
                self._drop(client)
                continue
            assert isinstance(told, Told), "the class of the reply"
            if not told.is_active:  # it has heard that another one decides
                self._drop(client)
                continue
            serial = told.serial
            self._obey(told)

    def _obey(self, told: Told) -> None:
        for action in self._follower.take(told.order):
            match action:
                case Freeze():
                    self._freeze(action)
                case Form():
                    self._decree, self._is_settled, self._accusation = action.decree, True, None
                    self._participant.form(action.decree)
                case Out():
                    self._stop.set()
                    self._participant.end(action)

    def _freeze(self, freeze: Freeze) -> None:
        with self._lock:
            self._pending, self._is_settled = freeze.ballot, False
        standing = self._participant.freeze(is_urgent=freeze.is_urgent)
        if standing is not None:
            self.stand(standing)

    def _drop(self, client: wire.Client) -> None:
        with self._lock:
            if self._client is client:
                self._client, self._decides = None, False
        client.close()

    def _connect(self) -> wire.Client | None:
        """Enter at one of the addresses; None if the search was ended or has failed.

        Who has lost a coordinator begins with the other one: it takes over, or the one that was lost is asked again.
        """
        since_s = self._clock()
        reason = "no coordinator answers"
        self._at += self._decree is not None
        patience_s = CALL_S if self._decree is None else self._patience_s
        while not self._stop.is_set() and self._clock() - since_s < SEARCH_S:
            if self._decree is not None and self._is_settled and self._accusation is None:
                since_s = self._clock()  # training goes on without
            try:
                client = self._enter(min(CALL_S, patience_s))
            except WireError as error:
                reason = str(error)
            else:
                if client is not None:
                    return client
            self._at += 1
            patience_s *= _MORE_PATIENCE
            self._stop.wait(_BREATH_S)
        if not self._stop.is_set():
            self._stop.set()
            self._participant.end(Out(reason=f"no coordinator within {SEARCH_S:g} s: {reason}", is_end=False))
        return None

    def _enter(self, patience_s: float) -> wire.Client | None:
        """Become a member there, or go on as one; None if it is a standby that does not decide (yet)."""
        client = self._connector.connect(self._at, patience_s)
        try:
            client.call(self._enter_as.model_copy(update={"rejoining": self._rejoining()}), timeout_s=patience_s)
            with self._lock:
                self._contact.begin(self._clock())
                self._client = client
            if self._is_led_by(client, patience_s):
                return client
        except WireError:
            self._drop(client)
            raise
        self._drop(client)
        return None

    def _is_led_by(self, client: wire.Client, patience_s: float) -> bool:
        """Whether it decides, or comes to do so while this member waits; unless the one before decides after all."""
        since_s, decree = self._clock(), self._decree
        least_term, part = decree.ballot[0] if decree else 0, self._enter_as.part
        with Question(self._connector, self._at + 1, part=part, least_term=least_term, patience_s=patience_s) as before:
            while self._clock() - since_s < _TAKE_OVER_S and not before.is_yes:
                told = client.call(Listen(serial=0), timeout_s=2 * CALL_S).message
                assert isinstance(told, Told), "the class of the reply"
                if told.is_active:
                    with self._lock:
                        self._decides = True
                    return True
                if decree is None:  # a standby takes nobody in; it takes over what is there
                    return False
                if self._clock() - since_s > _DOUBT_S:
                    before.start_once()
                self._stop.wait(_BREATH_S)
        return False

    @property
    def _patience_s(self) -> float:
        with self._lock:
            return self._contact.patience_s

    def _rejoining(self) -> Rejoining | None:
        """None before the first epoch: then it is a newcomer like any other."""
        promised = self._follower.promised
        self._follower.forget_coordinator()
        if self._decree is None:
            return None
        standing = _in_short(self._participant.standing())
        decree = replace(self._decree, standings=tuple(map(_in_short, self._decree.standings)), finished=())
        with self._lock:
            lost_s, beat = self._contact.lost_s(self._clock()), self._last_beat
            patience_s = self._contact.patience_s
        return Rejoining(
            standing=standing,
            decree=decree,
            promised=promised,
            is_settled=self._is_settled and self._accusation is None,
            lost_s=lost_s,
            patience_s=patience_s,
            beat=beat,
        )


def _in_short(standing: Standing) -> Standing:
    """Without what coordinators only pass on."""
    return replace(standing, note="", layout="", sharing="")
