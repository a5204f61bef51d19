"""Objects in memory with one counter of versions over all, and a history for watches that forgets."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
Name = tuple[str, str]
"""Namespace (empty for what has none) and name."""
ResourceKey = tuple[str, str]


@dataclass(slots=True)
class Item:
    """One version of an object; never changed once it is stored."""

    body: Object
    _text: bytes | None = None
    _bare: bytes | None = None

    @property
    def version(self) -> int:
        """Its resourceVersion."""
        return int(self.body["metadata"]["resourceVersion"])

    @property
    def text(self) -> bytes:
        """As JSON; made once, as many watches may send it."""
        if self._text is None:
            self._text = json.dumps(self.body, separators=(",", ":")).encode()
        return self._text

    @property
    def bare(self) -> bytes:
        """As JSON without its kind, as lists of what is built in have it."""
        if self._bare is None:
            bare = {key: value for key, value in self.body.items() if key not in ("apiVersion", "kind")}
            self._bare = json.dumps(bare, separators=(",", ":")).encode()
        return self._bare


@dataclass(slots=True)
class Change:
    """Something that happened to an object."""

    version: int
    before: Item | None
    after: Item | None
    """None: it is gone; `before` then has the version at which it went."""


@dataclass(slots=True)
class _Shelf:
    """All objects of one resource."""

    begun: int
    """The version when it was first asked for."""
    items: dict[Name, Item] = field(default_factory=dict)
    by_label: dict[tuple[str, str], dict[Name, None]] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Store:
    """All objects. One event loop."""

    def __init__(self, history: int = 100_000) -> None:
        """Watches can begin so many changes ago."""
        self.version = 1
        self._oldest = 0
        self._shelves: dict[ResourceKey, _Shelf] = {}
        self._history = history

    def oldest(self, resource: ResourceKey) -> int:
        """Watches from before this version have to begin anew."""
        return max(self._oldest, self._shelf(resource).begun)

    def get(self, resource: ResourceKey, name: Name) -> Item | None:
        """The object, as it is now."""
        return self._shelf(resource).items.get(name)

    def all(self, resource: ResourceKey, labels: Iterable[tuple[str, str]] = ()) -> list[tuple[Name, Item]]:
        """The objects that may have all these labels, by name."""
        shelf = self._shelf(resource)
        wanted = list(labels)
        if not wanted:
            return sorted(shelf.items.items())
        found = min((shelf.by_label.get(label, {}) for label in wanted), key=len)
        return sorted((name, shelf.items[name]) for name in found)

    def put(self, resource: ResourceKey, name: Name, body: Object) -> Item:
        """Store a new version."""
        shelf = self._shelf(resource)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        before, after = shelf.items.get(name), Item(body)
        self._unindex(shelf, name, before)
        shelf.items[name] = after
        for label in _labels(body):
            shelf.by_label.setdefault(label, {})[name] = None
        self._note(shelf, Change(self.version, before, after))
        return after

    def remove(self, resource: ResourceKey, name: Name, last: Object | None = None) -> Item:
        """Take it away; the last version of it that watches see."""
        shelf = self._shelf(resource)
        item = shelf.items.pop(name)
        self._unindex(shelf, name, item)
        self.version += 1
        body = json.loads(json.dumps(last or item.body))
        body["metadata"]["resourceVersion"] = str(self.version)
        gone = Item(body)
        self._note(shelf, Change(self.version, gone, None))
        return gone

    def compact(self) -> None:
        """Forget what has happened, as etcd does every five minutes."""
        self._oldest = self.version
        for shelf in self._shelves.values():
            shelf.history.clear()

    def since(self, resource: ResourceKey, version: int) -> list[Change]:
        """What happened after that version."""
        history = self._shelf(resource).history
        found = []
        for change in reversed(history):
            if change.version <= version:
                break
            found.append(change)
        return found[::-1]

    def changed(self, resource: ResourceKey) -> asyncio.Event:
        """Set at the next change, and replaced by another one then."""
        return self._shelf(resource).changed

    def _note(self, shelf: _Shelf, change: Change) -> None:
        shelf.history.append(change)
        if len(shelf.history) > self._history:
            self._oldest = max(self._oldest, shelf.history.popleft().version)
        shelf.changed.set()
        shelf.changed = asyncio.Event()

    def _unindex(self, shelf: _Shelf, name: Name, item: Item | None) -> None:
        for label in _labels(item.body) if item else ():
            names = shelf.by_label.get(label, {})
            names.pop(name, None)
            if not names:
                shelf.by_label.pop(label, None)

    def _shelf(self, resource: ResourceKey) -> _Shelf:
        return self._shelves.setdefault(resource, _Shelf(begun=self.version))


def _labels(body: Object) -> list[tuple[str, str]]:
    return list((body["metadata"].get("labels") or {}).items())
