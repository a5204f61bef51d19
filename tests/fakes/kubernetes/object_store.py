"""Objects in memory with one version counter and a bounded history for watches."""

import asyncio
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
ObjectName = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""
ResourceKey = tuple[str, str]


@dataclass(slots=True)
class StoredObject:
    """Version of an object; immutable once stored."""

    body: Object
    _text: bytes | None = None
    _bare: bytes | None = None

    @property
    def version(self) -> int:
        """The resourceVersion."""
        return int(self.body["metadata"]["resourceVersion"])

    @property
    def text(self) -> bytes:
        """JSON text, made once for all watches."""
        if self._text is None:
            self._text = json.dumps(self.body, separators=(",", ":")).encode()
        return self._text

    @property
    def bare(self) -> bytes:
        """JSON text without kind, as in lists of built-in resources."""
        if self._bare is None:
            bare = {key: value for key, value in self.body.items() if key not in ("apiVersion", "kind")}
            self._bare = json.dumps(bare, separators=(",", ":")).encode()
        return self._bare


@dataclass(slots=True)
class StoreChange:
    """Change of an object."""

    version: int
    before: StoredObject | None
    after: StoredObject | None
    """None: deleted; then `before` has the version of the deletion."""


@dataclass(slots=True)
class _ResourceObjects:
    """Objects of one resource."""

    first_version: int
    """Store version at its first use."""
    items: dict[ObjectName, StoredObject] = field(default_factory=dict)
    by_label: dict[tuple[str, str], dict[ObjectName, None]] = field(default_factory=dict)
    history: deque[StoreChange] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class ObjectStore:
    """Store of all objects, for one event loop."""

    def __init__(self, history: int = 100_000) -> None:
        """`history`: number of changes that a watch can go back."""
        self.version = 1
        self._oldest_version = 0
        self._by_resource: dict[ResourceKey, _ResourceObjects] = {}
        self._history = history

    def oldest_version(self, resource: ResourceKey) -> int:
        """Return the oldest version from which a watch can start."""
        return max(self._oldest_version, self._objects_of(resource).first_version)

    def get(self, resource: ResourceKey, name: ObjectName) -> StoredObject | None:
        """Return the current object."""
        return self._objects_of(resource).items.get(name)

    def list_objects(
        self, resource: ResourceKey, labels: Iterable[tuple[str, str]] = ()
    ) -> list[tuple[ObjectName, StoredObject]]:
        """Return the objects that may have all these labels, by name."""
        shelf = self._objects_of(resource)
        wanted = list(labels)
        if not wanted:
            return sorted(shelf.items.items())
        found = min((shelf.by_label.get(label, {}) for label in wanted), key=len)
        return sorted((name, shelf.items[name]) for name in found)

    def put(self, resource: ResourceKey, name: ObjectName, body: Object) -> StoredObject:
        """Store a new version."""
        shelf = self._objects_of(resource)
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        before, after = shelf.items.get(name), StoredObject(body)
        self._unindex(shelf, name, before)
        shelf.items[name] = after
        for label in _object_labels(body):
            shelf.by_label.setdefault(label, {})[name] = None
        self._append_history(shelf, StoreChange(self.version, before, after))
        return after

    def remove(self, resource: ResourceKey, name: ObjectName, last: Object | None = None) -> StoredObject:
        """Remove an object and return its last version for watches."""
        shelf = self._objects_of(resource)
        item = shelf.items.pop(name)
        self._unindex(shelf, name, item)
        self.version += 1
        body = json.loads(json.dumps(last or item.body))
        body["metadata"]["resourceVersion"] = str(self.version)
        gone = StoredObject(body)
        self._append_history(shelf, StoreChange(self.version, gone, None))
        return gone

    def compact(self) -> None:
        """Drop the history, as etcd does every five minutes."""
        self._oldest_version = self.version
        for shelf in self._by_resource.values():
            shelf.history.clear()

    def since(self, resource: ResourceKey, version: int) -> list[StoreChange]:
        """Return the changes after a version."""
        history = self._objects_of(resource).history
        found = []
        for change in reversed(history):
            if change.version <= version:
                break
            found.append(change)
        return found[::-1]

    def change_event(self, resource: ResourceKey) -> asyncio.Event:
        """Return the event that the next change sets; then it is replaced by a new one."""
        return self._objects_of(resource).changed

    def _append_history(self, shelf: _ResourceObjects, change: StoreChange) -> None:
        shelf.history.append(change)
        if len(shelf.history) > self._history:
            self._oldest_version = max(self._oldest_version, shelf.history.popleft().version)
        shelf.changed.set()
        shelf.changed = asyncio.Event()

    def _unindex(self, shelf: _ResourceObjects, name: ObjectName, item: StoredObject | None) -> None:
        for label in _object_labels(item.body) if item else ():
            names = shelf.by_label.get(label, {})
            names.pop(name, None)
            if not names:
                shelf.by_label.pop(label, None)

    def _objects_of(self, resource: ResourceKey) -> _ResourceObjects:
        return self._by_resource.setdefault(resource, _ResourceObjects(first_version=self.version))


def _object_labels(body: Object) -> list[tuple[str, str]]:
    return list((body["metadata"].get("labels") or {}).items())
