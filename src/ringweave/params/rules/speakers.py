"""Who speaks for a ring that may lose members. Pure.

A representative that was stopped or cut off for a while does not know that its ring has gone on with another one. What
it says late must not change what the ring holds: parameters that it asks for would take the place of those that the
other one computes on. So each says of which epoch of the ring's membership it is the first member, and who is of an
earlier one is not heard any more.
"""

from ringweave.errors import RefusedError, explain

Ballot = tuple[int, int]
"""Of an epoch of a ring's membership, as its coordinator has it: greater ones are later."""


class Speakers:
    """Of all rings. Those that lose no members never say of which epoch they are, and whoever is of them may speak."""

    def __init__(self) -> None:
        self._by_ring: dict[int, tuple[Ballot, str]] = {}

    def speak(self, ring: int, ballot: Ballot, name: str) -> None:
        """This process is the representative, in that epoch.

        Raises:
            RefusedError: There is a later one.
        """
        known = self._by_ring.get(ring)
        if known is not None and ballot < known[0]:
            raise self._refusal(ring, name)
        self._by_ring[ring] = (ballot, name)

    def is_heard(self, ring: int, name: str) -> bool:
        """Whether nobody of a later epoch has spoken for the ring."""
        return ring not in self._by_ring or self._by_ring[ring][1] == name

    def check(self, ring: int, name: str) -> None:
        """Make sure of that.

        Raises:
            RefusedError: Somebody has.
        """
        if not self.is_heard(ring, name):
            raise self._refusal(ring, name)

    def forget(self, ring: int) -> None:
        """The ring begins anew: its epochs may be counted from the beginning again."""
        self._by_ring.pop(ring, None)

    def _refusal(self, ring: int, name: str) -> RefusedError:
        return RefusedError(
            explain(
                f"representative of ring {ring}",
                got=name,
                expected=f"{self._by_ring[ring][1]}, which the ring has gone on with",
                do="It is no member any more: it ends, and is started again",
            )
        )
