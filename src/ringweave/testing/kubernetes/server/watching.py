"""Watches: what happened since a version, line by line, with bookmarks; one that comes too late is told so with 410."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from ringweave.testing.kubernetes.server.refusing import Refused
from ringweave.testing.kubernetes.server.resources import Resource
from ringweave.testing.kubernetes.server.selecting import Selector
from ringweave.testing.kubernetes.server.store import Change, Item, Store

_LONGEST_S = 300.0


async def watch(
    store: Store, resource: Resource, selector: Selector, params: Mapping[str, str], bookmark_s: float
) -> AsyncIterator[bytes]:
    """The lines of a watch."""
    text = params.get("resourceVersion") or "0"
    version = int(text)
    deadline_s = asyncio.get_running_loop().time() + float(params.get("timeoutSeconds") or _LONGEST_S)
    wants_bookmarks = params.get("allowWatchBookmarks") in ("true", "1")
    if version == 0 or params.get("sendInitialEvents") == "true":
        for _, item in store.all(resource.key, selector.equal_labels):
            if selector.matches(item.body):
                yield _line("ADDED", item.text)
        version = store.version
        if params.get("sendInitialEvents") == "true":
            yield _bookmark(resource, version, is_end=True)
    while version >= store.oldest(resource.key):
        changed = store.changed(resource.key)
        for change in store.since(resource.key, version):
            version = change.version
            yield _change(change, selector)
        left_s = deadline_s - asyncio.get_running_loop().time()
        if left_s <= 0:
            return
        try:
            async with asyncio.timeout(min(left_s, bookmark_s)):
                await changed.wait()
        except TimeoutError:
            if wants_bookmarks:
                version = max(version, store.version) if not store.since(resource.key, version) else version
                yield _bookmark(resource, version)
    gone = Refused(410, "Expired", f"too old resource version: {version} ({store.oldest(resource.key)})")
    yield _line("ERROR", json.dumps(gone.answer()).encode())


def _change(change: Change, selector: Selector) -> bytes:
    """The line that tells it to somebody who sees only what the selector selects; empty where that is nothing."""
    before = change.before if change.before and selector.matches(change.before.body) else None
    after = change.after if change.after and selector.matches(change.after.body) else None
    if after is not None:
        return _line("MODIFIED" if before is not None else "ADDED", after.text)
    if before is None:
        return b""
    if change.after is None:
        return _line("DELETED", before.text)
    # It left the selection: the last that was seen of it, at the version at which it left.
    last = {**before.body, "metadata": {**before.body["metadata"], "resourceVersion": str(change.version)}}
    return _line("DELETED", Item(last).text)


def _bookmark(resource: Resource, version: int, *, is_end: bool = False) -> bytes:
    metadata: dict[str, object] = {"resourceVersion": str(version), "creationTimestamp": None}
    if is_end:
        metadata["annotations"] = {"k8s.io/initial-events-end": "true"}
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    return _line("BOOKMARK", json.dumps(body).encode())


def _line(kind: str, text: bytes) -> bytes:
    return b'{"type":"' + kind.encode() + b'","object":' + text + b"}\n"
