"""Label and field selectors of the fake API server."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.kubernetes.api_failures import ApiFailure

_SET_PATTERN = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_SELECTABLE_FIELDS = {
    "": ("metadata.name", "metadata.namespace"),
    "pods": ("metadata.name", "metadata.namespace", "spec.nodeName", "spec.restartPolicy", "status.phase"),
    "events": ("metadata.name", "metadata.namespace", "reason", "type", "involvedObject.name", "involvedObject.uid"),
    "secrets": ("metadata.name", "metadata.namespace", "type"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectSelector:
    """Selector of a list or a watch."""

    equal_labels: tuple[tuple[str, str], ...]
    tests: tuple[Callable[[Mapping[str, Any]], bool], ...]

    def matches(self, body: Mapping[str, Any]) -> bool:
        """Return whether the object is selected."""
        return all(test(body) for test in self.tests)


def parse_selector(plural: str, labels: str, fields: str, namespace: str) -> ObjectSelector:
    """Parse the selectors of a request.

    Raises:
        ApiFailure: It cannot be parsed, or names a field that is not selectable.
    """
    equal: list[tuple[str, str]] = []
    tests: list[Callable[[Mapping[str, Any]], bool]] = []
    if namespace:
        tests.append(lambda body: body["metadata"].get("namespace") == namespace)
    for part in _split_selector(labels):
        test, pair = _label_test(part)
        tests.append(test)
        equal += [pair] if pair else []
    tests += [_field_test(plural, part) for part in _split_selector(fields)]
    return ObjectSelector(equal_labels=tuple(equal), tests=tuple(tests))


def _split_selector(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _label_test(part: str) -> tuple[Callable[[Mapping[str, Any]], bool], tuple[str, str] | None]:
    def labels(body: Mapping[str, Any]) -> Mapping[str, str]:
        return body["metadata"].get("labels") or {}

    if match := _SET_PATTERN.match(part):
        key, how, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
        if how == "in":
            return lambda body: labels(body).get(key) in values, None
        return lambda body: labels(body).get(key) not in values, None
    if "!=" in part:
        key, value = (side.strip() for side in part.split("!=", 1))
        return lambda body: labels(body).get(key) != value, None
    if "=" in part:
        key, value = (side.strip() for side in part.replace("==", "=").split("=", 1))
        return lambda body: labels(body).get(key) == value, (key, value)
    key = part.strip()
    if key.startswith("!"):
        return lambda body: key[1:] not in labels(body), None
    return lambda body: key in labels(body), None


def _field_test(plural: str, part: str) -> Callable[[Mapping[str, Any]], bool]:
    is_not = "!=" in part
    path, value = (side.strip() for side in part.replace("!=", "=").replace("==", "=").split("=", 1))
    allowed = _SELECTABLE_FIELDS.get(plural, _SELECTABLE_FIELDS[""])
    if path not in allowed:
        raise ApiFailure(400, "BadRequest", f"field label not supported: {path}")

    def test(body: Mapping[str, Any]) -> bool:
        found: Any = body
        for key in path.split("."):
            found = (found or {}).get(key, "")
        return (found == value) is not is_not

    return test
