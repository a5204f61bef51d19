"""Patches: merge (RFC 7386), JSON (RFC 6902), and strategic merge for the lists that are merged by a key."""

from typing import Any

import jsonpatch

from ringweave.testing.kubernetes.server.refusing import Refused

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
_KEYS = {"conditions": "type", "containers": "name", "volumes": "name", "env": "name", "ownerReferences": "uid"}


def patched(body: dict[str, Any], patch: Any, content_type: str, *, is_custom: bool) -> dict[str, Any]:
    """The object with the patch applied; the one given stays as it is.

    Raises:
        Refused: The patch cannot be applied, or is of a kind that is not served.
    """
    if content_type == MERGE:
        return merged(body, patch)
    if content_type == STRATEGIC and not is_custom:
        return merged(body, patch, by_key=True)
    if content_type == JSON:
        try:
            return jsonpatch.apply_patch(body, patch)
        except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException) as error:
            raise Refused(
                422, "Invalid", f"the server rejected our request due to an error in our request: {error}"
            ) from error
    raise Refused(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {content_type}")


def merged(value: Any, patch: Any, *, by_key: bool = False) -> Any:
    """The value with the patch merged into it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        if item is None:
            result.pop(key, None)
        elif by_key and key in _KEYS and isinstance(item, list):
            result[key] = _merged_list(result.get(key) or [], item, _KEYS[key])
        elif by_key and key == "finalizers":
            result[key] = list(dict.fromkeys([*(result.get(key) or []), *item]))
        else:
            result[key] = merged(result.get(key), item, by_key=by_key)
    return result


def _merged_list(values: list[Any], patches: list[Any], key: str) -> list[Any]:
    result = list(values)
    for patch in patches:
        place = next((index for index, item in enumerate(result) if item.get(key) == patch.get(key)), None)
        if patch.get("$patch") == "delete":
            result = [item for item in result if item.get(key) != patch.get(key)]
        elif place is None:
            result.append(patch)
        else:
            result[place] = merged(result[place], patch, by_key=True)
    return result
