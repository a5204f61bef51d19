"""Which of a job's two coordinators decides, and which of its servers leads, as its events tell. Pure."""

from collections.abc import Iterable, Iterator

from ringweave.telemetry import Event

_FIRST_SERVER = 0


class Deciders:
    """Hears of one event after the other.

    A coordinator says each epoch that it forms, and one that takes over says once more the epoch that its members are
    in: so it is known who decides even where nobody comes or goes.
    """

    coordinator: int | None
    """Index of the one that decides; None before the first epoch."""
    server: int | None
    """Index of the one that leads; None of a job without one."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.coordinator = self.server = None
        self._last: dict[str, tuple[tuple[int, int], int]] = {}
        """Part of the job -> ballot of the epoch that was said last, and who said it."""

    def note(self, event: Event) -> bool:
        """Hear of an event; whether an epoch is new, and not one that is said again."""
        kind = event["kind"]
        if kind == "run_started":  # what was said in another attempt says nothing
            self._forget()
        elif kind == "epoch_begun":
            return self._note_epoch(event)
        elif kind == "server_started" and self.server is None:  # the first one leads until another says that it does
            self.server = _FIRST_SERVER
        elif kind == "params_led":
            self.server = event["server"]
        return False

    def _note_epoch(self, event: Event) -> bool:
        part, ballot = event.get("part", ""), (event["term"], event["number"])
        last, who = self._last.get(part, ((0, 0), 0))
        is_new = ballot > last
        self.coordinator = index_of(event["term"]) if is_new else 1 - who
        self._last[part] = (ballot, self.coordinator)
        return is_new


def heard(events: Iterable[Event]) -> Deciders:
    """Who decides and leads after these."""
    found = Deciders()
    for event in events:
        found.note(event)
    return found


def without_repeats(events: Iterable[Event]) -> Iterator[Event]:
    """These events but for epochs that are said once more: their newcomers have joined long ago."""
    known = Deciders()
    for event in events:
        if known.note(event) or event["kind"] != "epoch_begun":
            yield event


def num_changes(events: Iterable[Event]) -> int:
    """How often another coordinator came to decide, within an attempt."""
    known, found = Deciders(), 0
    for event in events:
        before = known.coordinator
        known.note(event)
        found += before is not None and known.coordinator not in (None, before)
    return found


def index_of(term: int) -> int:
    """The coordinator whose term it is: 0 has odd ones."""
    return (term + 1) % 2
