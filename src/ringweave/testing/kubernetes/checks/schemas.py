"""Structural schemas: defaults, pruning and validation, in that order, as the API server treats custom resources."""

import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
META = ("apiVersion", "kind", "metadata")


def with_defaults(schema: Schema, value: Any) -> Any:
    """The value with what is missing filled in."""
    if isinstance(value, dict):
        filled = dict(value)
        for key, field in schema.get("properties", {}).items():
            if key not in filled and "default" in field:
                filled[key] = field["default"]
            if key in filled:
                filled[key] = with_defaults(field, filled[key])
        return filled
    if isinstance(value, list) and "items" in schema:
        return [with_defaults(schema["items"], item) for item in value]
    return value


def pruned(schema: Schema, value: Any, *, unknown: list[str], path: str = "", is_root: bool = False) -> Any:
    """The value without what the schema does not know; its paths are added to `unknown`."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, dict) and (schema.get("type") == "object"):
        kept = {}
        fields, free = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            where = f"{path}.{key}" if path else key
            if is_root and key in META:
                kept[key] = item
            elif key in fields:
                kept[key] = pruned(fields[key], item, unknown=unknown, path=where)
            elif isinstance(free, dict):
                kept[key] = pruned(free, item, unknown=unknown, path=where)
            else:
                unknown.append(where)
        return kept
    if isinstance(value, list) and "items" in schema:
        return [
            pruned(schema["items"], item, unknown=unknown, path=f"{path}[{index}]") for index, item in enumerate(value)
        ]
    return value


def problems(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """What is wrong with the value, in the API server's words."""
    kind = schema.get("type")
    if value is None:
        if not schema.get("nullable"):
            yield f'{path}: Invalid value: "null": {path} in body must be of type {kind}: "null"'
        return
    if kind and not _is_of(kind, value):
        yield f'{path}: Invalid value: "{_type_of(value)}": {path} in body must be of type {kind}: "{_type_of(value)}"'
        return
    if isinstance(value, dict):
        yield from _object_problems(schema, value, path)
    elif isinstance(value, list):
        yield from _list_problems(schema, value, path)
    else:
        yield from _scalar_problems(schema, value, path)


def _object_problems(schema: Schema, value: dict[str, Any], path: str) -> Iterator[str]:
    for key in schema.get("required", ()):
        if key not in value:
            yield f"{_join(path, key)}: Required value"
    for key, item in value.items():
        field = schema.get("properties", {}).get(key)
        if field is not None:
            yield from problems(field, item, _join(path, key))


def _list_problems(schema: Schema, value: list[Any], path: str) -> Iterator[str]:
    if len(value) > schema.get("maxItems", len(value)):
        yield f"{path}: Too many: {len(value)}: must have at most {schema['maxItems']} items"
    if len(value) < schema.get("minItems", 0):
        yield f"{path}: Invalid value: {len(value)}: {path} in body should have at least {schema['minItems']} items"
    for index, item in enumerate(value):
        yield from problems(schema.get("items", {}), item, f"{path}[{index}]")
    if schema.get("x-kubernetes-list-type") == "map":
        keys = schema["x-kubernetes-list-map-keys"]
        seen = set()
        for index, item in enumerate(value):
            named = tuple(item.get(key) if isinstance(item, dict) else None for key in keys)
            if named in seen:
                yield f"{path}[{index}]: Duplicate value: {dict(zip(keys, named, strict=True))}"
            seen.add(named)


def _scalar_problems(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(f'"{item}"' for item in schema["enum"])
        yield f'{path}: Unsupported value: "{value}": supported values: {allowed}'
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{path}: Too long: may not be more than {schema['maxLength']} bytes"
        if len(value) < schema.get("minLength", 0):
            at_least = f"should be at least {schema['minLength']} chars long"
            yield f'{path}: Invalid value: "{value}": {path} in body {at_least}'
        if "pattern" in schema and not re.search(_as_python(schema["pattern"]), value, re.ASCII):
            yield f"{path}: Invalid value: \"{value}\": {path} in body should match '{schema['pattern']}'"
    elif not isinstance(value, bool):
        if value < schema.get("minimum", value):
            least = f"should be greater than or equal to {schema['minimum']}"
            yield f"{path}: Invalid value: {value}: {path} in body {least}"
        if value > schema.get("maximum", value):
            most = f"should be less than or equal to {schema['maximum']}"
            yield f"{path}: Invalid value: {value}: {path} in body {most}"


def definition_problems(schema: Schema, path: str) -> Iterator[str]:
    """Why a schema is not structural."""
    if "type" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        yield f"{path}.type: Required value: must not be empty for specified object fields"
    for key, field in schema.get("properties", {}).items():
        yield from definition_problems(field, f"{path}.properties[{key}]")
    if schema.get("type") == "array":
        if "items" not in schema:
            yield f"{path}.items: Required value: must be specified"
            return
        yield from definition_problems(schema["items"], f"{path}.items")
        for key in schema.get("x-kubernetes-list-map-keys", ()):
            item = schema["items"]
            if key not in item.get("required", ()) and "default" not in item["properties"][key]:
                yield f"{path}.items.properties[{key}].default: Required value: this property is in list-map-keys"
    if "default" in schema:
        yield from problems(schema, schema["default"], f"{path}.default")


def _is_of(kind: str, value: Any) -> bool:
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names.get(type(value), "null")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _as_python(pattern: str) -> str:
    """A pattern of the API server (RE2), whose categories of characters Python does not know."""
    return _CATEGORY.sub(lambda match: _characters(match[1]), pattern)


@functools.cache
def _characters(category: str) -> str:
    """Those of a category, as ranges for a class."""
    points = [point for point in range(sys.maxunicode + 1) if unicodedata.category(chr(point))[0] == category]
    runs = itertools.groupby(enumerate(points), lambda pair: pair[1] - pair[0])
    ranges = ([point for _, point in run] for _, run in runs)
    return "".join(rf"\U{each[0]:08x}-\U{each[-1]:08x}" for each in ranges)


_CATEGORY = re.compile(r"\\p\{([CZ])\}")
